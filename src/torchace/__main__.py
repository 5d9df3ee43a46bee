"""`python -m torchace`."""

from torchace.cli import main

main()
