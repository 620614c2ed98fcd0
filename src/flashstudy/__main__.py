"""`python -m flashstudy` is the command line."""

from flashstudy.cli import main

main()
