"""The GPUs that workers may get, by kind: whether they are alike, and which of them lack bfloat16.

A cluster names one kind for each node (Ray's `accelerator_type`) and no compute capability: NVIDIA's older data center
cards are known by name, and of any other card nothing is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

KIND = "accelerator_type:"
BFLOAT16_FROM = (8, 0)  # compute capability: Ampere
BY_NAME = {"K80": (3, 7), "P100": (6, 0), "P4": (6, 1), "V100": (7, 0), "T4": (7, 5)}  # those that came before


@dataclass(frozen=True)
class Card:
    """One GPU: its kind, and CUDA's compute capability where it is known."""

    name: str
    capability: tuple[int, int] | None = None

    @property
    def lacks_bfloat16(self) -> bool:
        return self.capability is not None and self.capability < BFLOAT16_FROM


def visible_cards() -> tuple[Card, ...]:
    """This machine's GPUs, as torch sees them."""
    import torch

    gpus, cuda = range(torch.cuda.device_count()), torch.version.hip is None
    return tuple(
        Card(torch.cuda.get_device_name(gpu), torch.cuda.get_device_capability(gpu) if cuda else None) for gpu in gpus
    )


def cards_of_node(resources: Mapping[str, float]) -> tuple[Card, ...]:
    """The GPUs of a Ray node, from its resources."""
    kinds = sorted(key.removeprefix(KIND) for key in resources if key.startswith(KIND))
    name = " or ".join(kinds) or "of an unknown kind"
    return (Card(name, BY_NAME.get(name)),) * int(resources.get("GPU", 0))


def counted(cards: Iterable[Card]) -> str:
    """How many there are of each kind: `2 A100 and 4 H100`."""
    told = [f"{number} {name}" for name, number in sorted(Counter(card.name for card in cards).items())]
    return " and ".join(filter(None, (", ".join(told[:-1]), *told[-1:])))


def mixture(cards: Iterable[Card]) -> str | None:
    """What follows for a run where the GPUs are not of one kind, in a paragraph; None where they are."""
    cards = tuple(cards)
    if len({card.name for card in cards}) < 2:
        return None
    return (
        f"The GPUs are of different kinds: {counted(cards)}. A worker gets any of them: a stage of several workers "
        "ends with the slowest, what fits on one kind may not on another, and calibration and the check may measure on "
        "different ones. For figures of one kind run on nodes of one kind, or name GPUs with CUDA_VISIBLE_DEVICES."
    )
