"""What a case does per second, below the ceilings: `python analysis/roofline.py [RECORDS…] [-o DIR]`."""

import sys

from figure import main

if __name__ == "__main__":
    main("roofline", sys.argv[1:])
