"""Distill heads for Vicuna from its own answers to ShareGPT's questions (paper 3.2, appendix B).

    python flows/distill_vicuna.py vicuna-7b seeds.sources=ShareGPT.json run.root=/mnt/runs
    ray job submit --working-dir . -- python flows/distill_vicuna.py vicuna-33b run.root=/mnt/runs …

The first argument is the name of a configuration. The same command continues an interrupted run.
"""

import sys
from pathlib import Path

from pipeline.cli.ending import ends_well
from pipeline.config.load import load_config
from pipeline.errors import ConfigError
from pipeline.flow import run_flow

CONFIGS = Path(__file__).parent.parent / "configs"
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
    name, *overrides = sys.argv[1:] or ["vicuna-7b"]
    if "=" in name:
        raise ConfigError(
            "The first word names the configuration.",
            name,
            "Write vicuna-7b, -7b-medusa-1, -13b or -33b before the overrides.",
        )
    run_flow(load_config(CONFIGS / f"{name}.yaml", overrides), STAGES)


if __name__ == "__main__":
    sys.exit(ends_well(main))
