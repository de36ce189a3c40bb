"""Exports: what engines will find in the directory, and what never gets into it."""

from __future__ import annotations

import errno
import json
import resource
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from pipeline.checkpoints.layout import ExportConfig, check_num_heads, read_config
from pipeline.checkpoints.medusa import read_export, tensors_as_saved, verify_export, write_export
from pipeline.errors import ConfigError, DataError, EnvironmentFault

TREE = [[0], [1], [0, 0], [0, 1]]
TIED_AND_FORMAT = [(False, "expanded"), (True, "expanded"), (True, "shared")]


class TokenizerStub:
    def save_pretrained(self, directory: str) -> None:
        Path(directory, "tokenizer.json").write_text("{}")


def config_of(**changes) -> ExportConfig:
    return replace(ExportConfig("owner/target", hidden_size=4, vocab_size=6, num_heads=3, num_layers=1), **changes)


def heads_of(config: ExportConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random heads under the names of FACTS' table, written out here once more."""
    draw = torch.Generator().manual_seed(seed)
    shared = torch.randn(config.vocab_size, config.hidden_size, generator=draw)
    tensors = {}
    for k in range(config.num_heads):
        for layer in range(config.num_layers):
            size = config.hidden_size
            tensors[f"{k}.{layer}.linear.weight"] = torch.randn(size, size, generator=draw)
            tensors[f"{k}.{layer}.linear.bias"] = torch.randn(size, generator=draw)
        own = torch.randn(config.vocab_size, config.hidden_size, generator=draw)
        tensors[f"{k}.{config.num_layers}.weight"] = shared if config.tied else own
    return tensors


def write(directory: Path, config: ExportConfig, tensors=None, choices=TREE, tokenizer=None, card="card") -> Path:
    tensors = heads_of(config) if tensors is None else tensors
    write_export(directory, tensors, config, tokenizer=tokenizer or TokenizerStub(), choices=choices, card=card)
    return directory


def weights_of(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "medusa_lm_head.safetensors")


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize(("tied", "format"), TIED_AND_FORMAT)
def test_the_file_holds_exactly_the_tensors_that_engines_look_for(tmp_path, tied, format, num_layers):
    config = config_of(tied=tied, format=format, num_layers=num_layers)
    found = {name: list(tensor.shape) for name, tensor in weights_of(write(tmp_path / "export", config)).items()}
    expected = {f"{k}.{i}.linear.weight": [4, 4] for k in range(3) for i in range(num_layers)}
    expected |= {f"{k}.{i}.linear.bias": [4] for k in range(3) for i in range(num_layers)}
    expected |= {f"{k}.{num_layers}.weight": [6, 4] for k in ([0] if format == "shared" else range(3))}
    assert found == expected


@pytest.mark.parametrize(("tied", "format"), TIED_AND_FORMAT)
def test_config_json_says_what_each_engine_reads_and_nothing_that_misleads_it(tmp_path, tied, format):
    directory = write(tmp_path / "export", config_of(tied=tied, format=format, num_layers=2, dtype="bfloat16"))
    config = json.loads((directory / "config.json").read_text())
    wanted = {"model_type": "medusa", "base_model_name_or_path": "owner/target", "hidden_size": 4, "vocab_size": 6}
    wanted |= {"medusa_num_heads": 3, "medusa_num_layers": 2, "medusa_fc_bias": True, "dtype": "bfloat16"}
    assert config.items() >= wanted.items()
    assert config.get("original_lm_head", False) is (format == "shared")
    assert "architectures" not in config  # TGI would switch Medusa off
    # vLLM folds every key with "num" and "heads" (or "layers") into one number, in the order of the file
    assert {value for key, value in config.items() if "num" in key and "heads" in key} == {3}
    assert {value for key, value in config.items() if "num" in key and "layers" in key} == {2}
    assert not {"num_hidden_layers", "num_attention_heads", "num_key_value_heads"} & config.keys()


def test_the_directory_has_tokenizer_tree_and_card(tmp_path):
    directory = write(tmp_path / "export", config_of(), card="# A card")
    names = {"config.json", "medusa_lm_head.safetensors", "medusa_choices.json", "tokenizer.json", "README.md"}
    assert {path.name for path in directory.iterdir()} == names
    assert json.loads((directory / "medusa_choices.json").read_text()) == TREE
    assert (directory / "README.md").read_text() == "# A card"


def test_whoever_can_read_the_configuration_can_read_the_weights(tmp_path):
    directory = write(tmp_path / "export", config_of())
    modes = {path.stat().st_mode for path in directory.iterdir()}
    assert len(modes) == 1


@settings(max_examples=25, deadline=None)
@given(
    num_heads=st.integers(1, 4),
    num_layers=st.integers(1, 3),
    hidden_size=st.integers(1, 5),
    vocab_size=st.integers(1, 7),
    tied_and_format=st.sampled_from(TIED_AND_FORMAT),
)
def test_heads_of_any_shape_come_back_bit_for_bit(tmp_path_factory, tied_and_format, **shape):
    tied, format = tied_and_format
    config = ExportConfig("owner/target", tied=tied, format=format, **shape)
    tensors = heads_of(config)
    read_config, read = read_export(write(tmp_path_factory.mktemp("x") / "export", config, choices=[[0]]))
    assert read_config == config
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_another_dtype_rounds_as_torch_does(tmp_path, dtype):
    config = config_of(dtype=dtype)
    tensors = heads_of(config)
    directory = write(tmp_path / "export", config, tensors)
    assert all(
        torch.equal(saved, tensors[name].to(getattr(torch, dtype))) for name, saved in weights_of(directory).items()
    )
    verify_export(directory, tensors, config)


def test_heads_that_are_views_of_one_stacked_parameter_are_saved_apart(tmp_path):
    config = config_of()
    stacked_KVD = torch.randn(3, 4, 6).transpose(1, 2)  # not contiguous either
    tensors = heads_of(config) | {f"{k}.1.weight": stacked_KVD[k].requires_grad_() for k in range(3)}
    saved = weights_of(write(tmp_path / "export", config, tensors))
    assert all(torch.equal(saved[f"{k}.1.weight"], stacked_KVD[k]) for k in range(3))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tied_heads_expand_on_disk_and_not_in_memory(tmp_path, dtype):
    config = config_of(tied=True, dtype=dtype)
    tensors = heads_of(config)
    in_memory = tensors_as_saved(tensors, config)
    assert len({in_memory[f"{k}.1.weight"].data_ptr() for k in range(3)}) == 1
    on_disk = weights_of(write(tmp_path / "export", config, tensors))
    assert len({on_disk[f"{k}.1.weight"].data_ptr() for k in range(3)}) == 3
    assert all(torch.equal(on_disk[f"{k}.1.weight"], tensors["0.1.weight"].to(getattr(torch, dtype))) for k in range(3))


@pytest.mark.parametrize("format", ["expanded", "shared"])
def test_tied_heads_are_read_as_one_tensor_with_many_names(tmp_path, format):
    _, tensors = read_export(write(tmp_path / "export", config_of(tied=True, format=format)))
    assert len({tensors[f"{k}.1.weight"].data_ptr() for k in range(3)}) == 1


def test_transformers_loaders_find_the_format_in_the_file(tmp_path):
    with safe_open(write(tmp_path / "export", config_of()) / "medusa_lm_head.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda t: t.pop("1.0.linear.bias"), "1.0.linear.bias is missing"),
        (lambda t: t.pop("2.1.weight"), "2.1.weight is missing"),
        (lambda t: t.update({"lm_head.weight": torch.zeros(6, 4)}), "lm_head.weight is unknown"),
        (lambda t: t.update({"0.0.linear.weight": torch.zeros(4, 5)}), r"shape \[4, 5\] instead of \[4, 4\]"),
        (lambda t: t.update({"3.1.weight": torch.zeros(6, 4)}), "3.1.weight is unknown"),
    ],
)
def test_heads_that_are_not_exactly_the_expected_ones_are_not_written(tmp_path, damage, said):
    tensors = heads_of(config_of())
    damage(tensors)
    with pytest.raises(DataError, match=said):
        write(tmp_path / "export", config_of(), tensors)
    assert list(tmp_path.iterdir()) == []


