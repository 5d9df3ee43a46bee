"""`python -m torchace`."""

from torchace.lab.cli.main import main

main()
