"""Training methods (`train.method`): input stages, settings, requirements and phases.

`METHODS` is the table of the methods by name. Importing this module does not import torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from pipeline.config import Config, Section, TrainConfig
from pipeline.config.training import Bits
from pipeline.errors import ConfigError
from pipeline.storage.receipts import Identity
from pipeline.training import recipe

if TYPE_CHECKING:
    from pipeline.targets.spec import TargetSpec
    from pipeline.training.task import Phases

BOOKKEEPING = {"checkpoint_minutes", "checkpoint_every", "report_to"}


class Method(ABC):
    """Base class of the training methods (`train.method`), which train heads of any kind."""

    name: ClassVar[str]
    effect: ClassVar[str]  # on the target, in the report
    tunes_backbone: ClassVar[bool] = False
    """Whether training changes the backbone. If so, the tuned backbone is exported, checked and
    published with the heads, and calibrate computes held-out states with it."""
    sections: ClassVar[tuple[str, ...]] = ()
    """The nested sections of `train` that belong to this method."""
    advice: ClassVar[str] = ""
    """Advice that `plan` prints before a training with this method; empty for none."""

    @abstractmethod
    def reads(self, train: TrainConfig) -> tuple[str, ...]:
        """Return the stages whose output this method trains on: `features`, `generate` or both."""

    def skipped_stages(self, train: TrainConfig) -> dict[str, str]:
        """Return the stages that a run with this training method skips, each with the reason.

        Only `features` can be skipped.
        """
        if "features" in self.reads(train):
            return {}
        return {"features": "not needed: joint Medusa-2 learns from the text"}

    def recipe_name(self, train: TrainConfig) -> str | None:
        """Return the name of the configured recipe; None if this method has only one."""
        return None

    def settings(self, train: TrainConfig, target_quantization: Bits | None) -> Identity:
        """Return the `train` settings that the trained heads depend on, for their fingerprint.

        The key `recipe` is the version of the rule that resolves `auto`.
        """
        unread = self.unread_sections(train)
        found = train.model_dump(mode="json", exclude=BOOKKEEPING | unread)
        found["recipe"] = recipe.VERSION
        return found

    def unread_keys(self, train: TrainConfig) -> list[str]:
        """Return the keys of `train` that differ from their defaults but are not used.

        They belong to sections of another kind of heads or another training method.
        """
        keys = []
        for name in sorted(self.unread_sections(train)):
            for key in getattr(train, name).model_dump(exclude_defaults=True):
                keys.append(f"train.{name}.{key}")
        return keys

    def unread_sections(self, train: TrainConfig) -> set[str]:
        """Return the names of `train` sections for another kind of heads or training method."""
        sections = set()
        for name in type(train).model_fields:
            if isinstance(getattr(train, name), Section):
                sections.add(name)
        return sections - {train.heads, *self.sections}

    def check(self, config: Config, target: TargetSpec) -> None:  # noqa: B027  (most train any)
        """Raise ConfigError for settings and targets that this training method cannot train."""

    @abstractmethod
    def phases(self, train: TrainConfig) -> Phases:
        """Return the training phases in order as (directory, learner); the last directory is ""."""


class HeadsOnly(Method):
    """Medusa-1: heads on the frozen backbone, from the cached states (paper 2.2.1)."""

    name = "medusa-1"
    effect = "model unchanged"

    def reads(self, train: TrainConfig) -> tuple[str, ...]:
        """Return the stage that Medusa-1 training reads: `features`."""
        return ("features",)

    def phases(self, train: TrainConfig) -> Phases:
        """Return the only phase of Medusa-1 training: heads on cached states."""
        from pipeline.training.heads_only import HeadsLearner

        return (("", HeadsLearner),)


class HeadsAndBackbone(Method):
    """Medusa-2: heads and backbone (LoRA) from the generated text (paper 2.2.2).

    The two-stage recipe trains the heads alone first.
    """

    name = "medusa-2"
    effect = "model tuned with them (Medusa-2)"
    tunes_backbone = True
    sections = ("backbone",)
    advice = (
        "In our measurements medusa-2 accepted hardly more than medusa-1 after equally many passes"
        " over the same text, and trained several times as long (docs/which-heads.md). Try"
        " train.method: medusa-1 first."
    )

    def reads(self, train: TrainConfig) -> tuple[str, ...]:
        """Return the stages that Medusa-2 training reads: with the joint recipe `generate` only."""
        return ("generate",) if train.backbone.recipe == "joint" else ("features", "generate")

    def recipe_name(self, train: TrainConfig) -> str:
        """Return `train.backbone.recipe`: joint or two-stage."""
        return train.backbone.recipe

    def settings(self, train: TrainConfig, target_quantization: Bits | None) -> Identity:
        """Return the `train` settings that Medusa-2's heads and backbone depend on.

        Settings that do not change the result, such as `train.backbone.micro_batch`, are left out.
        """
        found = super().settings(train, target_quantization)
        backbone = found["backbone"]
        for key in ("micro_batch", "gradient_checkpointing", "shard", "max_kl"):
            del backbone[key]
        if train.backbone.quantization_beside(target_quantization) == target_quantization:
            del backbone["quantization"]  # set or not, it is the target's own
        if train.backbone.recipe == "joint":
            del found["batch_tokens"]
        return found

    def check(self, config: Config, target: TargetSpec) -> None:
        """Raise ConfigError for settings and targets that Medusa-2 cannot train."""
        from pipeline.heads.kinds import reads_rows
        from pipeline.targets.lora import require_tunable

        if reads_rows(config.train):
            raise ConfigError(
                f"Medusa-2 trains heads on the last state, and {config.train.heads} heads read the"
                " outputs of layers at every position.",
                "train.method",
                "Set it to medusa-1, or choose other train.heads.",
            )
        settings = config.train.backbone
        if (config.placement.train.gpus_per_worker or 0) > 1:
            raise ConfigError(
                "Medusa-2 computes on one GPU per worker and would leave the others unused.",
                "placement.train.gpus_per_worker",
                "Set it to 1 and raise placement.train.workers. If the target does not fit on one"
                " GPU, train.backbone.shard: true splits it over the workers.",
            )
        bits = settings.quantization_beside(config.target.quantization)
        if settings.shard and bits:
            raise ConfigError(
                f"Weights in {bits} cannot be split over workers.",
                "train.backbone.shard",
                "Set it to false, since a quantized backbone is small, or"
                " train.backbone.quantization to none.",
            )
        require_tunable(target, sharded=settings.shard)

    def phases(self, train: TrainConfig) -> Phases:
        """Return the phases of Medusa-2 training: joint, or heads alone and then joint."""
        from pipeline.training.heads_and_backbone import BackboneLearner
        from pipeline.training.heads_only import HeadsLearner

        if train.backbone.recipe == "joint":
            return (("", BackboneLearner),)
        return (("heads-first", HeadsLearner), ("", BackboneLearner))


METHODS: dict[str, Method] = {method.name: method for method in (HeadsOnly(), HeadsAndBackbone())}


def method_of(train: TrainConfig) -> Method:
    """Return the training method that `train.method` names; raise ConfigError if unknown."""
    if train.method not in METHODS:
        raise ConfigError(
            f"There is no training method '{train.method}'.",
            "train.method",
            f"Set train.method to {' or '.join(METHODS)}.",
        )
    return METHODS[train.method]
