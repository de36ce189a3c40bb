"""Resolve a run's configuration: models, heads, shapes, devices and workers."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.artifacts.tree_file import read_paths
from pipeline.config import Config, PlacementOf, TargetConfig
from pipeline.decoding.dynamic_tree import DynamicTree
from pipeline.decoding.tree import TreePath, check_choices
from pipeline.errors import ConfigError, DataError, MedusaDistillError
from pipeline.execution.executor import InlineExecutor
from pipeline.execution.placement import Placement, Resources, gpus_of, place, workers_of
from pipeline.export.hub import Repositories, repositories
from pipeline.export.layout import MAX_NUM_HEADS
from pipeline.heads.kind import Heads
from pipeline.heads.kinds import head_kind
from pipeline.heads.shapes import HeadsShape
from pipeline.targets.files import find_file
from pipeline.targets.spec import (
    TargetSpec,
    context_length,
    load_chat_template,
    model_config,
    own_dtype,
    resolve,
)
from pipeline.training.methods import Method, method_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from pipeline.conversations.template import ChatTemplate

TARGET, SERVED, ASSISTANT = "target.model", "check.served_model", "check.assistant_model"
ENGINE_SECTIONS = {"native": "features", "vllm": "generate"}
"""The section of `placement` whose workers each engine of the check runs on."""
SECTIONS = {
    "generate": "generate",
    "features": "features",
    "row-features": "features",
    "tuned-features": "features",
    "train": "train",
    "calibrate": "train",
}
"""The section of `placement` whose workers each stage runs on, except the check."""


@dataclass(frozen=True)
class ResolvedModel:
    """A target, served copy or assistant of the run, before its weights are loaded."""

    spec: TargetSpec
    config: PretrainedConfig
    dtype: str  # as configured, perhaps `auto`

    @classmethod
    def of(cls, settings: TargetConfig) -> ResolvedModel:
        """Resolve the settings of a model; raise what `resolve` raises."""
        spec = resolve(settings, on_gpu=False)
        return cls(spec, model_config(spec), settings.dtype)

    def on(self, *, on_gpu: bool) -> TargetSpec:
        """Return the model's spec with the dtype for workers on a GPU or on the CPU.

        The dtypes differ only if the configured dtype is `auto`.
        """
        if self.dtype != "auto":
            return self.spec
        return replace(self.spec, dtype=own_dtype(self.config, on_gpu))


@dataclass(frozen=True)
class ResolvedRun:
    """A configuration with its models, heads and method resolved for one machine.

    A model that is missing or cannot be reached is an error only when it is used, so that `plan`
    and `status` work without the Hub.
    """

    config: Config
    stages: tuple[str, ...]  # to run or keep, upstream first
    open_stages: tuple[str, ...]  # the stages without a finished result in the store
    kind: type[Heads]
    method: Method
    shape: HeadsShape  # of hidden size and vocabulary 1 if the target is not available
    num_layers: int  # of the target
    models: Mapping[str, ResolvedModel]  # by configuration key
    problems: Mapping[str, MedusaDistillError]  # errors of models that are not available
    machine: Resources

    def on(self, machine: Resources) -> ResolvedRun:
        """Return the same run with the dtypes and workers of another machine or cluster."""
        return replace(self, machine=machine)

    def model(self, key: str) -> ResolvedModel:
        """Return the model of a configuration key; raise its error if it is not available."""
        if key in self.problems:
            raise self.problems[key]
        return self.models[key]

    @functools.cached_property
    def target(self) -> TargetSpec:
        """The spec of the run's target, in the dtype of the workers of `features`.

        Raises:
            ConfigError: The target does not exist, or cannot verify a candidate tree.
            EnvironmentFault: The Hub cannot be reached.
        """
        return self.model(TARGET).on(on_gpu=self.gpus_of("features") > 0)

    @functools.cached_property
    def template(self) -> ChatTemplate | None:
        """The target's chat template; None if the target or its tokenizer is not available.

        Raises what `load_chat_template` raises.
        """
        if TARGET not in self.models:
            return None
        spec = self.target
        if find_file(spec.model, spec.revision, "tokenizer_config.json") is None:
            return None
        return load_chat_template(spec, special_tokens=self.config.seeds.special_tokens)

    @property
    def target_config(self) -> PretrainedConfig:
        """The transformers configuration of the run's target."""
        return self.model(TARGET).config

    @property
    def context(self) -> int:
        """The context length of the run's target in tokens."""
        return context_length(self.model(TARGET).spec, self.target_config)

    @property
    def served_copies(self) -> dict[str, TargetSpec]:
        """The spec of `check.served_model` for each engine of the check; empty if it is not set."""
        if self.config.check.served_model is None:
            return {}
        copies: dict[str, TargetSpec] = {}
        for engine in self.config.check.engines:
            on_gpu = self.gpus_of(ENGINE_SECTIONS[engine]) > 0
            copies[engine] = self.model(SERVED).on(on_gpu=on_gpu)
        return copies

    @property
    def assistant(self) -> TargetSpec | None:
        """The spec of `check.assistant_model`, in the target's dtype; None if it is not set."""
        if self.config.check.assistant_model is None:
            return None
        return replace(self.model(ASSISTANT).spec, dtype=self.target.dtype)

    @property
    def repositories(self) -> Repositories:
        """The Hub repositories that the run is pushed to."""
        push, target = self.config.push, self.config.target.model
        return repositories(push, self.kind, target, tuned=self.method.tunes_backbone)

    def gpus_of(self, section: str) -> int:
        """Return the number of GPUs of each worker in a section of `placement`."""
        return gpus_of(self._wanted(section), self.machine)

    def workers_of(self, section: str) -> int:
        """Return the number of workers in a section of `placement`; `auto` fills the machine."""
        return workers_of(self._wanted(section), self.machine)

    def placement(self, section: str) -> Placement:
        """Place the workers of a section of `placement`.

        Raises:
            EnvironmentFault: The machine or cluster can never run them all at once.
        """
        return place(section, self._wanted(section), self.machine)

    def _wanted(self, section: str) -> PlacementOf:
        """Return the settings of a section of `placement`."""
        return self.config.placement.of_stages()[section]

    def sections_of(self, stage: str) -> list[str]:
        """Return the sections of `placement` whose workers must fit for a stage to run."""
        if stage == "check":
            return [ENGINE_SECTIONS[engine] for engine in self.config.check.engines]
        section = SECTIONS.get(stage)
        return [section] if section else []

    @property
    def times_trees(self) -> bool:
        """Whether calibrate times native decoding with trees of several sizes."""
        return self.config.calibrate.choices is None

    @property
    def times_chain(self) -> bool:
        """Whether calibrate times native decoding with chains of several lengths."""
        return self.times_trees and self.kind.vllm_method is not None

    @property
    def max_draft_tokens(self) -> int:
        """The largest number of tokens that the heads can draft in a row, at most vLLM's limit."""
        return min(self.shape.max_depth, MAX_NUM_HEADS)

    @functools.cached_property
    def choices(self) -> tuple[TreePath, ...] | None:
        """The validated paths in `calibrate.choices`; None if it is not set.

        Raises:
            ConfigError: The file of the paths cannot be read, or the paths are not a tree.
        """
        given = self.config.calibrate.choices
        if given is None:
            return None
        try:
            paths = read_paths(given) if isinstance(given, Path) else given
            return check_choices(paths, self.shape.max_depth, self.config.calibrate.top)
        except (ConfigError, DataError) as error:
            raise ConfigError(error.what, f"calibrate.choices = {given}", error.fix) from None

    @property
    def dynamic_tree(self) -> DynamicTree | None:
        """The dynamic tree that `calibrate` configures; None for a static tree.

        With `calibrate.nodes: auto` it has one node.

        Raises:
            ConfigError: More nodes are configured than the heads propose.
        """
        settings = self.config.calibrate
        if settings.tree != "dynamic":
            return None
        depth = settings.depth or self.config.train.num_heads
        smallest = DynamicTree(1, depth, settings.top)
        if settings.nodes == "auto":
            return smallest
        most = smallest.num_proposed
        if settings.nodes > most:
            raise ConfigError(
                f"The heads propose {most} nodes for a dynamic tree, fewer than {settings.nodes}.",
                "calibrate.nodes",
                "Lower this setting, or raise calibrate.top or calibrate.depth.",
            )
        return smallest.resized(settings.nodes)


