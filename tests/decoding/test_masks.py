from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Gemma2Config, LlamaConfig, MistralConfig, Qwen2Config

from pipeline.decoding.masks import TreeMasks, attention_windows
from pipeline.decoding.tree import Tree, TreeRows, cartesian_tree
from tests.decoding.steps import random_trees

HIDDEN = torch.finfo(torch.float32).min
WINDOWS = {"full_attention": None, "sliding_attention": 3}


def expected_mask(paths: list, num_prefix: int, num_columns: int, window: int | None):
    """Build the mask by definition: a row sees its prefix and its ancestors in the window."""
    mask = torch.full((len(paths), num_columns), HIDDEN)
    for row, path in enumerate(paths):
        for column in range(num_prefix + len(paths)):
            position, is_above = column, True
            if column >= num_prefix:
                other = paths[column - num_prefix]
                position, is_above = num_prefix + len(other), path[: len(other)] == other
            distance = num_prefix + len(path) - position
            if is_above and (window is None or distance < window):
                mask[row, column] = 0
    return mask


@pytest.mark.parametrize("own_trees", [False, True])
@given(random_trees(), st.lists(st.integers(1, 12), min_size=1, max_size=3), st.data())
@settings(deadline=None, max_examples=40)
def test_rows_see_prefix_and_ancestors_within_the_window(own_trees, choices, lengths, data):
    window = data.draw(st.none() | st.integers(1, 15))
    rows = tree = Tree(choices)
    if own_trees:  # one per text
        parent, depth = tree.parent.expand(len(lengths), -1), tree.depth.expand(len(lengths), -1)
        rows = TreeRows(parent, depth, tree.max_depth)
    masks = TreeMasks({"any": window}, torch.float32)
    paths = [(), *tree.choices]
    longest = max(lengths) + len(paths)
    for columns in (longest, longest + 9):
        found = masks.masks_after(torch.tensor(lengths), columns, rows)
        expected = [expected_mask(paths, length, columns, window) for length in lengths]
        assert torch.equal(found, torch.stack(expected)[:, None])
    expected = [expected_mask(paths, length, longest, window) for length in lengths]
    found = masks.masks_of_step(lengths, rows)
    assert torch.equal(found, torch.stack(expected)[:, None])


def test_models_with_two_kinds_of_layers_get_two_masks():
    tree = Tree(cartesian_tree((2, 2)))
    prefix = torch.tensor([6]), 20, tree
    both = TreeMasks(WINDOWS, torch.float32).masks_after(*prefix)
    for kind, window in WINDOWS.items():
        alone = TreeMasks({kind: window}, torch.float32).masks_after(*prefix)
        assert torch.equal(both[kind], alone)


def test_windows_are_read_from_the_configuration():
    for config, windows in (
        (LlamaConfig(), {"full_attention": None}),
        (MistralConfig(sliding_window=7), {"sliding_attention": 7}),
        (MistralConfig(sliding_window=None), {"full_attention": None}),
        (Qwen2Config(use_sliding_window=False, sliding_window=7), {"full_attention": None}),
        (Gemma2Config(sliding_window=3), WINDOWS),
    ):
        assert attention_windows(config) == windows
