"""Exports: what never gets into the directory, and what is not read out of it."""

from __future__ import annotations

import contextlib
import math
import resource

import pytest
from safetensors.torch import load_file, save_file

from pipeline.errors import ConfigError, DataError, EnvironmentFault
from pipeline.export import weights
from pipeline.export.layout import check_vocabulary
from pipeline.heads.medusa import MedusaHeads
from tests.export.exports import config_of, heads_of, holds, read, write


def test_a_vocabulary_mismatch_names_both_numbers():
    with pytest.raises(DataError, match=r"6 tokens.*lm_head has 8"):
        check_vocabulary(config_of().shape, 8)


@pytest.mark.parametrize(("value", "dtype"), [(math.nan, "float32"), (1e6, "float16")])
def test_numbers_that_the_dtype_cannot_hold_are_refused(tmp_path, value, dtype):
    heads = heads_of(config_of())
    heads.block_weight.data[0, 1, 2, 3] = value
    with pytest.raises(DataError, match=rf"1\.0\.linear\.weight .* not finite in {dtype}"):
        write(tmp_path / "export", config_of(dtype=dtype), heads)


@pytest.mark.parametrize(
    "changes",
    [{"format": "shared"}, {"num_heads": 129}, {"base_model": "./models/mine"}],
)
def test_settings_that_no_engine_can_read_are_configuration_errors(changes):
    with pytest.raises(ConfigError) as caught:
        config_of(**changes)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("bit", [0x01, 0x80])  # 0x80: only the sign of a zero
def test_a_damaged_tensor_is_named_and_nothing_is_left(tmp_path, monkeypatch, bit):
    serialise = weights.serialize_file

    def damaging(specs, path, metadata):
        serialise(specs, path, metadata)
        data = bytearray(path.read_bytes())
        data[-1] ^= bit
        path.write_bytes(data)

    monkeypatch.setattr(weights, "serialize_file", damaging)
    with pytest.raises(DataError, match=r"tensor \d\.\d\..* is not the one that was trained"):
        write(tmp_path / "export", config_of(), MedusaHeads(config_of().shape))
    assert list(tmp_path.iterdir()) == []


def drop_a_tensor(path):
    tensors = load_file(path)
    del tensors["1.1.weight"]
    save_file(tensors, path)


def halve(path):
    save_file({name: tensor.half() for name, tensor in load_file(path).items()}, path)


@pytest.mark.parametrize(
    "damage",
    [
        drop_a_tensor,
        halve,
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.unlink(),
        lambda path: path.with_name("medusa_lm_head.pt").write_bytes(b""),  # vLLM would load it
        lambda path: path.with_name("config.json").unlink(),
        lambda path: path.with_name("config.json").write_text('{"model_type": "llama"}'),
        lambda path: path.with_name("config.json").write_text("{"),
    ],
)
def test_a_damaged_export_is_refused(tmp_path, damage):
    directory = write(tmp_path / "export", config_of())
    damage(directory / "medusa_lm_head.safetensors")
    with pytest.raises(DataError):
        read(directory)


@contextlib.contextmanager
def small_files():
    """No file of this process may grow beyond 200 bytes: smaller than the weights, larger than the
    tokenizer.
    """
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, limit[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)


def test_a_full_disk_leaves_the_old_export_whole(tmp_path):
    directory = write(tmp_path / "export", config_of())
    with small_files(), pytest.raises(EnvironmentFault) as caught:
        write(directory, config_of(num_heads=2))
    assert caught.value.exit_code == 4
    assert holds(directory, config_of(), heads_of(config_of()))
    assert [path.name for path in tmp_path.iterdir()] == ["export"]
