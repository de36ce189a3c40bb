"""Loads a target, and verifies that its features are what its lm_head reads.

The model is frozen and in eval mode. In 4 or 8 bit the backbone is quantized by bitsandbytes; the
lm_head keeps the target's dtype, because heads are initialised from it.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import torch

from pipeline.errors import ConfigError, EnvironmentFault
from pipeline.targets import files
from pipeline.targets.quantization import quantization_of
from pipeline.targets.spec import TargetSpec, first_lines, model_config

if TYPE_CHECKING:
    from transformers import BitsAndBytesConfig, PreTrainedModel


FEWER_BYTES = "Raise gpus_per_worker, or set target.quantization to 8bit or 4bit."
OTHER_KERNELS = (
    "Set target.dtype: float16, name a copy in another format, or run on a GPU that computes this"
    " one."
)


def require_gpus(num_gpus: int) -> None:
    """Raise EnvironmentFault when fewer GPUs are visible than a worker needs."""
    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if visible < num_gpus:
        fix = (
            "Set gpus_per_worker in placement to what a node has (0 runs on the CPU), or install"
            " torch with CUDA."
        )
        raise EnvironmentFault(
            f"{num_gpus} GPUs are asked for and {visible} are visible.", "placement", fix
        )


def load_causal_lm(
    spec: TargetSpec,
    device: str | torch.device = "cpu",
    num_gpus: int = 1,
    too_large: str = FEWER_BYTES,
) -> PreTrainedModel:
    """The target, frozen, on `device`; over the first `num_gpus` GPUs when that is more than one.

    `too_large` is the advice in the error where it does not fit.

    Raises:
        ConfigError: transformers cannot load it, or its files lack tensors, or hold others than the
            model has.
        EnvironmentFault: The GPU is missing, too small or lacks a kernel, a package is missing, or
            the weights cannot be read.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
    on_gpu = torch.device(device).type == "cuda"
    if on_gpu:
        require_gpus(num_gpus)
        # torch's first choice on Hopper and Blackwell builds a plan for every new shape, in up to
        # half a second, and the shapes of batches and of texts that grow are always new. vLLM has
        # it off as well.
        torch.backends.cuda.enable_cudnn_sdp(False)
    does_not_fit = EnvironmentFault(
        f"The target {spec.model} does not fit.", f"{num_gpus} GPU(s)", too_large
    )
    settings = _device_map(device, num_gpus if on_gpu else 1)
    if quantization := _quantization(spec):  # None would take a quantized checkpoint's own away
        settings["quantization_config"] = quantization
    with files.hub_errors(spec.model, spec.revision), _readable_errors(spec, does_not_fit):
        model, report = AutoModelForCausalLM.from_pretrained(
            spec.model,
            output_loading_info=True,
            revision=spec.revision,
            trust_remote_code=spec.trust_remote_code,
            dtype=getattr(torch, spec.dtype),
            **settings,
        )
    if {"cpu", "disk"} & set(getattr(model, "hf_device_map", {}).values()) and on_gpu:
        raise does_not_fit  # offloaded to the CPU it would run a hundred times slower
    if spec.quantization is None and getattr(model, "hf_quantizer", None):
        # What a quantizer leaves in its files and transformers has no place for: biases of zeros, a
        # cache's scales.
        report["unexpected_keys"] = ()
    _require_whole(spec, report)
    if not on_gpu:
        _keep_ragged_layers_unpacked(model)
    return model.eval().requires_grad_(False)


@contextmanager
def _readable_errors(spec: TargetSpec, does_not_fit: EnvironmentFault) -> Iterator[None]:
    """Turn what loading raises into errors for a person; those of files are left to
    `files.hub_errors`.
    """
    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        raise does_not_fit from error
    except UnpicklingError as error:
        what = f"{spec.model}: pickled weights that hold more than tensors."
        fix = "Load it where you trust it, and `save_pretrained` it to a directory."
        raise ConfigError(what, files.WHERE, fix) from error
    except OSError:
        raise
    except Exception as error:  # whatever a family's code raises on weights that it does not expect
        what = f"transformers cannot load {spec.model}: {first_lines(error)}."
        if _blames_the_machine(error, spec):
            raise EnvironmentFault(what, files.WHERE, OTHER_KERNELS) from error
        raise ConfigError(
            what, files.WHERE, "Upgrade transformers, or fetch the target's files again."
        ) from error


def _blames_the_machine(error: Exception, spec: TargetSpec) -> bool:
    """Whether a package or a GPU's kernel is missing: CUDA says so, or the quantizer of the
    target's format.
    """
    if isinstance(error, ImportError | torch.AcceleratorError):
        return True
    is_quantized = spec.quantization or quantization_of(model_config(spec))
    return bool(is_quantized) and isinstance(error, ValueError | RuntimeError)


def _device_map(device: str | torch.device, num_gpus: int) -> dict[str, Any]:
    """Where `from_pretrained` is to put the weights."""
    if num_gpus == 1:
        return {"device_map": {"": device}}
    return {
        "device_map": "auto",
        "max_memory": {gpu: torch.cuda.mem_get_info(gpu)[0] for gpu in range(num_gpus)},
    }


