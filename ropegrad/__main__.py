"""`python -m ropegrad` is the command `ropegrad`."""

from ropegrad.cli import main

main()
