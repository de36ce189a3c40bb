from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from pipeline.errors import ConfigError, EnvironmentFault
from pipeline.targets import loading
from pipeline.targets.loading import lm_head_weight, load_causal_lm, require_gpus, verify_tap
from pipeline.targets.spec import TargetSpec, weight_files
from tests.forks import in_a_fork

without_gpu = pytest.mark.skipif(
    torch.cuda.is_available(), reason="this machine has the GPU that must be missing"
)


WHOLE = {
    "missing_keys": set(),
    "unexpected_keys": set(),
    "mismatched_keys": set(),
}  # transformers' report


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


def test_on_a_gpu_attention_builds_no_plan_for_every_new_shape(
    random_target: TargetSpec, monkeypatch
) -> None:
    monkeypatch.setattr(
        loading, "require_gpus", lambda number: torch.backends.cuda.enable_cudnn_sdp(True)
    )
    monkeypatch.setattr(
        AutoModelForCausalLM, "from_pretrained", lambda *args, **kwargs: (torch.nn.Module(), WHOLE)
    )
    try:
        load_causal_lm(random_target, "cuda")
        assert (
            not torch.backends.cuda.cudnn_sdp_enabled() and torch.backends.cuda.flash_sdp_enabled()
        )
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)


@pytest.mark.skipif(
    not Path("/proc/self/maps").exists(), reason="Linux says what a process has mapped"
)
def test_on_a_cpu_weights_in_their_own_dtype_are_the_file_s_own_pages(
    random_target: TargetSpec,
) -> None:
    """So that the workers of a machine, which load the whole target to split it, hold it once."""
    model = load_causal_lm(random_target)
    address = model.get_input_embeddings().weight.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(end, 16) for end in line.split()[0].split("-"))
        if first <= address < last:
            assert line.endswith("model.safetensors")
            return
    raise AssertionError("every address is in some mapping")


@pytest.mark.slow
def test_quantizing_on_a_cpu_says_nothing_of_kernels_that_are_missing() -> None:
    pytest.importorskip("bitsandbytes")
    assert in_a_fork(loading._bitsandbytes, TargetSpec("any", quantization="4bit")) == (0, "")


def test_a_repository_of_pickled_weights_loads_the_same_tensors(
    random_target: TargetSpec, pickled: Path
) -> None:
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


def test_a_missing_bitsandbytes_is_an_environment_fault(random_target, monkeypatch) -> None:
    monkeypatch.setattr(
        "transformers.quantizers.quantizer_bnb_4bit.is_bitsandbytes_available", lambda: False
    )
    with pytest.raises(EnvironmentFault, match="pip install"):
        load_causal_lm(TargetSpec(random_target.model, quantization="4bit"))


def test_what_a_quantizer_left_in_the_files_is_no_other_model(random_target, monkeypatch) -> None:
    """AutoGPTQ writes a bias of zeros for every layer, and transformers has no place for it."""
    model, left = load_causal_lm(random_target), {"model.layers.0.mlp.up_proj.bias"}
    loaded = lambda *_, **__: (model, {**WHOLE, "unexpected_keys": left})  # noqa: E731
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", loaded)
    with pytest.raises(ConfigError, match="no place for"):
        load_causal_lm(random_target)
    model.hf_quantizer = object()
    assert load_causal_lm(random_target) is model


@pytest.mark.parametrize(
    ("error", "format"),
    [
        (
            torch.AcceleratorError(
                "CUDA error: no kernel image is available for execution on the device"
            ),
            None,
        ),
        (ImportError("Loading an FP8 quantized model requires accelerate"), None),
        (
            ValueError(
                "FP8 quantized models is only supported on GPUs with compute capability >= 9.0"
            ),
            "fbgemm_fp8",
        ),
    ],
)
def test_what_this_machine_lacks_is_an_environment_fault(
    random_target, tmp_path, monkeypatch, error, format
) -> None:
    directory = Path(shutil.copytree(random_target.model, tmp_path / "copy"))
    if format:
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(
            json.dumps(config | {"quantization_config": {"quant_method": format}})
        )

    def refuse(*_, **__):
        raise error

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", refuse)
    with pytest.raises(EnvironmentFault) as caught:
        load_causal_lm(TargetSpec(str(directory)))
    assert caught.value.exit_code == 4 and "\n" not in str(caught.value)


