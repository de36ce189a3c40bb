from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Gemma2Config, LlamaConfig, MistralConfig, Qwen2Config

from pipeline.decoding.masks import TreeMasks, attention_windows
from pipeline.decoding.tree import Tree, cartesian_tree, greedy_tree
from pipeline.errors import ConfigError

TREES = [((0,),), cartesian_tree((2, 2)), greedy_tree([[0.5, 0.4, 0.1]] * 3, 11)]
LONGEST = 12


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(TREES), st.integers(1, LONGEST), st.one_of(st.none(), st.integers(1, 15)))
def test_a_row_sees_its_prefix_and_its_ancestors_within_the_window(choices, num_prefix, window):
    tree = Tree(choices)
    masks = TreeMasks(tree, {"any": window}, LONGEST, torch.float32, torch.device("cpu"))
    mask = masks.after([num_prefix])
    paths = [(), *tree.choices]
    assert mask.shape == (1, 1, len(paths), num_prefix + len(paths))
    for row, path in enumerate(paths):
        position = num_prefix + len(path)
        for column in range(mask.shape[-1]):
            other = None if column < num_prefix else paths[column - num_prefix]
            at = column if other is None else num_prefix + len(other)
            sees = (other is None or path[: len(other)] == other) and (
                window is None or position - at < window
            )
            assert mask[0, 0, row, column] == (0 if sees else torch.finfo(torch.float32).min)


def test_models_with_both_kinds_of_layers_get_a_mask_for_each():
    masks = TreeMasks(
        Tree(TREES[1]),
        {"full_attention": None, "sliding_attention": 3},
        9,
        torch.float32,
        torch.device("cpu"),
    )
    both = masks.after([6])
    assert set(both) == {"full_attention", "sliding_attention"}
    assert (both["full_attention"] == 0).sum() > (both["sliding_attention"] == 0).sum()


def test_windows_are_read_from_the_configuration():
    assert attention_windows(LlamaConfig()) == {"full_attention": None}
    assert attention_windows(MistralConfig(sliding_window=7)) == {"sliding_attention": 7}
    assert attention_windows(MistralConfig(sliding_window=None)) == {"full_attention": None}
    assert attention_windows(Qwen2Config(use_sliding_window=False, sliding_window=7)) == {
        "full_attention": None
    }
    assert attention_windows(Gemma2Config(sliding_window=7)) == {
        "sliding_attention": 7,
        "full_attention": None,
    }


@pytest.mark.parametrize("kind", ["linear_attention", "chunked_attention"])
def test_layers_in_which_a_tree_cannot_be_verified_are_refused(kind: str):
    config = LlamaConfig(
        num_hidden_layers=2, layer_types=["full_attention", kind], attention_chunk_size=4
    )
    with pytest.raises(ConfigError, match=kind):
        attention_windows(config)
