"""Exports: what engines will find in the directory."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from pipeline.decoding.dynamic_tree import DynamicTree
from pipeline.errors import DataError
from pipeline.export.directory import read_tree
from pipeline.export.layout import read_layout
from tests.export.exports import (
    LM_HEAD_AND_FORMAT,
    TREE,
    config_of,
    heads_of,
    holds,
    read,
    weights_of,
    write,
)
from tests.heads.pruning import pruned

every_form = pytest.mark.parametrize(("lm_head", "format"), LM_HEAD_AND_FORMAT)


def config_in(directory):
    return json.loads((directory / "config.json").read_text())


@pytest.mark.parametrize("num_layers", [1, 2])
@every_form
def test_weights_and_config_are_what_engines_look_for(tmp_path, lm_head, format, num_layers):
    config = config_of(lm_head=lm_head, format=format, num_layers=num_layers)
    directory = write(tmp_path / "export", config)
    expected = {}
    for k in range(3):
        for layer in range(num_layers):
            expected[f"{k}.{layer}.linear.weight"] = (4, 4)
            expected[f"{k}.{layer}.linear.bias"] = (4,)
        if k == 0 or format != "shared":
            expected[f"{k}.{num_layers}.weight"] = (6, 4)
    assert {name: tuple(each.shape) for name, each in weights_of(directory).items()} == expected
    with safe_open(directory / "medusa_lm_head.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}  # for transformers' loaders
    content = config_in(directory)
    target = {"base_model_name_or_path": "owner/target", "hidden_size": 4, "vocab_size": 6}
    medusa = {"medusa_num_heads": 3, "medusa_num_layers": num_layers, "medusa_fc_bias": True}
    for_vllm = {"speculators_model_type": "medusa", "transformer_layer_config": {}}
    for_vllm["speculators_config"] = {
        "algorithm": "medusa",
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
        "verifier": {"name_or_path": "owner/target", "architectures": ["LlamaForCausalLM"]},
    }
    assert content.items() >= (target | medusa | for_vllm).items()
    assert (content["model_type"], content["dtype"]) == ("medusa", "float32")
    assert content.get("original_lm_head", False) is (format == "shared")
    assert "architectures" not in content  # TGI would switch Medusa off
    # vLLM folds every key with "num" and "heads" (or "layers") into one number, in file order.
    for part, expected in (("heads", 3), ("layers", num_layers)):
        assert {content[key] for key in content if "num" in key and part in key} == {expected}
    assert not {"num_hidden_layers", "num_attention_heads", "num_key_value_heads"} & content.keys()


@every_form
def test_engines_without_a_draft_vocabulary_guess_the_same_first(tmp_path, lm_head, format):
    config, tokens = config_of(lm_head=lm_head, format=format, vocab_size=9), [1, 2, 5, 7]
    heads = pruned(heads_of(config), tokens)
    layout = replace(config, shape=heads.shape)
    directory = write(tmp_path / "export", layout, heads)
    assert holds(directory, layout, heads) and config_in(directory)["vocab_size"] == 9
    assert read(directory).vocabulary.token_map.tolist() == tokens
    found, states_ND = weights_of(directory), torch.randn(50, 4)
    for k in range(1 if format == "shared" else 3):
        guessed = (states_ND @ found[f"{k}.1.weight"].T).argmax(1)
        ours = (states_ND @ heads.lm_head_of(k).T).argmax(1)
        assert torch.equal(guessed, torch.tensor(tokens)[ours])
    other = found | {"token_map": torch.tensor([1, 2, 5, 9])}
    save_file(other, directory / "medusa_lm_head.safetensors")
    with pytest.raises(DataError, match="draft vocabulary is not 4 of the target's 9"):
        read(directory)


def test_the_export_alone_starts_vllm_with_its_target(tmp_path):
    export = tmp_path / "export"
    apart = {"method": "medusa", "model": str(export), "num_speculative_tokens": 3}
    target, link, gone = (str(tmp_path / name) for name in ("target", "link", "gone"))
    Path(target).mkdir()
    Path(link).symlink_to(target)
    for named, served in (("owner/target", "owner/target"), (target, link)):
        assert config_of(named).engine_args(export, served) == {"model": str(export)}
    for named, served in ((gone, target), ("owner/target", target)):
        assert config_of(named).engine_args(export, served) == {"speculative_config": apart}


@settings(max_examples=25, deadline=None)
@given(
    num_heads=st.integers(1, 4),
    num_layers=st.integers(1, 3),
    hidden_size=st.integers(1, 5),
    vocab_size=st.integers(1, 7),
    lm_head_and_format=st.sampled_from(LM_HEAD_AND_FORMAT),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
)
def test_heads_of_any_shape_come_back_as_torch_rounds_them(
    tmp_path_factory, lm_head_and_format, dtype, **shape
):
    lm_head, format = lm_head_and_format
    config = config_of(lm_head=lm_head, format=format, dtype=dtype, **shape)
    directory = write(tmp_path_factory.mktemp("x") / "export", config, choices=[[0]])
    assert holds(directory, config, heads_of(config).to(getattr(torch, dtype)))


def test_a_dynamic_tree_comes_back(tmp_path):
    config = replace(config_of(), dynamic_tree=DynamicTree(4, 3, 2))
    directory = write(tmp_path / "export", config)
    assert read_layout(directory) == config and read_tree(directory) == DynamicTree(4, 3, 2)
    assert json.loads((directory / "medusa_choices.json").read_text()) == TREE
    assert read_tree(write(tmp_path / "static", config_of())) == tuple(map(tuple, TREE))
