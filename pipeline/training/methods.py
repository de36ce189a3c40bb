"""How heads are trained: what each method reads, which backbone its heads belong to, what it needs
to be installed.

`train.method` names an object in `METHODS`; nothing else asks which method it is. A method does not
know which kind of head it trains. Importing this module does not import torch.
"""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from pipeline.config import Config, Section, TrainConfig
from pipeline.config.training import Bits
from pipeline.errors import ConfigError
from pipeline.training import recipe

if TYPE_CHECKING:
    from pipeline.targets.spec import TargetSpec
    from pipeline.training.learner import Learner

BOOKKEEPING = {"checkpoint_minutes", "checkpoint_every", "keep_checkpoints", "report_to"}


class Package(NamedTuple):
    """A package that training imports, the key that asks for it, and what to do where it is not
    installed.
    """

    name: str
    key: str
    fix: str


class Method(ABC):
    """One way to train heads; holds no state, so that it travels to workers by its class."""

    name: ClassVar[str]
    tunes_backbone: ClassVar[bool] = False
    """Whether training changes the backbone too. That backbone is then exported, checked and published with the heads,
    and the held-out states that calibrate reads are computed with it instead of taken from the features stage."""  # noqa: E501
    sections: ClassVar[tuple[str, ...]] = ()
    """The nested sections of `train` that belong to this method."""

    @abstractmethod
    def reads(self, train: TrainConfig) -> tuple[str, ...]:
        """The stages that training reads: `features`, `generate` or both."""

    def skipped(self, train: TrainConfig) -> dict[str, str]:
        """The stages whose result nothing would read, and why."""
        return {}

    def reported(self, train: TrainConfig) -> dict[str, Any]:
        """What report.json says of the method under `train`."""
        return {}

    def settings(self, train: TrainConfig, target_quantization: Bits | None) -> dict[str, Any]:
        """The keys of `train` that the result depends on, as plain data: no bookkeeping, and no
        section of another kind or method."""
        found = train.model_dump(
            mode="json", exclude=BOOKKEEPING | _sections(train) - self.sections_of(train)
        )
        return found | ({"recipe": recipe.VERSION} if recipe.uses_rule(found) else {})

    def unread(self, train: TrainConfig) -> list[str]:
        """The keys of `train` that are set to no use, since only another kind or method reads
        them.
        """
        others = sorted(_sections(train) - self.sections_of(train))
        return [
            f"train.{name}.{key}"
            for name in others
            for key in getattr(train, name).model_dump(exclude_defaults=True)
        ]

    def sections_of(self, train: TrainConfig) -> set[str]:
        """The nested sections of `train` that are read: the kind's, which has its name, and the
        method's.
        """
        return {train.heads, *self.sections}

    def check(self, config: Config, target: TargetSpec) -> None:  # noqa: B027  (most train any)
        """Refuse settings and targets that this method cannot train; raises ConfigError."""

    def packages(self, config: Config) -> Iterator[Package]:
        """The packages that training needs beyond torch and transformers."""
        yield from ()

    @abstractmethod
    def phases(self, train: TrainConfig) -> list[tuple[str, type[Learner]]]:
        """The trainings that follow one another, each with the name of its directory; the last
        one's is empty.
        """


class HeadsOnly(Method):
    """Medusa-1: heads on the frozen backbone, from the cached states (paper 2.2.1)."""

    name = "medusa-1"

    def reads(self, train: TrainConfig) -> tuple[str, ...]:
        return ("features",)

    def phases(self, train: TrainConfig) -> list[tuple[str, type[Learner]]]:
        from pipeline.training.heads_only import HeadsLearner

        return [("", HeadsLearner)]


class HeadsAndBackbone(Method):
    """Medusa-2: heads and backbone (LoRA) together, from the generated text (2.2.2); after the
    heads alone, or not.
    """

    name = "medusa-2"
    tunes_backbone = True
    sections = ("backbone",)

    def reads(self, train: TrainConfig) -> tuple[str, ...]:
        return ("generate",) if train.backbone.recipe == "joint" else ("features", "generate")

    def skipped(self, train: TrainConfig) -> dict[str, str]:
        if train.backbone.recipe == "joint":
            return {"features": "not needed: joint Medusa-2 learns from the text"}
        return {}

    def reported(self, train: TrainConfig) -> dict[str, Any]:
        return {"recipe": train.backbone.recipe}

    def settings(self, train: TrainConfig, target_quantization: Bits | None) -> dict[str, Any]:
        found = super().settings(train, target_quantization)
        unread = {"micro_batch", "gradient_checkpointing", "shard", "max_kl"}
        if train.backbone.quantization_beside(target_quantization) == target_quantization:
            unread.add("quantization")  # set or not, it is the target's own
        if train.backbone.recipe == "joint":
            del found["batch_tokens"]
        return found | {
            "backbone": {
                key: value for key, value in found["backbone"].items() if key not in unread
            }
        }

    def check(self, config: Config, target: TargetSpec) -> None:
        from pipeline.targets.lora import require_tunable

        settings = config.train.backbone
        if (config.placement.train.gpus_per_worker or 0) > 1:
            raise ConfigError(
                "Medusa-2 computes on one GPU per worker; more would stand idle.",
                "placement.train.gpus_per_worker",
                "Set it to 1 and raise placement.train.workers; where the target does not fit on"
                " one GPU, train.backbone.shard: true splits it over the workers.",
            )
        bits = settings.quantization_beside(config.target.quantization)
        if settings.shard and bits:
            raise ConfigError(
                f"Weights in {bits} cannot be split over workers.",
                "train.backbone.shard",
                "Set it to false, since a quantized backbone is small, or"
                " train.backbone.quantization to none.",
            )
        require_tunable(target, settings.lora_rank, sharded=settings.shard)

    def packages(self, config: Config) -> Iterator[Package]:
        fix = "Install it with the right lock (`make install`), or set train.method to medusa-1."
        yield Package("peft", "train.method", fix)
        settings = config.train.backbone
        if settings.quantization_beside(config.target.quantization):
            key = "train.backbone.quantization" if settings.quantization else "target.quantization"
            yield Package(
                "bitsandbytes", key, "Install it, or set train.backbone.quantization to none."
            )

    def phases(self, train: TrainConfig) -> list[tuple[str, type[Learner]]]:
        from pipeline.training.heads_and_backbone import BackboneLearner
        from pipeline.training.heads_only import HeadsLearner

        both: list[tuple[str, type[Learner]]] = [("", BackboneLearner)]
        return both if train.backbone.recipe == "joint" else [("heads-first", HeadsLearner), *both]


def _sections(train: TrainConfig) -> set[str]:
    """The nested sections of `train`."""
    return {name for name in type(train).model_fields if isinstance(getattr(train, name), Section)}


METHODS: dict[str, Method] = {method.name: method for method in (HeadsOnly(), HeadsAndBackbone())}


def method_of(train: TrainConfig) -> Method:
    """The method that `train.method` names; raises ConfigError where there is none."""
    if train.method not in METHODS:
        near = difflib.get_close_matches(train.method, METHODS, n=1)
        hint = f"Did you mean '{near[0]}'? " if near else ""
        raise ConfigError(
            f"There is no training method '{train.method}'.",
            "train.method",
            f"{hint}It is {' or '.join(METHODS)}.",
        )
    return METHODS[train.method]