def test_a_vocabulary_mismatch_names_both_numbers(tmp_path):
    with pytest.raises(DataError, match=r"6 tokens.*lm_head has 8") as caught:
        write(tmp_path / "export", config_of(vocab_size=8), heads_of(config_of()))
    assert caught.value.exit_code == 3


@pytest.mark.parametrize(("value", "dtype"), [(float("nan"), "float32"), (float("-inf"), "bfloat16"), (1e6, "float16")])
def test_numbers_that_the_dtype_cannot_hold_are_refused(tmp_path, value, dtype):
    tensors = heads_of(config_of())
    tensors["1.0.linear.weight"][2, 3] = value
    with pytest.raises(DataError, match=rf"1\.0\.linear\.weight holds numbers that are not finite in {dtype}"):
        write(tmp_path / "export", config_of(dtype=dtype), tensors)


@pytest.mark.parametrize("format", ["expanded", "shared"])
def test_heads_that_only_claim_to_be_tied_are_refused(tmp_path, format):
    with pytest.raises(ConfigError, match="said to be tied"):
        write(tmp_path / "export", config_of(tied=True, format=format), heads_of(config_of(tied=False)))


@pytest.mark.parametrize("num_heads", [0, -1, 129])
def test_a_head_count_that_vllm_cannot_draft_is_a_configuration_error(num_heads):
    with pytest.raises(ConfigError, match="128") as caught:
        config_of(num_heads=num_heads)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("num_heads", [1, 128])