def _require_whole(spec: TargetSpec, report: Mapping[str, Collection[Any]]) -> None:
    """Raise ConfigError where files and model do not fit: transformers fills what is missing with
    random numbers.

    `report` is transformers' own of the loading. It leaves out what a family may lack: tied
    matrices, buffers.
    """
    names = {
        "its files lack": sorted(report["missing_keys"]),
        "its files hold, and the model has no place for,": sorted(report["unexpected_keys"]),
        "of another shape than the model's:": sorted(
            str(key[0]) for key in report["mismatched_keys"]
        ),
    }
    found = [
        f"{what} {', '.join(keys[:3])}" + (f" and {len(keys) - 3} more" if len(keys) > 3 else "")
        for what, keys in names.items()
        if keys
    ]
    if found:
        fix = (
            "Its config.json and its weights must be of one model: fetch the target's files again."
        )
        raise ConfigError(
            f"The target's files are not this model: {'; '.join(found)}.", spec.model, fix
        )


def _quantization(spec: TargetSpec) -> BitsAndBytesConfig | None:
    if spec.quantization is None:
        return None
    # On a CPU it warns of missing kernels at import, and once per layer and forward.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    try:
        import bitsandbytes  # noqa: F401
    except ImportError as error:
        fix = (
            "pip install bitsandbytes, or leave target.quantization and train.backbone.quantization"
            " unset."
        )
        raise EnvironmentFault(
            "bitsandbytes is not importable.", f"quantization: {spec.quantization}", fix
        ) from error
    from transformers import BitsAndBytesConfig

    if spec.quantization == "8bit":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=getattr(torch, spec.dtype),
    )


def _keep_ragged_layers_unpacked(model: PreTrainedModel) -> None:
    """Keep bitsandbytes from packing 4-bit layers for its CPU kernel whose rows are not whole
    blocks: it would raise.

    They are multiplied dequantized, as on a CPU without that kernel.
    """
    for layer in model.modules():
        state = getattr(getattr(layer, "weight", None), "quant_state", None)
        if state is not None and state.shape[1] % state.blocksize:
            layer.support_avx512bf16_for_cpu = False


def lm_head_weight(model: PreTrainedModel) -> torch.Tensor:
    """The lm_head's weight [V, D]; a view, not a copy.

    Raises:
        ConfigError: The model has no linear lm_head, or only a quantized one.
    """
    head = model.get_output_embeddings()
    weight = getattr(head, "weight", None)
    if (
        weight is None
        or not weight.is_floating_point()
        or weight.shape[1] != model.config.get_text_config().hidden_size
    ):
        fix = "Choose a target whose lm_head is one linear layer of floating-point weights."
        raise ConfigError("The target's lm_head cannot be copied into the heads.", files.WHERE, fix)
    return weight.detach()


@torch.no_grad()
def verify_tap(model: PreTrainedModel) -> None:
    """Check that the last hidden state is exactly what the target's lm_head reads.

    Runs eight tokens with a hook on the lm_head. Some model families apply something in between;
    heads would then train well and have no guess accepted.

    Raises:
        ConfigError: The states differ, or are not finite in the target's dtype.
        EnvironmentFault: The device has no kernel for the target's dtype or format.
    """
    lm_head_weight(model)
    ids_BT = torch.arange(8, device=input_device(model))[None]
    try:
        with lm_head_inputs(model) as read_by_head:
            model(input_ids=ids_BT, use_cache=False)
        tapped_BTD = model.base_model(input_ids=ids_BT, use_cache=False).last_hidden_state
    except RuntimeError as error:
        what = f"The target cannot compute here: {first_lines(error)}."
        raise EnvironmentFault(what, files.WHERE, OTHER_KERNELS) from error
    if not torch.isfinite(tapped_BTD).all():
        fix = "float16 overflows in some models: set target.dtype to bfloat16."
        raise ConfigError(
            f"The target's states are not finite in {tapped_BTD.dtype}.", "target.dtype", fix
        )
    tapped_BTD = tapped_BTD.float()
    if (
        len(read_by_head) != 1
        or read_by_head[0].shape != tapped_BTD.shape
        or not (read_by_head[0].float() - tapped_BTD).norm()
        <= 1e-2 * tapped_BTD.norm()  # bf16 rounds at 4e-3
    ):
        fix = (
            "Heads need lm_head to read the last hidden state after the final norm, and nothing in"
            " between."
        )
        raise ConfigError(
            "The target's last hidden state is not what its lm_head reads.", files.WHERE, fix
        )


@contextmanager
def lm_head_inputs(model: PreTrainedModel) -> Iterator[list[torch.Tensor]]:
    """The states that the lm_head reads, appended by each forward within the context."""
    seen: list[torch.Tensor] = []
    hook = model.get_output_embeddings().register_forward_pre_hook(
        lambda _, inputs: seen.append(inputs[0])
    )
    try:
        yield seen
    finally:
        hook.remove()


def input_device(model: PreTrainedModel) -> torch.device:
    """The device of the model's input ids."""
    return model.get_input_embeddings().weight.device
