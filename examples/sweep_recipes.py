"""Train three recipes on one feature cache, and compare their expected acceleration rates.

    python examples/sweep_recipes.py configs/demo.yaml STORE_DIR run.root=/tmp/sweep

Runs that name the same `run.store` share stage directories: text and states are made once, and only
training and calibration run three times. The rates are simulated on held-out text, and nothing is
decoded.
"""

import sys

from pipeline import load_config, run_flow

RECIPES = {
    "as-it-is": [],
    "fewer-heads": ["train.num_heads=2"],
    "even-weights": ["train.decay=1.0"],
}


def main(config: str, store: str, *overrides: str) -> None:
    print(f"{'recipe':<12} {'top-1 of each head':<24} expected acceleration rate")
    for name, changes in RECIPES.items():
        words = [
            *overrides,
            *changes,
            f"run.store={store}",
            f"run.name={name}",
            "calibrate.nodes=8",
        ]
        run = run_flow(load_config(config, words), until="calibrate", executor="inline", quiet=True)
        top1 = " ".join(f"{ranks[0]:.1%}" for ranks in run.accuracies())
        print(f"{name:<12} {top1:<24} {run.simulated_acceleration_rate(run.tree()):.2f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
