from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pipeline.errors import ConfigError, EnvironmentFault
from pipeline.targets.loading import lm_head_weight, load_causal_lm, require_gpus, verify_tap
from pipeline.targets.spec import TargetSpec, weight_files

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has the GPU that must be missing")


@pytest.fixture
def pickled(random_target: TargetSpec, tmp_path: Path) -> Path:
    """The random target as older repositories ship theirs."""
    directory = Path(shutil.copytree(random_target.model, tmp_path / "pickled"))
    torch.save(load_file(directory / "model.safetensors"), directory / "pytorch_model.bin")
    (directory / "model.safetensors").unlink()
    return directory


def test_a_target_is_loaded_frozen_in_its_dtype(random_target: TargetSpec) -> None:
    model = load_causal_lm(TargetSpec(random_target.model, dtype="bfloat16"))
    assert not model.training
    assert {(p.requires_grad, p.dtype) for p in model.parameters()} == {(False, torch.bfloat16)}


def test_a_repository_of_pickled_weights_loads_the_same_tensors(random_target: TargetSpec, pickled: Path) -> None:
    expected = load_file(Path(random_target.model) / "model.safetensors")["lm_head.weight"]
    spec = TargetSpec(str(pickled))
    assert torch.equal(lm_head_weight(load_causal_lm(spec)), expected)
    assert pickled / "pytorch_model.bin" in weight_files(spec)


def test_pickled_weights_run_no_code(pickled: Path, tmp_path: Path) -> None:
    class Touch:
        def __reduce__(self) -> tuple:
            return os.system, (f"touch {tmp_path / 'ran'}",)

    torch.save({"lm_head.weight": Touch()}, pickled / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="hold more than tensors"):
        load_causal_lm(TargetSpec(str(pickled)))
    assert not (tmp_path / "ran").exists()


def test_damaged_weights_are_a_readable_error(random_target: TargetSpec, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(random_target.model, tmp_path / "damaged"))
    weights = (directory / "model.safetensors").read_bytes()
    (directory / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    with pytest.raises(ConfigError, match="fetch the target's files again"):
        load_causal_lm(TargetSpec(str(directory)))


def test_the_tap_is_what_lm_head_reads(random_target: TargetSpec) -> None:
    verify_tap(load_causal_lm(random_target))


def test_a_tap_that_lm_head_does_not_read_is_refused(random_target: TargetSpec) -> None:
    model = load_causal_lm(random_target)
    model.lm_head.register_forward_pre_hook(lambda _, args: (args[0] * 2,))
    with pytest.raises(ConfigError, match="not what its lm_head reads"):
        verify_tap(model)


def test_states_that_overflow_are_refused(random_target: TargetSpec) -> None:
    model = load_causal_lm(random_target)
    model.model.embed_tokens.weight.fill_(float("inf"))
    with pytest.raises(ConfigError, match="not finite"):
        verify_tap(model)


@without_gpu
def test_a_missing_gpu_is_an_environment_fault(random_target: TargetSpec) -> None:
    require_gpus(0)
    with pytest.raises(EnvironmentFault, match="2 GPUs are asked for and 0 are visible"):
        load_causal_lm(random_target, "cuda", num_gpus=2)
