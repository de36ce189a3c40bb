"""Distill heads for HuggingFaceH4/zephyr-7b-beta from conversations in which it writes both sides.

    python flows/distill_zephyr.py run.root=/mnt/runs
    ray job submit --working-dir . -- python flows/distill_zephyr.py run.root=/mnt/runs

The seeds are ShareGPT's and UltraChat's (paper 2.3.2). Every key of configs/zephyr-7b.yaml can be
overridden, including the target and the seeds. The same command continues an interrupted run.
"""

import sys
from pathlib import Path

from pipeline.cli.ending import ends_well
from pipeline.config.load import load_config
from pipeline.flow import run_flow

CONFIG = Path(__file__).parent.parent / "configs" / "zephyr-7b.yaml"
STAGES = (
    "seeds",
    "generate",
    "features",
    "train",
    "tuned-features",
    "calibrate",
    "export",
    "check",
    "push",
)


def main() -> None:
    run_flow(load_config(CONFIG, sys.argv[1:]), STAGES)


if __name__ == "__main__":
    sys.exit(ends_well(main))