def resolve_run(config: Config, stages: Sequence[str], fresh: str | None = None) -> ResolvedRun:
    """Resolve a run's configuration on this machine: its models, heads, method and workers.

    A model that is not available causes an error only when it is used.

    Args:
        stages: The stages to run or keep, upstream first.
        fresh: The stage among them whose result is deleted and rebuilt.

    Raises:
        ConfigError: There is no such kind of heads or method of training.
    """
    kind = head_kind(config.train.heads)
    store = config.run.store or config.run.directory
    models = {}
    problems = {}
    for key, settings in _models_of(config, stages).items():
        try:
            models[key] = ResolvedModel.of(settings)
        except MedusaDistillError as error:
            if key != TARGET:
                error.where = key
            problems[key] = error
    sizes = (1, 1, 1_000)
    if TARGET in models:
        text_config = models[TARGET].config.get_text_config()
        sizes = (text_config.hidden_size, text_config.vocab_size, text_config.num_hidden_layers)
    open_stages = []
    for name in stages:
        if name == fresh or not any(store.glob(f"{name}-*/DONE.json")):
            open_stages.append(name)
    return ResolvedRun(
        config=config,
        stages=tuple(stages),
        open_stages=tuple(open_stages),
        kind=kind,
        method=method_of(config.train),
        shape=kind.shape_of(config.train, *sizes),
        num_layers=sizes[-1],
        models=models,
        problems=problems,
        machine=InlineExecutor().resources(),
    )


def _models_of(config: Config, stages: Sequence[str]) -> dict[str, TargetConfig]:
    """Return the settings of all models that the configuration names, by configuration key.

    The result is empty if the stages read no model.
    """
    if set(stages) <= {"seeds", "push"}:  # which read no model
        return {}
    wanted = {TARGET: config.target}
    if config.check.served_model:
        wanted[SERVED] = TargetConfig(
            model=config.check.served_model,
            trust_remote_code=config.target.trust_remote_code,
            chat_template=config.target.chat_template,
            max_tokens=config.target.max_tokens,
        )
    if config.check.assistant_model:
        wanted[ASSISTANT] = TargetConfig(model=config.check.assistant_model)
    return wanted
