"""Train a small chat model as the target, then distill heads for it, on a laptop.

    make demo                        # or: python flows/demo.py section.key=value …
    make demo HEADS=recurrent        # or: python flows/demo.py recurrent section.key=value …
    make demo HEADS=eagle3           # or: python flows/demo.py eagle3 section.key=value …
    make demo METHOD=medusa-2        # or: python flows/demo.py medusa-2 section.key=value …

No Hub is needed: the seeds are bundled, and the target is trained here in about a minute. The rest
is the usual flow: Ray starts locally, vLLM generates the conversations, and heads are trained,
checked and reported. The last demo trains Medusa heads and the backbone together, on the text; the
others train heads on cached states. All demos share the target, the seeds and the
generated text.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # the examples are no part of the package

from examples.demo_target.target import ensure_demo_target  # noqa: E402
from pipeline.cli.ending import ends_well  # noqa: E402
from pipeline.config.load import load_config  # noqa: E402
from pipeline.errors import ConfigError  # noqa: E402
from pipeline.flow import run_flow  # noqa: E402

DEMOS = {
    "medusa-1": "demo.yaml",
    "medusa-2": "demo-medusa-2.yaml",
    "recurrent": "demo-recurrent.yaml",
    "eagle3": "demo-eagle3.yaml",
}


def main() -> None:
    words = sys.argv[1:]
    demo = "medusa-1"
    if words and "=" not in words[0]:
        demo = words.pop(0)
    if demo not in DEMOS:
        fix = f"It is one of {', '.join(DEMOS)}."
        raise ConfigError(f"There is no demo of '{demo}'.", "METHOD, HEADS", fix)
    config = load_config(ROOT / "configs" / DEMOS[demo], words)
    run = run_flow(config, until="seeds", executor="inline")
    ensure_demo_target(run, config)
    run_flow(config)


if __name__ == "__main__":
    sys.exit(ends_well(main))