def test_a_first_forward_without_a_kernel_is_an_environment_fault(
    random_target, monkeypatch
) -> None:
    model = load_causal_lm(random_target)

    def refuse(*_, **__):
        raise RuntimeError(
            "torch._scaled_mm is only supported on CUDA devices with compute capability >= 9.0"
        )

    monkeypatch.setattr(model.model, "forward", refuse)
    with pytest.raises(EnvironmentFault) as caught:
        verify_tap(model)
    assert caught.value.exit_code == 4 and "\n" not in str(caught.value)


FREE = {0: 900_000, 1: 800_000, 2: 700_000, 3: 600_000}  # bytes


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as a loader asks before it hands over to transformers."""
    monkeypatch.setattr("pipeline.targets.loading.require_gpus", lambda _: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda gpu: (FREE[gpu], 10**9))


@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize("num_gpus", [2, 3])
def test_a_target_is_spread_over_the_first_gpus_and_no_other(
    random_target: TargetSpec, monkeypatch: pytest.MonkeyPatch, num_gpus: int
) -> None:
    """accelerate places on the devices of `max_memory` alone, and takes every visible one where it
    is given none.
    """
    model, asked = load_causal_lm(random_target), {}
    monkeypatch.setattr(
        "transformers.AutoModelForCausalLM.from_pretrained",
        lambda *_, **said: asked.update(said) or (model, WHOLE),
    )
    load_causal_lm(random_target, "cuda", num_gpus)
    assert asked["device_map"] == "auto"
    assert asked["max_memory"] == {gpu: FREE[gpu] for gpu in range(num_gpus)}
    asked.clear()
    load_causal_lm(random_target, "cuda", 1)
    assert asked["device_map"] == {"": "cuda"} and "max_memory" not in asked


@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize("elsewhere", ["cpu", "disk"])
def test_a_target_that_overflows_its_gpus_is_refused(
    random_target: TargetSpec, monkeypatch: pytest.MonkeyPatch, elsewhere: str
) -> None:
    model = load_causal_lm(random_target)
    model.hf_device_map = {"model.embed_tokens": 0, "model.layers": elsewhere}
    monkeypatch.setattr(
        "transformers.AutoModelForCausalLM.from_pretrained", lambda *_, **__: (model, WHOLE)
    )
    with pytest.raises(EnvironmentFault, match=r"does not fit.*2 GPU.*Raise gpus_per_worker"):
        load_causal_lm(random_target, "cuda", num_gpus=2)


@without_gpu
def test_a_missing_gpu_is_an_environment_fault(random_target: TargetSpec) -> None:
    require_gpus(0)
    with pytest.raises(EnvironmentFault, match="2 GPUs are asked for and 0 are visible"):
        load_causal_lm(random_target, "cuda", num_gpus=2)


def without(directory: Path, name: str) -> None:
    tensors = load_file(directory / "model.safetensors")
    del tensors[name]
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


def resized(directory: Path, **sizes: int) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | sizes))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda directory: without(directory, "lm_head.weight"), "files lack lm_head.weight"),
        (lambda directory: without(directory, "model.norm.weight"), "files lack model.norm.weight"),
        (
            lambda directory: resized(directory, num_hidden_layers=9),
            "files lack model.layers.*and .* more",
        ),
        (lambda directory: resized(directory, num_hidden_layers=1), "no place for, model.layers.1"),
    ],
)
def test_a_target_whose_files_are_not_the_model_is_refused_and_never_filled_with_random_numbers(
    random_target: TargetSpec, tmp_path: Path, damage: Callable[[Path], None], said: str
) -> None:
    directory = Path(shutil.copytree(random_target.model, tmp_path / "damaged"))
    damage(directory)
    with pytest.raises(ConfigError, match=said):
        load_causal_lm(TargetSpec(str(directory)))


def test_a_matrix_that_is_tied_and_a_buffer_that_older_files_hold_are_no_damage(
    random_target: TargetSpec, tmp_path: Path
) -> None:
    directory = Path(shutil.copytree(random_target.model, tmp_path / "older"))
    resized(directory, tie_word_embeddings=True)
    without(directory, "lm_head.weight")
    tensors = load_file(directory / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    model = load_causal_lm(TargetSpec(str(directory)))
    assert torch.equal(lm_head_weight(model), tensors["model.embed_tokens.weight"])
