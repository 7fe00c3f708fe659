"""Error against cost: `python analysis/accuracy.py [RECORDS…] [-o DIR]`."""

import sys

from figure import main

if __name__ == "__main__":
    main("accuracy", sys.argv[1:])
