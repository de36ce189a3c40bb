"""Refuses what cannot fit into a device's memory, with its sum, and finds the settings with which it would."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import combinations, islice
from typing import Any

from pipeline.config import Config
from pipeline.config.load import validate
from pipeline.errors import ConfigError, EnvironmentFault
from pipeline.execution.device_memory import GIB
from pipeline.heads.shape import KINDS, head_kind
from pipeline.run.budget import budgets, sizes_of
from pipeline.run.placements import OF_ENGINE, unfinished
from pipeline.run.preflight import not_served
from pipeline.run.stage_budget import PLACED, StageBudget
from pipeline.targets.sizes import TargetSizes
from pipeline.training.methods import method_of

Changes = dict[str, Any]  # settings by key
Group = Sequence[Changes]

LEFT_OUT = {"timing": "timing", "vLLM check": "vLLM", "vLLM copy": "vLLM"}  # rows that a setting spares


def check_memory(
    config: Config,
    stages: Collection[str],
    positions: Callable[[], int | None] = lambda: None,
    fresh: str | None = None,
) -> None:
    """Refuse a run of which a stage cannot fit into memory, as far as that is known here.

    A stage with a finished result in the store is not checked, since it may be kept, except `fresh`.

    Args:
        positions: Counts those to train on, None where nobody knows; called only where the largest batches, which few
            positions do not make, would not fit.

    Raises:
        EnvironmentFault: See `require_fit`.
    """
    open_stages = set(unfinished(config, stages, fresh))
    if not open_stages & PLACED or (sizes := sizes_of(config)) is None:
        return
    if all(budget.fits for budget in budgets(config, sizes) if budget.placed in open_stages):
        return
    number = positions()
    found = [budget for budget in budgets(config, sizes, number) if budget.placed in open_stages]
    require_fit(config, sizes, found, number)


def require_fit(
    config: Config, sizes: TargetSizes, found: Collection[StageBudget], positions: int | None = None
) -> None:
    """Raise EnvironmentFault where a stage cannot fit, with the sums of all that do not and what would fit of each.

    `positions` are those that `found` was made for, see `budgets`.
    """
    misfits = [budget for budget in found if not budget.fits]
    if not misfits:
        return
    device = misfits[0].device
    assert device.memory is not None
    has = f"{device.name} has {device.memory / GIB:.1f} GiB"
    advice = [f"{each.stage}: {fits}" for each in misfits if (fits := what_fits(config, sizes, each, positions))]
    fix = f"What would fit: {'; '.join(advice)}." if advice else "Take more memory, or a smaller target."
    if not device.on_gpu:
        fix += " To plan for GPUs that are elsewhere, give placement.gpu_memory_gb."
    sums = "; ".join(map(_sum, misfits))
    raise EnvironmentFault(f"This does not fit into memory: {sums}; {has}.", "placement", fix)


def what_fits(
    config: Config, sizes: TargetSizes, budget: StageBudget, positions: int | None = None, most: int = 6
) -> str:
    """Up to `most` changes of settings with which the stage fits, each with its GiB: `train.heads=… (54.2 GiB)`.

    Of each group the first that does, else of each two groups; empty where neither helps.
    """
    stage = budget.stage
    groups = list(_smaller(config, stage, sizes, on_gpu=budget.device.on_gpu))
    pairs = ([one | other for one in first for other in second] for first, second in combinations(groups, 2))
    for tried in (groups, pairs):
        firsts = (next(_fitting(config, sizes, stage, group, positions), None) for group in tried)
        if found := list(islice(filter(None, firsts), most)):
            return " or ".join(found)
    return ""


def _fitting(config: Config, sizes: TargetSizes, stage: str, group: Group, positions: int | None) -> Iterator[str]:
    for change in group:
        try:
            changed = _with(config, change)
            budget = next((each for each in budgets(changed, sizes, positions) if each.stage == stage), None)
            refused = "vllm" in changed.check.engines and not_served(changed)
        except ConfigError:
            continue
        words = " ".join(f"{key}={_word(value)}" for key, value in change.items())
        if budget is None and stage in LEFT_OUT:
            yield f"{words} (without {LEFT_OUT[stage]})"
        elif budget and budget.fits and not refused:
            yield f"{words} ({budget.least.total / GIB:.1f} GiB)"


def _smaller(config: Config, stage: str, sizes: TargetSizes, *, on_gpu: bool) -> Iterator[Group]:
    """Groups of settings that make a stage smaller; within a group those first that cost least."""
    placed = OF_ENGINE["native"] if stage in ("check", "timing", "served copy") else stage
    if stage == "timing":
        yield [{"calibrate.nodes": 63}]  # as many as the paper's tree has: nothing is timed
    if stage in ("vLLM check", "vLLM copy"):
        yield from _smaller_in_vllm(config, on_gpu=on_gpu)
        return
    if placed in ("generate", "features"):
        if on_gpu:
            yield [{f"placement.{placed}.gpus_per_worker": number} for number in (2, 4, 8)]
        if stage != "served copy":
            yield [{"target.quantization": bits, **_without_vllm(config)} for bits in ("8bit", "4bit")]
        yield [{"target.max_tokens": number} for number in (32768, 8192, 4096) if number < sizes.context]
        return
    kind, method = head_kind(config.train.heads), method_of(config.train)
    trains = stage != "calibrate"  # which has neither batches nor an optimizer
    if trains:
        yield [{"train.optimizer": "adamw-8bit"}]
    yield from ([change] for change in kind.smaller)
    yield from ([{"train.heads": name}] for name in KINDS if name != config.train.heads)
    yield from method.smaller
    drafted = [{"train.draft_vocab": size} for size in (65536, 32768, 16384) if size < sizes.vocab_size]
    yield [*drafted, *({**change, "check.engines": ["native"]} for change in drafted)]  # vLLM serves not every kind's
    if trains:
        yield [{"train.batch_tokens": size} for size in (8192, 4096, 2048)]


def _smaller_in_vllm(config: Config, *, on_gpu: bool) -> Iterator[Group]:
    """Of the check in vLLM: its share of a card is fixed, and what it holds are weights and heads."""
    if on_gpu:
        yield [{f"placement.{OF_ENGINE['vllm']}.gpus_per_worker": number} for number in (2, 4, 8)]
    yield from ([{**change, "export.formats": ["shared"]}] for change in head_kind(config.train.heads).smaller)
    yield [{"train.heads": name} for name in KINDS if name != config.train.heads]
    yield [{"check.engines": ["native"]}]


def _without_vllm(config: Config) -> Changes:
    """What leaves vLLM out, which loads no target in 8 or 4 bit, wherever it is asked for."""
    found: Changes = {}
    for stage in ("generate", "features"):
        if getattr(config, stage).engine == "vllm":
            found[f"{stage}.engine"] = "transformers"
    return found | ({"check.engines": ["native"]} if "vllm" in config.check.engines else {})


def _with(config: Config, changes: Changes) -> Config:
    settings = config.model_dump(mode="json")
    for key, value in changes.items():
        *sections, name = key.split(".")
        place = settings
        for section in sections:
            place = place[section]
        place[name] = value
    return validate(settings, "plan")


def _word(value: Any) -> str:
    """As the command line takes it."""
    if isinstance(value, list):
        return f"[{','.join(map(_word, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _sum(budget: StageBudget) -> str:
    """`train takes 93.1 of 76.6 GiB (heads 20.8, …)`, which are those that it may use of a GPU."""
    parts = [f"{name} {size / GIB:.1f}" for name, size in budget.least.parts().items() if size > 0.05 * GIB]
    times = f" in each of {budget.on_device} workers" if budget.on_device > 1 else ""
    room = f" of {budget.device.room / GIB:.1f}" if budget.device.on_gpu and budget.device.room else ""
    return f"{budget.stage} takes {budget.least.total / GIB:.1f}{room} GiB{times} ({', '.join(parts)})"
