"""The main job on a laptop: train a small chat model as the target, then distill heads for it as
for any other.

    make demo                        # or: python flows/demo.py section.key=value …
    make demo HEADS=recurrent        # or: python flows/demo.py recurrent section.key=value …
    make demo METHOD=medusa-2        # or: python flows/demo.py medusa-2 section.key=value …

Without a Hub: seeds are bundled, the target is made here in about a minute. From then on nothing is
special: Ray starts locally, vLLM regenerates the conversations, heads are trained, checked and
reported: Medusa's or recurrent ones from the cached states, or with Medusa-2 from the text,
together with the backbone. All share target, seeds and text.
"""

import sys
from pathlib import Path

from pipeline.cli.ending import ends_well
from pipeline.config.load import load_config
from pipeline.demo.target import ensure_demo_target
from pipeline.errors import ConfigError
from pipeline.flow import run_flow

CONFIGS = Path(__file__).parent.parent / "configs"
DEMOS = {
    "medusa-1": "demo.yaml",
    "medusa-2": "demo-medusa-2.yaml",
    "recurrent": "demo-recurrent.yaml",
}


def main() -> None:
    words = sys.argv[1:]
    demo = words.pop(0) if words and "=" not in words[0] else "medusa-1"
    if demo not in DEMOS:
        raise ConfigError(
            f"There is no demo of '{demo}'.", "METHOD, HEADS", f"It is one of {', '.join(DEMOS)}."
        )
    config = load_config(CONFIGS / DEMOS[demo], words)
    run = run_flow(config, until="seeds", executor="inline")
    ensure_demo_target(run, config)
    run_flow(config)


if __name__ == "__main__":
    sys.exit(ends_well(main))
