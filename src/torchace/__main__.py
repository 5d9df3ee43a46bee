"""`python -m torchace`."""

from torchace.lab.cli.app import main

main()