def test_head_counts_up_to_the_limit_are_carried(num_heads):
    check_num_heads(num_heads)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"format": "shared"}, "train.lm_head: tied"),
        ({"num_layers": 0}, "at least 1"),
        ({"dtype": "int8"}, "float32"),
        ({"base_model_name_or_path": "./models/mine"}, "neither a Hub id nor an absolute path"),
    ],
)
def test_settings_that_no_engine_can_read_are_configuration_errors(changes, said):
    with pytest.raises(ConfigError, match=said):
        config_of(**changes)


@pytest.mark.parametrize(
    ("choices", "said"),
    [
        ([], "empty"),
        ([[0], [0]], "twice"),
        ([[0], [1, 0]], r"\[1, 0\] has no parent"),
        ([[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]], "needs 4 heads, and there are 3"),
        ([[6]], "outside the vocabulary"),
    ],
)
def test_a_tree_that_engines_would_misread_is_refused(tmp_path, choices, said):
    with pytest.raises(ConfigError, match=said):
        write(tmp_path / "export", config_of(), choices=choices)


def test_a_flipped_bit_in_the_weights_is_found_and_named(tmp_path):
    config, path = config_of(), write(tmp_path / "export", config_of()) / "medusa_lm_head.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"tensor \d\.\d\..* is not the one that was trained"):
        verify_export(path.parent, heads_of(config), config)


def test_the_sign_of_zero_counts_as_a_difference(tmp_path):
    config, tensors = config_of(), heads_of(config_of())
    tensors["0.0.linear.bias"] = torch.zeros(4)
    directory = write(tmp_path / "export", config, tensors)
    tensors["0.0.linear.bias"] = -torch.zeros(4)
    with pytest.raises(DataError, match=r"0\.0\.linear\.bias"):
        verify_export(directory, tensors, config)


def drop_a_tensor(path: Path) -> None:
    tensors = load_file(path)
    save_file({name: tensor.clone() for name, tensor in tensors.items() if name != "1.1.weight"}, path)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (drop_a_tensor, "1.1.weight is missing"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "cannot be read"),
        (lambda path: path.unlink(), "cannot be read"),
        (lambda path: path.write_bytes(b""), "cannot be read"),
        (lambda path: save_file({n: t.half() for n, t in load_file(path).items()}, path), "is not float32"),
        (lambda path: save_file({"a": torch.zeros(1)}, path.with_name("model.safetensors")), "model.safetensors"),
        (lambda path: path.with_name("medusa_lm_head.pt").write_bytes(b""), "medusa_lm_head.pt"),
        (lambda path: path.with_name("config.json").unlink(), "no config.json"),
        (lambda path: path.with_name("config.json").write_text('{"model_type": "llama"}'), "not the configuration"),
        (lambda path: path.with_name("config.json").write_text("{"), "not the configuration"),
    ],
)
def test_a_damaged_export_is_refused_with_the_reason(tmp_path, damage, said):
    directory = write(tmp_path / "export", config_of())
    damage(directory / "medusa_lm_head.safetensors")
    with pytest.raises(DataError, match=said):
        read_export(directory)


class DyingTokenizer:
    def __init__(self, error: BaseException):
        self.error = error

    def save_pretrained(self, directory: str) -> None:
        Path(directory, "tokenizer.json").write_text("{")
        raise self.error


def test_an_interrupted_export_leaves_nothing(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "export", config_of(), tokenizer=DyingTokenizer(KeyboardInterrupt()))
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_export_left_does_not_get_into_the_next_one(tmp_path):
    (tmp_path / ".export.partial").mkdir()
    (tmp_path / ".export.partial" / "stale.safetensors").write_bytes(b"half")
    directory = write(tmp_path / "export", config_of())
    assert [path.name for path in tmp_path.iterdir()] == ["export"]
    assert "stale.safetensors" not in {path.name for path in directory.iterdir()}


def test_a_full_disk_is_an_environment_fault_and_leaves_the_old_export_whole(tmp_path):
    directory = write(tmp_path / "export", config_of())
    full = DyingTokenizer(OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(EnvironmentFault, match="No space left") as caught:
        write(directory, config_of(num_heads=2), tokenizer=full)
    assert caught.value.exit_code == 4
    verify_export(directory, heads_of(config_of()), config_of())


def test_weights_that_cannot_be_written_are_an_environment_fault(tmp_path):
    tensors = heads_of(config_of())
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, limit[1]))  # smaller than the weights, larger than the rest
    try:
        with pytest.raises(EnvironmentFault, match="cannot be written"):
            write(tmp_path / "export", config_of(), tensors)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_directory_keeps_what_its_owner_put_there(tmp_path):
    directory = tmp_path / "export"
    directory.mkdir()
    (directory / "stage.json").write_text("{}")
    write(directory, config_of(num_heads=2, hidden_size=3))
    write(directory, config_of())
    assert (directory / "stage.json").read_text() == "{}"
    assert read_config(directory) == config_of()
    verify_export(directory, heads_of(config_of()), config_of())
    assert [path.name for path in tmp_path.iterdir()] == ["export"]
