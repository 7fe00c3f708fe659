"""The published records beside ours, and a prediction: `python analysis/standing.py [RECORDS…] [-o DIR]`."""

import sys

from figure import main

if __name__ == "__main__":
    main("standing", sys.argv[1:])
