"""`python -m canter` is the `canter` command."""

from canter.app.cli import main

main()
