"""`python -m pipeline.cli` is `medusa-distill`."""

from pipeline.cli.app import main

main()
