"""Shares of the ceilings by case: `python analysis/shares.py [RECORDS…] [-o DIR]`."""

import sys

from figure import main

if __name__ == "__main__":
    main("shares", sys.argv[1:])
