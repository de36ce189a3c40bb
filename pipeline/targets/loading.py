"""Load a target, and verify that its features are the inputs of its lm_head.

The loaded model is frozen and in eval mode. In 4 or 8 bit, bitsandbytes quantizes the backbone; the
lm_head keeps the target's dtype, because heads are initialised from it.
"""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pipeline.errors import ConfigError, EnvironmentFault, MedusaDistillError
from pipeline.targets import files
from pipeline.targets.spec import (
    TargetSpec,
    model_config,
    one_line,
    quantization_of,
)

if TYPE_CHECKING:
    from transformers import BitsAndBytesConfig, PreTrainedModel


FEWER_BYTES = "Raise gpus_per_worker, or set target.quantization to 8bit or 4bit."
OTHER_KERNELS = (
    "Install what it names, set target.dtype: float16, name a copy in another format, or run on a"
    " GPU that computes this one."
)


def require_gpus(num_gpus: int) -> None:
    """Raise EnvironmentFault if fewer than `num_gpus` GPUs are visible."""
    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if visible < num_gpus:
        raise EnvironmentFault(
            f"The settings ask for {num_gpus} GPUs, and {visible} are visible.",
            "placement",
            "Set gpus_per_worker to what a node has (0 runs on the CPU), or install torch with"
            " CUDA.",
        )


def _device_arguments(device: torch.device, num_gpus: int) -> dict[str, Any]:
    """Return arguments of `from_pretrained` that place a model on a device, or over several GPUs.

    If the device is a GPU, cuDNN's attention is disabled in this process.

    Raises:
        EnvironmentFault: Fewer than `num_gpus` GPUs are visible.
    """
    if device.type == "cuda":
        require_gpus(num_gpus)
        # cuDNN's attention, torch's first choice on Hopper and Blackwell, builds a plan for every
        # new shape in up to half a second, and the shapes of batches and growing texts are always
        # new. vLLM disables it too.
        torch.backends.cuda.enable_cudnn_sdp(False)
        if num_gpus > 1:
            # An earlier model's memory counts as free only once torch has returned it.
            gc.collect()
            torch.cuda.empty_cache()
            free = {gpu: torch.cuda.mem_get_info(gpu)[0] for gpu in range(num_gpus)}
            return {"device_map": "auto", "max_memory": free}
    return {"device_map": {"": device}}


def load_on_gpus(spec: TargetSpec, gpus: int) -> PreTrainedModel:
    """Load the target over the first `gpus` GPUs, or on the CPU if `gpus` is 0.

    Errors are those of `load_causal_lm`.
    """
    return load_causal_lm(spec, "cuda" if gpus else "cpu", max(1, gpus))


