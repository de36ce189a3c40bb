"""Shapes of draft heads and layouts of their exports, as plain data without torch.

Export formats:

    expanded  Medusa heads for vLLM, TGI and TensorRT-LLM, with a separate lm_head for each head;
              recurrent heads as vLLM's EAGLE-1 model, without an lm_head
    shared    Medusa heads with one lm_head that all heads read, stored once
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import ClassVar, Self, get_args

from pipeline.config.training import LmHead
from pipeline.errors import DataError

TensorShapes = Mapping[str, tuple[int, ...]]

EPSILON = 1e-6  # of the RMSNorm of recurrent cells that are trained here


@dataclass(frozen=True)
class HeadsShape:
    """The sizes of draft heads; the subclass of each kind adds its own fields.

    `vocab_size` is the number of tokens that the heads can propose, which are the rows of an
    lm_head. With a draft vocabulary it is smaller than `target_vocab_size`.

    Raises:
        ValueError: A size is below 1, or `vocab_size` exceeds `target_vocab_size`.
    """

    kind: ClassVar[str]  # its name in `KINDS`
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
        """Whether the heads can propose only a part of the target's vocabulary."""
        return self.vocab_size < self.target_vocab_size

    def drafting(self, num_tokens: int | None) -> Self:
        """Return this shape with a draft vocabulary of `num_tokens` tokens; for None, unchanged."""
        return replace(self, vocab_size=num_tokens or self.vocab_size)

    @property
    def max_depth(self) -> int:
        """The number of tokens ahead that the heads can propose: `num_heads` by default."""
        return self.num_heads

    @property
    def row_layers(self) -> tuple[int, ...]:
        """The layers of the target whose output the heads read at every position of a text.

        Layers count from 1. By default none: heads read only the last state, after the final norm,
        of target-written tokens.
        """
        return ()

    @property
    def description(self) -> str:
        """The kind of heads and every field, for messages: `medusa heads (hidden_size 64, …)`."""
        fields = ", ".join(f"{name} {value}" for name, value in asdict(self).items())
        return f"{self.kind} heads ({fields})"

    def to_json(self) -> dict[str, object]:
        """Return the kind of heads and every field, as stored in the headers of heads files."""
        return {"kind": self.kind, **asdict(self)}


@dataclass(frozen=True)
class MedusaShape(HeadsShape):
    """The shape of Medusa heads with `num_layers` residual blocks each.

    `lm_head` is `untied` (each head trains its own), `shared` (all heads train one) or `tied` (all
    heads read the target's, frozen).

    Raises:
        ValueError: `lm_head` is none of these, or a size is invalid.
    """

    kind: ClassVar[str] = "medusa"
    num_layers: int = 1
    lm_head: LmHead = "untied"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lm_head not in get_args(LmHead):
            raise ValueError(f"lm_head must be one of {get_args(LmHead)}, not {self.lm_head!r}")


@dataclass(frozen=True)
class RecurrentShape(HeadsShape):
    """The shape of a recurrent cell that is trained for `num_heads` steps.

    `intermediate_size` is the inner size of its gated MLP, and `norm_eps` the epsilon of its
    RMSNorm.
    """

    kind: ClassVar[str] = "recurrent"
    intermediate_size: int = 1
    norm_eps: float = EPSILON

    @property
    def max_depth(self) -> int:
        """The number of tokens ahead that a recurrent cell may propose: twice its trained steps."""
        return 2 * self.num_heads


@dataclass(frozen=True)
class Eagle3Shape(HeadsShape):
    """The shape of an EAGLE-3 layer that is trained for `num_heads` steps.

    Attributes:
        layers: The layers of the target that it reads, ascending, counted from 1.
        intermediate_size: The inner size of its gated MLP.
        attention_heads, key_value_heads, head_size: The sizes of its attention.
        norm_eps: The epsilon of its RMSNorms.
        rope_theta: The base of its rotary positions.
        norm_before_residual: Whether the residual is the state after `hidden_norm`.

    Raises:
        ValueError: `layers` is not ascending or empty, or a size is invalid.
    """

    kind: ClassVar[str] = "eagle3"
    layers: tuple[int, ...] = (1,)
    intermediate_size: int = 1
    attention_heads: int = 1
    key_value_heads: int = 1
    head_size: int = 64
    norm_eps: float = EPSILON
    rope_theta: float = 10_000.0
    norm_before_residual: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "layers", tuple(self.layers))
        if not self.layers or list(self.layers) != sorted(set(self.layers)) or self.layers[0] < 1:
            raise ValueError(f"layers are ascending numbers from 1, not {self.layers}")
        if self.attention_heads % self.key_value_heads:
            raise ValueError(f"the query heads must share key and value heads evenly: {self}")

    @property
    def max_depth(self) -> int:
        """The number of tokens ahead that the layer may propose: twice its trained steps."""
        return 2 * self.num_heads

    @property
    def row_layers(self) -> tuple[int, ...]:
        """The layers of the target whose output the heads read at every position of a text."""
        return self.layers

    @property
    def row_size(self) -> int:
        """The size X of what the heads read at a position: the outputs of all layers."""
        return len(self.layers) * self.hidden_size


def require_shapes(
    shape: HeadsShape, expected: TensorShapes, found: TensorShapes, where: str | None
) -> None:
    """Raise DataError unless the names and shapes of the heads' tensors are as expected.

    `where` is the file or directory that the error names.
    """
    problems = [f"{name} is missing" for name in expected if name not in found]
    for name, sizes in found.items():
        if name not in expected:
            problems.append(f"{name} is unknown")
        elif sizes != expected[name]:
            problems.append(f"{name} has shape {list(sizes)} instead of {list(expected[name])}")
    if problems:
        raise DataError(
            f"These are not {shape.description}: {', '.join(problems[:3])}.",
            where,
            "Use the heads and the target that belong together, or export again.",
        )


@dataclass(frozen=True)
class ExportFormat:
    """A format in which a kind of heads can be exported.

    Attributes:
        name: Its name in `export.formats`.
        one_lm_head: Whether the export stores one lm_head for all heads.
    """

    name: str
    one_lm_head: bool = False


EXPANDED = ExportFormat("expanded")
SHARED = ExportFormat("shared", one_lm_head=True)

FORMATS = {format.name: format for format in (EXPANDED, SHARED)}
