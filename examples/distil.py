"""Distil heads from Python: load a configuration, run it, read the report.

    python examples/distil.py configs/demo.yaml run.name=trial train.num_heads=4
    python examples/distil.py configs/demo.yaml --inline run.name=trial          # without Ray

The first argument is a configuration file; the others override its keys. The same command continues
an interrupted run.
"""

import sys

from pipeline import load_config, run_flow


def main(config: str, *words: str) -> None:
    overrides = [word for word in words if word != "--inline"]
    run = run_flow(
        load_config(config, overrides), executor="inline" if "--inline" in words else "ray"
    )
    native = run.report["check"]["native"]
    print(f"acceleration rate {native['acceleration_rate']:.2f}, speedup {native['speedup']:.2f}x")
    print(f"serve it: vllm serve {run.export}")


if __name__ == "__main__":
    main(*sys.argv[1:])