def load_causal_lm(
    spec: TargetSpec,
    device: str | torch.device = "cpu",
    num_gpus: int = 1,
    too_large: str = FEWER_BYTES,
) -> PreTrainedModel:
    """Load the frozen target on `device`, or over the first `num_gpus` GPUs if more than one.

    If standard error is no terminal, transformers' progress bars are disabled in this process.

    Args:
        too_large: The remedy in the error if the target does not fit into memory.

    Raises:
        ConfigError: transformers cannot load the target, or its files lack tensors or hold unknown
            ones.
        EnvironmentFault: A GPU is missing or too small, a kernel or a package is missing, or the
            files cannot be downloaded or read.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
    device = torch.device(device)
    on_gpu = device.type == "cuda"
    settings = _device_arguments(device, num_gpus)
    if spec.quantization:  # passing None would disable a checkpoint's own quantization
        settings["quantization_config"] = _bitsandbytes(spec)
    does_not_fit = EnvironmentFault(
        f"The target {spec.model} does not fit.",
        f"{num_gpus} GPU(s)",
        too_large,
    )
    with files.target_errors(spec.model, spec.revision):
        try:
            model, report = AutoModelForCausalLM.from_pretrained(
                spec.model,
                output_loading_info=True,
                revision=spec.revision,
                trust_remote_code=spec.trust_remote_code,
                dtype=spec.torch_dtype,
                **settings,
            )
        except torch.cuda.OutOfMemoryError as error:
            raise does_not_fit from error
        except OSError:
            raise
        except Exception as error:  # a family's code may raise any error for unexpected weights
            raise _loading_error(spec, error) from error
    placed = set(getattr(model, "hf_device_map", {}).values())
    if on_gpu and placed & {"cpu", "disk"}:  # offloaded layers run a hundred times slower
        raise does_not_fit
    if spec.quantization is None and getattr(model, "hf_quantizer", None):
        # Quantized checkpoints hold tensors that transformers does not load, such as biases of
        # zeros and the scales of a KV cache.
        report["unexpected_keys"] = ()
    _require_all_tensors(spec, report)
    return model.eval().requires_grad_(False)


def _loading_error(spec: TargetSpec, error: Exception) -> MedusaDistillError:
    """Return the error to raise for an exception of transformers while it loads the target.

    It is an EnvironmentFault if a package or a kernel is missing, or if a quantizer may have raised
    the exception, else a ConfigError.
    """
    what = f"transformers cannot load {spec.model}: {one_line(error)}."
    of_machine: tuple[type[Exception], ...] = (ImportError, torch.AcceleratorError)
    if spec.quantization or quantization_of(model_config(spec)):
        of_machine += (ValueError, RuntimeError)  # raised by quantizers
    if isinstance(error, of_machine):
        return EnvironmentFault(what, files.WHERE, OTHER_KERNELS)
    return ConfigError(
        what,
        files.WHERE,
        "Upgrade transformers, or fetch the target's files again; pickled weights that hold more"
        " than tensors have to be saved as safetensors first.",
    )


def _require_all_tensors(spec: TargetSpec, report: Mapping[str, Collection[Any]]) -> None:
    """Raise ConfigError if the target's files lack tensors, or hold unknown or misshapen ones.

    transformers would fill missing tensors with random numbers. `report` is the loading info of
    `from_pretrained`, which leaves out tensors that may be missing, such as tied matrices.
    """
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        keys = sorted(map(str, report[problem]))
        if keys:
            named = f"{len(keys)} {problem.replace('_', ' ')}, {', '.join(keys[:3])}"
            raise ConfigError(
                f"The target's weights do not match its config.json: {named}.",
                spec.model,
                "Fetch the target's files again.",
            )


def _bitsandbytes(spec: TargetSpec) -> BitsAndBytesConfig:
    """Return transformers' settings for bitsandbytes, in 8 or 4 bit as in `spec.quantization`.

    Warnings of bitsandbytes are turned off in this process.
    """
    # bitsandbytes warns of missing CPU kernels at import, and once per layer and forward.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    from transformers import BitsAndBytesConfig

    if spec.quantization == "8bit":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=spec.torch_dtype,
    )


def lm_head_weight(model: PreTrainedModel) -> torch.Tensor:
    """Return the model's lm_head weight [V, D], detached but not copied.

    Raises:
        ConfigError: The model has no linear lm_head, or only a quantized one.
    """
    weight = getattr(model.get_output_embeddings(), "weight", None)
    hidden_size = model.config.get_text_config().hidden_size
    if weight is None or not weight.is_floating_point() or weight.shape[1] != hidden_size:
        raise ConfigError(
            "The target's lm_head cannot be copied into the heads.",
            files.WHERE,
            "Choose a target whose lm_head is one linear layer of floating-point weights.",
        )
    return weight.detach()


@torch.no_grad()
def verify_tap(model: PreTrainedModel) -> None:
    """Check that the model's last hidden state is the input of its lm_head, up to rounding.

    The model runs on eight tokens. Some model families apply another operation between the two.
    Heads of such a model would train without an error, but their candidates would not be accepted.

    Raises:
        ConfigError: The two states differ or are not finite, or the model has no linear lm_head of
            floating-point weights.
        EnvironmentFault: The device cannot run the model, for example because it lacks a kernel.
    """
    lm_head_weight(model)
    ids_BT = torch.arange(8, device=input_device(model))[None]
    try:
        with lm_head_inputs(model) as read_by_head:
            model(input_ids=ids_BT, use_cache=False)
        tapped_BTD = model.base_model(input_ids=ids_BT, use_cache=False).last_hidden_state
    except RuntimeError as error:
        raise EnvironmentFault(
            f"The target cannot run on this machine: {one_line(error)}.",
            files.WHERE,
            OTHER_KERNELS,
        ) from error
    if not torch.isfinite(tapped_BTD).all():
        raise ConfigError(
            f"The target's states are not finite in {tapped_BTD.dtype}.",
            "target.dtype",
            "float16 overflows in some models: set target.dtype to bfloat16.",
        )
    tapped_BTD = tapped_BTD.float()
    is_tap = len(read_by_head) == 1 and read_by_head[0].shape == tapped_BTD.shape
    if is_tap:
        difference = (read_by_head[0].float() - tapped_BTD).norm()
        is_tap = bool(difference <= 1e-2 * tapped_BTD.norm())  # bfloat16's rounding is 4e-3
    if not is_tap:
        raise ConfigError(
            "The target's last hidden state is not what its lm_head reads.",
            files.WHERE,
            "Choose a target whose lm_head reads the last hidden state right after the final norm.",
        )


@contextmanager
def lm_head_inputs(model: PreTrainedModel) -> Iterator[list[torch.Tensor]]:
    """Context manager: yield a list to which each forward pass appends the lm_head's input."""
    seen = []
    hook = model.get_output_embeddings().register_forward_pre_hook(
        lambda _, inputs: seen.append(inputs[0])
    )
    try:
        yield seen
    finally:
        hook.remove()


@contextmanager
def layer_outputs(model: PreTrainedModel, layers: Sequence[int]) -> Iterator[list[torch.Tensor]]:
    """Context manager: yield a list to which each forward pass appends layer outputs [B, T, X].

    The outputs [B, T, D] of the decoder layers `layers`, ascending and counted from 1, are side by
    side. That of the highest layer is before the final norm. If the layers are on several GPUs, the
    result is on the GPU of the last one.

    Raises:
        ConfigError: The model keeps its decoder layers in no list.
    """
    num_layers = model.config.get_text_config().num_hidden_layers
    lists = [part for part in model.get_decoder().modules() if isinstance(part, nn.ModuleList)]
    decoder = next((part for part in lists if len(part) == num_layers), None)
    if decoder is None:
        raise ConfigError(
            "The target's decoder layers are not one list.",
            files.WHERE,
            "Choose heads that read only the last state, or another target.",
        )
    seen: list[torch.Tensor] = []
    outputs: dict[int, torch.Tensor] = {}

    def keep(layer: int, output: torch.Tensor | tuple[torch.Tensor, ...]) -> None:
        """Keep a layer's output; after the last layer, append all of them to `seen`."""
        outputs[layer] = output[0] if isinstance(output, tuple) else output
        if layer == layers[-1]:
            device = outputs[layer].device
            seen.append(torch.cat([outputs.pop(each).to(device) for each in layers], -1))

    with ExitStack() as hooks:
        for layer in layers:
            hook = decoder[layer - 1].register_forward_hook(
                lambda _, __, output, layer=layer: keep(layer, output)
            )
            hooks.callback(hook.remove)
        yield seen


def input_device(model: PreTrainedModel) -> torch.device:
    """Return the device on which the model expects its input ids."""
    return model.get_input_embeddings().weight.device
