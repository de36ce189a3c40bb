"""Refuses what the GPUs that workers may get cannot compute, before anything is computed."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from pipeline.config import Config
from pipeline.errors import EnvironmentFault
from pipeline.execution.cards import Card, counted, visible_cards
from pipeline.run.placements import OF_ENGINE, sections_of, unfinished
from pipeline.run.served_copy import WHERE, served_model
from pipeline.targets.quantization import format_of
from pipeline.targets.spec import TargetSpec, model_config, resolve
from pipeline.targets.vllm_capability import vllm_capability


def require_cards(config: Config, cards: Collection[Card], stages: Collection[str] | None = None) -> None:
    """Refuse what a GPU that a worker may get cannot compute: bfloat16, and quantized weights in vLLM.

    Arguments and errors as of `require_bfloat16`.
    """
    require_bfloat16(config, cards, stages)
    require_formats(config, cards, stages)


def require_bfloat16(config: Config, cards: Collection[Card], stages: Collection[str] | None = None) -> None:
    """Refuse bfloat16 where a worker may get a GPU without it.

    Args:
        cards: Every GPU that a worker may get.
        stages: Those to run; None for all that have no finished result.

    Raises:
        EnvironmentFault: Names the GPUs, and the setting that asks for it.
    """
    old = [card for card in cards if card.lacks_bfloat16]
    on_gpu = _on_gpu(config, stages)
    if not old or not on_gpu:
        return
    wants = [use for use in _uses(config, on_gpu) if use.dtype == "bfloat16"]
    if wants:
        asked = " and ".join(use.what for use in wants)
        raise EnvironmentFault(
            f"bfloat16 needs a GPU of compute capability 8.0 or above (A100, L4, H100), and a worker may get one that "
            f"has less: {counted(old)}. In bfloat16 are {asked}.",
            ", ".join(use.key for use in wants),
            f"Set {' and '.join(use.instead for use in wants)}, or run on newer GPUs.",
        )


def require_formats(config: Config, cards: Collection[Card], stages: Collection[str] | None = None) -> None:
    """Refuse quantized weights that vLLM would read on a GPU that is not one for their format.

    Arguments and errors as of `require_bfloat16`; a GPU of unknown capability is taken to do.
    """
    if all(card.capability is None for card in cards):
        return
    for where, spec in _read_by_vllm(config, _on_gpu(config, stages)):
        content = model_config(spec)
        needed = vllm_capability(content)
        unfit = [card for card in cards if needed and card.capability and not needed.has(card.capability)]
        if unfit:
            raise EnvironmentFault(
                f"{spec.model} is {format_of(content)}, which vLLM reads on GPUs of compute capability {needed}, and a "
                f"worker may get another: {counted(unfit)}.",
                where,
                "Name a copy that is not quantized, leave it to transformers (engine: transformers, check.engines: "
                "[native]), or run on other GPUs.",
            )


def _on_gpu(config: Config, stages: Collection[str] | None) -> dict[str, set[str]]:
    """Of these stages those that work on GPUs, each with the sections of `placement` that give it some."""
    given = {name for name, of in config.placement.of_stages().items() if of.gpus_per_worker != 0}
    names = unfinished(config) if stages is None else stages
    found = {name: sections_of(config, [name]) & given for name in names}
    return {name: sections for name, sections in found.items() if sections}


def _read_by_vllm(config: Config, on_gpu: Mapping[str, Collection[str]]) -> Iterator[tuple[str, TargetSpec]]:
    """The models that vLLM loads on a GPU, each with the key that names it."""
    on_vllm = config.generate.engine == "vllm"
    writes = on_vllm and config.generate.mode != "passthrough" and "generate" in on_gpu
    answers = on_vllm and config.calibrate.data is not None and "generate" in on_gpu.get("calibrate", ())
    in_check = "vllm" in config.check.engines and OF_ENGINE["vllm"] in on_gpu.get("check", ())
    computes = config.features.engine == "vllm" and on_gpu.keys() & {"features", "tuned-features"}
    if in_check or computes or writes or answers:
        target = resolve(config.target, on_gpu=True)
        yield "target.model", target
        if in_check and (copy := served_model(config, target, on_gpu=True)):
            yield WHERE, copy


def require_own_cards(config: Config, stages: Collection[str] | None = None, fresh: str | None = None) -> None:
    """Refuse what this machine's GPUs lack, unless a cluster's decide; a stage's finished result may be kept."""
    if not os.environ.get("RAY_ADDRESS"):
        require_cards(config, visible_cards(), unfinished(config, stages, fresh))


@dataclass(frozen=True)
class _Use:
    """Something that is computed on a GPU, its dtype, the key that says so, and a setting without bfloat16."""

    what: str
    dtype: str
    key: str
    instead: str


def _uses(config: Config, on_gpu: Collection[str]) -> list[_Use]:
    target = resolve(config.target, on_gpu=True).dtype
    found = [_Use("the target", target, "target.dtype", "target.dtype: float16")]
    if "train" in on_gpu:
        trained = "float32" if config.train.precision == "fp32" else "bfloat16"
        found.append(_Use("the heads' training", trained, "train.precision", "train.precision: fp32"))
    return found
