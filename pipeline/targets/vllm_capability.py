"""The compute capability of the GPUs on which vLLM reads a quantized checkpoint.

Written down as of vLLM 0.32, since asking it would import it; a test compares each with its source. A format has a
least capability of its own (`get_min_capability`), and of compressed-tensors and modelopt every scheme has. What is not
named here is taken to have none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from pipeline.targets.quantization import quantization_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Settings = Mapping[str, Any]


class Capability(NamedTuple):
    """The least one, or with `alone` the only one."""

    major: int
    minor: int
    alone: bool = False

    def has(self, capability: tuple[int, int]) -> bool:
        return capability == self[:2] if self.alone else capability >= self[:2]

    def __str__(self) -> str:
        return f"{self.major}.{self.minor} {'alone' if self.alone else 'or above'}"


BY_METHOD = {
    "awq": Capability(7, 5),
    "experts_int8": Capability(8, 0),
    "fbgemm_fp8": Capability(8, 0),
    "fp8": Capability(7, 5),
    "fp_quant": Capability(10, 0),
    "gptq": Capability(6, 0),
    "humming": Capability(7, 5),
    "moe_wna16": Capability(7, 0),
    "mxfp4": Capability(8, 0),
    "quark": Capability(7, 0),
    "torchao": Capability(7, 5),
}
MODELOPT = {"MXFP8": Capability(8, 0), "FP4": Capability(7, 5), "MIXED": Capability(7, 5), "FP8": Capability(8, 0)}
W4A8_FP8, MXFP4, WNA8O8, SIXTEEN_BITS = (
    Capability(9, 0, alone=True),  # the only card on which vLLM takes this scheme; it has no other for it
    Capability(8, 0),
    Capability(7, 0),
    Capability(7, 5),  # and 8-bit schemes: where 8-bit floats cannot be multiplied, vLLM does so in 16 bits
)


def vllm_capability(config: PretrainedConfig) -> Capability | None:
    """That of the GPUs on which vLLM reads this checkpoint; None where its format asks for none."""
    settings = quantization_of(config) or {}
    method = str(settings.get("quant_method", "")).lower()
    if method == "compressed-tensors":
        return max(_schemes(settings), default=WNA8O8, key=lambda least: (least.alone, least))
    if method.startswith("modelopt"):
        inner = settings.get("quantization")
        algorithm = str((inner if isinstance(inner, dict) else settings).get("quant_algo", "")).upper()
        return next((least for name, least in MODELOPT.items() if name in algorithm), None)
    return BY_METHOD.get(method)


def _schemes(settings: Settings) -> Iterator[Capability]:
    """That of each group of layers of compressed-tensors, told as vLLM tells the schemes."""
    groups = settings.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        if isinstance(group, dict) and isinstance(group.get("weights"), dict):
            sides = ("input_activations", "output_activations")
            inputs, outputs = ({} if group.get(side) is None else group[side] for side in sides)
            yield _scheme(group["weights"], inputs, outputs)


def _scheme(weights: Settings, inputs: Settings, outputs: Settings) -> Capability:
    strategy, bits = _strategy(weights), weights.get("num_bits", 8)
    if weights.get("type") == "float":
        return MXFP4 if bits == 4 and strategy == "group" and weights.get("group_size") == 32 else SIXTEEN_BITS
    if bits == 4 and strategy == "group" and inputs.get("type") == "float":
        return W4A8_FP8
    rounds_tensors = all(
        side.get("type", "int") == "int" and _strategy(side) == "tensor" and not side.get("dynamic")
        for side in (inputs, outputs)
    )
    return WNA8O8 if inputs and outputs and rounds_tensors and strategy in ("channel", "group") else SIXTEEN_BITS


def _strategy(side: Settings) -> str:
    """As compressed-tensors takes it where none is named."""
    size = side.get("group_size") or 0
    return str(side.get("strategy") or ("group" if size > 0 else "channel" if size < 0 else "tensor"))
