"""`python -m tba.cli`."""

from tba.cli import main

main()
