"""Where stages work: the sections of `placement` that place their workers, and those of each engine
of the check.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from pipeline.config import Config
from pipeline.run.tree_settings import times_trees
from pipeline.storage.run_directory import finished_before
from pipeline.training.methods import method_of

OF_ENGINE = {"native": "features", "vllm": "generate"}  # of the check


def _of_calibrate(config: Config) -> set[str]:
    """Accuracies by `train`'s workers, unless the target answers questions first; then timing."""
    on = {"generate", "features"} if config.calibrate.data else {"train"}
    if times_trees(config):
        on.add(OF_ENGINE["native"])
    return on


def _of_check(config: Config) -> set[str]:
    return {OF_ENGINE["native"], *(OF_ENGINE[engine] for engine in config.check.engines)}


_OF_STAGE: dict[str, Callable[[Config], set[str]]] = {
    "generate": lambda config: {"generate"},
    "features": lambda config: {"features"},
    "tuned-features": lambda config: {"features"},
    "train": lambda config: {"train"},
    "calibrate": _of_calibrate,
    "check": _of_check,
}


def sections_of(config: Config, stages: Iterable[str]) -> set[str]:
    """The sections that place these stages' workers; of a stage that has none, nothing."""
    return {
        section for stage in stages if stage in _OF_STAGE for section in _OF_STAGE[stage](config)
    }


def may_be_kept(config: Config, stage: str, fresh: str | None = None) -> bool:
    """Whether a stage has a finished result in the store, perhaps another machine's; that of
    `fresh` is thrown away.
    """
    return stage != fresh and finished_before(config.run.store or config.run.directory, stage)


def unfinished(
    config: Config, stages: Collection[str] | None = None, fresh: str | None = None
) -> list[str]:
    """Those with workers of these stages, or of all, that have no result which may be kept."""
    possible = _OF_STAGE.keys() - (
        set() if method_of(config.train).tunes_backbone else {"tuned-features"}
    )
    asked = [name for name in _OF_STAGE if name in (possible if stages is None else stages)]
    return [name for name in asked if not may_be_kept(config, name, fresh)]
