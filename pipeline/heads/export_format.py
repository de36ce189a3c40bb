"""The layouts that an export may have, one object each: `export.formats` names them.

A format says which tensors an engine wants and what its files are called; a kind of heads says in
which formats it can be stored (`Heads.formats`), and which tensors those are.

    expanded   what vLLM, TGI and TensorRT-LLM load: every lm_head in full
    shared     one lm_head for all heads that share one
    reference  FasterDecoding/Medusa: `medusa_lm_head.pt`, a pickle of plain tensors that
    `weights_only=True` loads sglang     SGLang's EAGLE-1 model, `LlamaForCausalLMEagle`: its `fc`
    has a bias, here of zeros
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.errors import ConfigError


@dataclass(frozen=True)
class ExportFormat:
    """A layout of exported heads.

    Attributes:
        at_root: Whether vLLM and the check read it. The first of `export.formats` must be, since it
            is what is checked.
        weights_file: Its name, where it is not the kind's own safetensors file.
        one_lm_head: Whether an lm_head that all heads share is stored once.
        architecture: The model class that its engine looks for, where it is not vLLM's.
        fc_bias: Whether that class has a bias beside `fc.weight`.
    """

    name: str
    at_root: bool = False
    weights_file: str | None = None
    one_lm_head: bool = False
    architecture: str | None = None
    fc_bias: bool = False


EXPANDED = ExportFormat("expanded", at_root=True)
SHARED = ExportFormat("shared", at_root=True, one_lm_head=True)
REFERENCE = ExportFormat("reference", weights_file="medusa_lm_head.pt")
SGLANG = ExportFormat("sglang", architecture="LlamaForCausalLMEagle", fc_bias=True)

FORMATS = {format.name: format for format in (EXPANDED, SHARED, REFERENCE, SGLANG)}


def export_format(name: str) -> ExportFormat:
    """The format of this name; ConfigError where there is none."""
    if name not in FORMATS:
        fix = f"Use one of {', '.join(FORMATS)}."
        raise ConfigError(f'There is no format called "{name}".', "export.formats", fix)
    return FORMATS[name]
