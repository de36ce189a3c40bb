"""The kinds of heads by name, and what a set of heads is as plain data.

Importing this module imports no kind, and not torch.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pipeline.errors import ConfigError, DataError

if TYPE_CHECKING:
    from pipeline.config import TrainConfig
    from pipeline.heads.kind import Heads

# A kind's name, as `train.heads` has it: its class, or where that is imported from when it is first
# asked for.
KINDS: dict[str, str | type[Heads]] = {
    "medusa": "pipeline.heads.medusa:MedusaHeads",
    "recurrent": "pipeline.heads.recurrent:RecurrentHeads",
}


def head_kind(name: str) -> type[Heads]:
    """The kind of this name.

    Raises:
        ConfigError: There is none.
    """
    if name not in KINDS:
        near = difflib.get_close_matches(name, KINDS, n=1)
        fix = f"Did you mean {near[0]}?" if near else f"Use one of {', '.join(KINDS)}."
        raise ConfigError(f'There is no kind of heads called "{name}".', "train.heads", fix)
    kind = KINDS[name]
    if isinstance(kind, str):
        module, _, attribute = kind.partition(":")
        kind = getattr(importlib.import_module(module), attribute)
    assert not isinstance(kind, str)
    return kind


@dataclass(frozen=True)
class HeadsShape:
    """All that decides a set of heads' parameters, as plain data; a kind adds fields of its own.

    `kind` is its name in `KINDS`. `vocab_size` counts the tokens that the heads can propose, the
    rows of `lm_head`: those of the target, or fewer, a draft vocabulary. They read any of the
    target's `target_vocab_size`. Raises ValueError for a size below 1, or a draft vocabulary above
    the target's.
    """

    kind: ClassVar[str]
    hidden_size: int
    vocab_size: int
    num_heads: int
    target_vocab_size: int = field(default=0, kw_only=True)  # 0: `vocab_size`

    def __post_init__(self) -> None:
        object.__setattr__(self, "target_vocab_size", self.target_vocab_size or self.vocab_size)
        if min(value for value in asdict(self).values() if type(value) is int) < 1:
            raise ValueError(f"every size of the heads must be at least 1: {self}")
        if self.vocab_size > self.target_vocab_size:
            raise ValueError(f"the heads' vocabulary must be within the target's: {self}")

    @property
    def is_pruned(self) -> bool:
        """Whether there are tokens that the heads cannot propose."""
        return self.vocab_size < self.target_vocab_size

    def drafting(self, num_tokens: int | None) -> Self:
        """The same with a draft vocabulary of so many tokens; None leaves all."""
        return replace(self, vocab_size=num_tokens) if num_tokens else self

    @property
    def max_depth(self) -> int:
        """How many tokens ahead can be proposed; a kind may go on beyond what it was trained
        for.
        """
        return self.num_heads

    def described(self) -> str:
        """In words, for an error: `3 linear heads, a hidden size of 64 and a vocabulary of 300`."""
        of_target = f" of the target's {self.target_vocab_size}" if self.is_pruned else ""
        return (
            f"{self._parts()}, a hidden size of {self.hidden_size} and a vocabulary of"
            f" {self.vocab_size}{of_target}"
        )

    def _parts(self) -> str:
        return f"{self.num_heads} {self.kind} heads"

    def to_json(self) -> dict[str, Any]:
        """The kind and every field, as file headers hold them."""
        return {"kind": self.kind, **asdict(self)}

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> HeadsShape:
        """The inverse of `to_json`; KeyError, TypeError or ValueError for anything else."""
        fields = dict(content)
        return head_kind(fields.pop("kind")).Shape(**fields)


def max_depth(settings: TrainConfig) -> int:
    """How many tokens ahead the heads that are asked for can propose; raises ConfigError for an
    unknown kind.
    """
    return (
        head_kind(settings.heads).shape_of(settings, 1, 1).max_depth
    )  # whatever the target's sizes


def drafter(settings: TrainConfig) -> str:
    """What drafts, in words: `5 heads`, `7 draft steps`; raises ConfigError for an unknown kind."""
    return f"{settings.num_heads} {head_kind(settings.heads).units}"


def require_shapes(
    shape: HeadsShape,
    expected: Mapping[str, tuple[int, ...]],
    found: Mapping[str, tuple[int, ...]],
    where: str | None,
) -> None:
    """Raise DataError, naming the first few, where names or shapes of tensors are not those of
    these heads.
    """
    problems = [f"{name} is missing" for name in expected if name not in found]
    problems += [f"{name} is unknown" for name in found if name not in expected]
    problems += [
        f"{name} has shape {list(found[name])} instead of {list(sizes)}"
        for name, sizes in expected.items()
        if name in found and found[name] != sizes
    ]
    if problems:
        more = f", and {len(problems) - 3} more" if len(problems) > 3 else ""
        what = f"These are not {shape.described()}: {', '.join(problems[:3])}{more}."
        raise DataError(
            what, where, "Use the heads and the target that belong together, or export again."
        )
