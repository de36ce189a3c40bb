"""The main job on a laptop: train a small chat model as the target, then distill heads for it as for any other.

    make demo                        # or: python flows/demo.py section.key=value …

Without a Hub: seeds are bundled, the target is made here in about a minute. From then on nothing is special: Ray
starts locally, vLLM regenerates the conversations, the states go to Parquet, heads are trained, checked and reported.
"""

import sys
from pathlib import Path

from pipeline.cli.app import ends_well
from pipeline.configuration import load_config
from pipeline.demo_target import ensure_demo_target
from pipeline.flow import run_flow

CONFIG = Path(__file__).parent.parent / "configs" / "demo.yaml"


def main() -> None:
    config = load_config(CONFIG, sys.argv[1:])
    run = run_flow(config, until="seeds", executor="inline")
    ensure_demo_target(run, config)
    run_flow(config)


if __name__ == "__main__":
    sys.exit(ends_well(main))
