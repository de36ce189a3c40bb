"""Compare a tree of your own with the run's searched tree, without decoding.

    echo '[[0],[0,0],[1]]' > my_tree.json
    python examples/score_tree.py runs/demo my_tree.json

The file holds a JSON list of paths: the path [0, 2] is the third guess of head 1 after the best
guess of head 0. The expected acceleration rate comes from a replay of held-out text, as greedy
decoding would generate it.

To use the tree, run again with calibrate.choices=my_tree.json.
"""

import sys

from pipeline import load_tree, open_run


def main(run_directory: str, tree_file: str) -> None:
    run = open_run(run_directory)
    print(f"{'tree':<10} {'nodes':>5} {'rate':>8}")
    for name, tree in (("the run's", run.tree()), ("yours", load_tree(tree_file))):
        is_static = isinstance(tree, tuple)  # a dynamic tree has no paths
        nodes = len(tree) if is_static else tree.num_nodes
        print(f"{name:<10} {nodes:>5} {run.simulated_acceleration_rate(tree):>8.2f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
