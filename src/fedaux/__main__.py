"""`python -m fedaux` is `fedaux`."""

from fedaux.cli import main

main()
