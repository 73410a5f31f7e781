"""`python -m tba`."""

from tba.cli import main

main()
