"""Time against tokens: `python analysis/scaling.py [RECORDS…] [-o DIR]`."""

import sys

from figure import main

if __name__ == "__main__":
    main("scaling", sys.argv[1:])
