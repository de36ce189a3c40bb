"""How heads are trained: what each method reads, which backbone its heads belong to, what it needs to be installed.

`train.method` names an object in `METHODS`; nothing else asks which method it is. A method does not know which kind of
head it trains. Importing this module does not import torch.
"""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

from pipeline.config import Config, TrainConfig
from pipeline.config.training import Bits
from pipeline.errors import ConfigError


class Package(NamedTuple):
    """A package that training imports, the key that asks for it, and what to do where it is not installed."""

    name: str
    key: str
    fix: str


class Method(ABC):
    """One way to train heads; holds no state, so that it travels to workers by its class."""

    name: ClassVar[str]
    tunes_backbone: ClassVar[bool] = False
    """Whether training changes the backbone too. That backbone is then exported, checked and published with the heads,
    and the held-out states that calibrate reads are computed with it instead of taken from the features stage."""
    memory_fix: ClassVar[str] = "Lower train.batch_tokens, or set train.optimizer: adamw-8bit or train.lm_head: tied."
    """What to do where a GPU runs out of memory."""

    @abstractmethod
    def reads(self, train: TrainConfig) -> tuple[str, ...]:
        """The stages that training reads: `features`, `generate` or both."""

    def skipped(self, train: TrainConfig) -> dict[str, str]:
        """The stages whose result nothing would read, and why."""
        return {}

    def reported(self, train: TrainConfig) -> dict[str, Any]:
        """What report.json says of the method under `train`."""
        return {}

    def unread(self, train: TrainConfig, target_quantization: Bits | None) -> set[str]:
        """The keys of `train` that the result does not depend on, besides bookkeeping."""
        return set()

    def check(self, config: Config) -> None:  # noqa: B027  (most methods train any target)
        """Refuse settings and targets that this method cannot train; raises ConfigError."""

    def packages(self, config: Config) -> Iterator[Package]:
        """The packages that training needs beyond torch and transformers."""
        yield from ()


class HeadsOnly(Method):
    """Medusa-1: heads on the frozen backbone, from the cached states (paper 2.2.1)."""

    name = "medusa-1"

    def reads(self, train: TrainConfig) -> tuple[str, ...]:
        return ("features",)

    def unread(self, train: TrainConfig, target_quantization: Bits | None) -> set[str]:
        return ONLY_WITH_BACKBONE


class HeadsAndBackbone(Method):
    """Medusa-2: heads and backbone (LoRA) together, from the generated text (2.2.2); after the heads alone, or not."""

    name = "medusa-2"
    tunes_backbone = True
    memory_fix = (
        "Lower train.micro_batch or train.sequence_length, or set train.gradient_checkpointing: true, "
        "train.optimizer: adamw-8bit, train.shard_backbone: true (several workers) or train.quantization: 4bit."
    )

    def reads(self, train: TrainConfig) -> tuple[str, ...]:
        return ("generate",) if train.recipe == "joint" else ("features", "generate")

    def skipped(self, train: TrainConfig) -> dict[str, str]:
        if train.recipe == "joint":
            return {"features": "not needed: joint Medusa-2 learns from the text"}
        return {}

    def reported(self, train: TrainConfig) -> dict[str, Any]:
        return {"recipe": train.recipe}

    def unread(self, train: TrainConfig, target_quantization: Bits | None) -> set[str]:
        same = train.quantization_beside(target_quantization) == target_quantization  # said or not, the target's own
        return ({"batch_tokens"} if train.recipe == "joint" else set()) | ({"quantization"} if same else set())

    def check(self, config: Config) -> None:
        from pipeline.targets.lora import require_tunable
        from pipeline.targets.spec import resolve

        train = config.train
        if (config.placement.train.gpus_per_worker or 0) > 1:
            raise ConfigError(
                "Medusa-2 computes on one GPU per worker; more would stand idle.",
                "placement.train.gpus_per_worker",
                "Set it to 1 and raise placement.train.workers; where the target does not fit on one GPU, "
                "train.shard_backbone: true splits it over the workers.",
            )
        bits = train.quantization_beside(config.target.quantization)
        if train.shard_backbone and bits:
            raise ConfigError(
                f"Weights in {bits} cannot be split over workers.",
                "train.shard_backbone",
                "Set it to false, since a quantized backbone is small, or train.quantization to none.",
            )
        require_tunable(resolve(config.target, on_gpu=False), train.lora_rank, sharded=train.shard_backbone)

    def packages(self, config: Config) -> Iterator[Package]:
        fix = "Install it with the right lock (`make install`), or set train.method to medusa-1."
        yield Package("peft", "train.method", fix)
        if config.train.quantization_beside(config.target.quantization):
            key = "train.quantization" if config.train.quantization else "target.quantization"
            yield Package("bitsandbytes", key, "Install it, or set train.quantization to none.")


METHODS: dict[str, Method] = {method.name: method for method in (HeadsOnly(), HeadsAndBackbone())}
ONLY_WITH_BACKBONE = {
    "recipe",
    "backbone_loss",
    "schedule",
    "lambda_0",
    "lora_rank",
    "lora_alpha",
    "lora_dropout",
    "backbone_lr",
    "sequence_length",
    "batch_sequences",
    "quantization",
}


def method_of(train: TrainConfig) -> Method:
    """The method that `train.method` names; raises ConfigError where there is none."""
    if train.method not in METHODS:
        near = difflib.get_close_matches(train.method, METHODS, n=1)
        hint = f"Did you mean '{near[0]}'? " if near else ""
        raise ConfigError(
            f"There is no training method '{train.method}'.", "train.method", f"{hint}It is {' or '.join(METHODS)}."
        )
    return METHODS[train.method]
