"""The table of the kinds of draft heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.config.training import TrainConfig
from pipeline.errors import ConfigError
from pipeline.heads.eagle3 import Eagle3Heads
from pipeline.heads.kind import Heads
from pipeline.heads.medusa import MedusaHeads
from pipeline.heads.recurrent import RecurrentHeads
from pipeline.heads.shapes import HeadsShape

KINDS: dict[str, type[Heads]] = {
    "medusa": MedusaHeads,
    "recurrent": RecurrentHeads,
    "eagle3": Eagle3Heads,
}


def head_kind(name: str) -> type[Heads]:
    """Return the class of a kind of heads; raise ConfigError for an unknown name."""
    if name not in KINDS:
        raise ConfigError(
            f'Unknown kind of heads: "{name}".',
            "train.heads",
            f"Use one of {', '.join(KINDS)}.",
        )
    return KINDS[name]


def shape_from_json(content: Mapping[str, Any]) -> HeadsShape:
    """Read a heads shape from JSON.

    Raises:
        KeyError, TypeError, ValueError: The kind is missing or unknown, or fields are missing,
            unknown or out of range.
    """
    fields = dict(content)
    return KINDS[fields.pop("kind")].Shape(**fields)


def max_tree_depth(settings: TrainConfig) -> int:
    """Return how many tokens ahead the configured kind of heads can propose.

    Raises ConfigError for an unknown kind.
    """
    return _shape_of_any_target(settings).max_depth


def reads_rows(settings: TrainConfig) -> bool:
    """Return whether the configured kind of heads has `row_layers`: it reads whole rows.

    Raises ConfigError for an unknown kind.
    """
    return bool(_shape_of_any_target(settings).row_layers)


def _shape_of_any_target(settings: TrainConfig) -> HeadsShape:
    """Return the shape of the configured heads with sizes that are of no target."""
    return head_kind(settings.heads).shape_of(settings, 1, 1, 1_000)
