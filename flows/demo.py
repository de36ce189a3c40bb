"""The main job on a laptop: train a small chat model as the target, then distill heads for it as for any other.

    make demo                        # or: python flows/demo.py section.key=value …
    make demo METHOD=medusa-2        # or: python flows/demo.py medusa-2 section.key=value …

Without a Hub: seeds are bundled, the target is made here in about a minute. From then on nothing is special: Ray
starts locally, vLLM regenerates the conversations, heads are trained, checked and reported: from the cached states, or
with Medusa-2 from the text, together with the backbone. Both share the target, the seeds and the text.
"""

import sys
from pathlib import Path

from pipeline.cli.app import ends_well
from pipeline.config.load import load_config
from pipeline.demo.target import ensure_demo_target
from pipeline.errors import ConfigError
from pipeline.flow import run_flow

CONFIGS = Path(__file__).parent.parent / "configs"
OF_METHOD = {"medusa-1": CONFIGS / "demo.yaml", "medusa-2": CONFIGS / "demo-medusa-2.yaml"}


def main() -> None:
    words = sys.argv[1:]
    method = words.pop(0) if words and "=" not in words[0] else "medusa-1"
    if method not in OF_METHOD:
        raise ConfigError(f"There is no method '{method}'.", "METHOD", f"It is one of {', '.join(OF_METHOD)}.")
    config = load_config(OF_METHOD[method], words)
    run = run_flow(config, until="seeds", executor="inline")
    ensure_demo_target(run, config)
    run_flow(config)


if __name__ == "__main__":
    sys.exit(ends_well(main))
