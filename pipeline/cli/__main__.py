"""Run `medusa-distill` as `python -m pipeline.cli`."""

from pipeline.cli.app import main

main()
