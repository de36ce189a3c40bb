"""What a kind of heads is: its shape, parameters and start, what it learns, what it proposes, how
it is exported.

A kind is one file in this package: a `HeadsShape`, a subclass of `Heads`, and a line in `KINDS`
(shape.py). Training, calibration, decoding, export and serving use this interface alone and never
ask which kind it is.

All kinds predict alike: head k (0-based) at position t predicts the token at t+2+k from the
target's hidden state at t, after the target's final norm. A kind may also read the tokens t+1 …
t+1+k between, in training the true ones (teacher forcing) and in decoding those that it has
proposed.

Of a pruned vocabulary (see `draft_vocabulary`) a kind knows nothing: `vocab_size` counts the rows
of its `lm_head`, and it is given those rows of the target's. Tokens that it reads are the target's
all the same.

Letters: B texts, N rows (positions) or nodes of a tree, M nodes of one depth, P of them with
children, D hidden size, V vocabulary, K heads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor, nn

from pipeline.errors import ConfigError, DataError
from pipeline.heads.draft_vocabulary import TOKEN_MAP, DraftVocabulary
from pipeline.heads.export_format import EXPANDED, ExportFormat
from pipeline.heads.losses import summed_cross_entropy
from pipeline.heads.proposal_tree import ProposalTree
from pipeline.heads.shape import HeadsShape, require_shapes
from pipeline.heads.soft_labels import Teacher

if TYPE_CHECKING:
    from pipeline.config import TrainConfig


@dataclass(frozen=True)
class TargetWeights:
    """The target's own matrices [V, D], each read when it is first asked for."""

    lm_head: Callable[[], Tensor]
    embedding: Callable[[], Tensor]

    def drafting(self, tokens: Tensor | None) -> TargetWeights:
        """The same with the `lm_head`'s rows of these tokens; None leaves all."""
        return self if tokens is None else replace(self, lm_head=lambda: self.lm_head()[tokens])


class Heads(nn.Module, ABC):
    """A set of K heads of one kind; zero until it is filled, by `initial` or `from_named_tensors`.

    A subclass defines an `__init__` with this signature, what has no default below, and each
    default that it improves on. Parameters that do not train have `requires_grad=False`.
    """

    Shape: ClassVar[type[HeadsShape]]
    version: ClassVar[int] = (
        1  # of the code; raised by whoever changes what it learns, proposes or exports
    )
    title: ClassVar[str]  # in the model card: "Medusa heads"
    units: ClassVar[str] = "heads"  # what `num_heads` counts, in the report and the model card
    vllm_method: ClassVar[str | None] = (
        None  # in vLLM's speculative configuration; None where it cannot serve them
    )
    formats: ClassVar[tuple[ExportFormat, ...]] = (EXPANDED,)  # in which they can be exported
    weights_file: ClassVar[str] = "model.safetensors"  # of the export
    choices_file: ClassVar[str] = "tree_choices.json"  # of the export: the tree's paths
    card_about: ClassVar[str]  # Jinja of the model card: what these heads are, in a sentence or two
    card_engines: ClassVar[str] = (
        ""  # Jinja of the model card: how other engines than vLLM serve them
    )
    lr_scale: ClassVar[float] = 1.0  # what `train.lr: auto` multiplies the rule's learning rate by
    saves_memory: ClassVar[
        tuple[str, ...]
    ] = ()  # settings of the kind's own with which training takes less memory

    shape: HeadsShape
    lm_head: Tensor  # [K, V, D], or one [V, D] that all heads share

    def __init__(
        self, shape: Any, *, dtype: torch.dtype | None = None, device: torch.device | None = None
    ):
        super().__init__()
        self.shape = shape
        self.vocabulary = DraftVocabulary(shape)

    # Configuration and start

    @classmethod
    @abstractmethod
    def shape_of(cls, settings: TrainConfig, hidden_size: int, vocab_size: int) -> HeadsShape:
        """The shape that the configuration asks for, of a target with these sizes."""

    @classmethod
    @abstractmethod
    def initial(cls, shape: Any, target: TargetWeights) -> Self:
        """Untrained heads, in the dtype and on the device of the target's matrices."""

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    # Training and calibration

    @abstractmethod
    def states(self, hidden_ND: Tensor, next_N: Tensor, labels_KN: Tensor) -> Tensor:
        """What each head's lm_head reads, [K, N, D], given the true tokens between; up to
        `shape.max_depth` of them.

        Args:
            hidden_ND: The target's states at positions t, in any float dtype.
            next_N: The tokens at t+1, int64.
            labels_KN: The tokens at t+2+k, int64; -100 where the span has ended, and from there on
                for every later k. Any of the target's, whether a head can propose it or not.
        """

    def summed_losses(
        self,
        hidden_ND: Tensor,
        next_N: Tensor,
        labels_KN: Tensor,
        teacher: Teacher | None = None,
        weights_K: Tensor | None = None,
    ) -> Tensor:
        """Each head's cross entropy summed over its labels, [K], never holding all logits;
        arguments as of `states`.

        Labels outside the draft vocabulary add nothing. With a teacher part of it is that with the
        target's own distributions. `weights_K` is what the caller weighs the sums by; heads that
        train one lm_head for all need to know. See `summed_cross_entropy`. Products run in
        autocast's dtype where it is on.
        """
        states_KND, device = self.states(hidden_ND, next_N, labels_KN), hidden_ND.device.type
        if torch.is_autocast_enabled(device):
            states_KND = states_KND.to(torch.get_autocast_dtype(device))
        teacher = self.vocabulary.teacher(teacher) if teacher else None
        labels_KN = self.vocabulary.rows(labels_KN)
        return summed_cross_entropy(states_KND, self.lm_head, labels_KN, teacher, weights_K)

    def lm_head_of(self, head: int) -> Tensor:
        """The [V, D] matrix that turns this head's states into logits."""
        return self.lm_head if self.lm_head.dim() == 2 else self.lm_head[head]

    # Decoding

    @abstractmethod
    def expand(self, hidden_BPD: Tensor, tokens_BP: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        """The children of P nodes at `depth`: the states [B, P, D] to go on from, and the logits
        [B, P, V].

        At depth 0 stands the root: the token that the target chose, and the state that it chose it
        from. Below, each node comes with its parent's state, as returned for it. Fixed shapes and
        no transfer to the host, so that a step can be captured as a CUDA graph.
        """

    def propose(self, hidden_BD: Tensor, token_B: Tensor, tree: ProposalTree) -> Tensor:
        """The tokens [B, N] of the tree's nodes: a node of rank r holds the r-th guess below its
        parent.

        `hidden_BD` are the states that the target chose `token_B` from, the roots.
        """
        hidden_BMD, tokens_BM = hidden_BD[:, None], token_B.to(hidden_BD.device)[:, None]
        proposed = []
        for depth, level in enumerate(tree.levels):  # M nodes of one depth, P of them with children
            inner, parent, guess = (places.to(hidden_BD.device) for places in level[:3])
            inner_BPD, inner_BP = (
                hidden_BMD.index_select(1, inner),
                tokens_BM.index_select(1, inner),
            )
            hidden_BPD, logits_BPV = self.expand(inner_BPD, inner_BP, depth)
            rows_BM = logits_BPV.topk(level.top).indices.flatten(1).index_select(1, guess)
            tokens_BM = self.vocabulary.tokens(rows_BM)
            hidden_BMD = hidden_BPD.index_select(1, parent)
            proposed.append(tokens_BM)
        return torch.cat(proposed, 1).to(token_B.device).index_select(1, tree.order)

    # Export: one directory that engines load; config.json, weights, tree, tokenizer and card

    @classmethod
    def check_format(cls, shape: Any, format: ExportFormat) -> None:
        """ConfigError unless such heads can be stored in this one of `export.formats`."""
        if format not in cls.formats:
            known = ", ".join(each.name for each in cls.formats)
            what = f"The {format.name} format does not apply to {shape.kind} heads."
            raise ConfigError(
                what,
                "export.formats",
                f"Export with `formats: [expanded]`; such heads have {known}.",
            )

    @classmethod
    @abstractmethod
    def engine_config(
        cls, shape: Any, format: ExportFormat, target: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The keys of the export's config.json that are this kind's own; `target` is its target's
        config.json.

        The exporter adds sizes, dtype, `base_model_name_or_path` and what vLLM's speculators format
        asks for.
        """

    @classmethod
    def not_served(cls, shape: Any, target: Mapping[str, Any]) -> str | None:
        """Why vLLM cannot serve such heads with a target of this config.json; None where it can."""
        return None if cls.vllm_method else f"vLLM does not serve {cls.Shape.kind} heads."

    @classmethod
    def speculative_config(cls, export: str, num_speculative_tokens: int | str) -> dict[str, Any]:
        """How vLLM is told to draft with these heads on a target of their own."""
        return {
            "method": cls.vllm_method,
            "model": export,
            "num_speculative_tokens": num_speculative_tokens,
        }

    # Files

    def named_tensors(self, format: ExportFormat | None = None) -> dict[str, Tensor]:
        """Detached views by the names that files give them: all parameters, for
        `heads.safetensors`, or an export's.

        An export leaves out what engines take from the target.
        """
        return {name: parameter.detach() for name, parameter in self.named_parameters()}

    def stored_tensors(self, format: ExportFormat | None = None) -> dict[str, Tensor]:
        """All that a file holds: `named_tensors` and, where the vocabulary is pruned, its
        `token_map`, int64 [V].
        """
        token_map = self.vocabulary.token_map
        return self.named_tensors(format) | ({} if token_map is None else {TOKEN_MAP: token_map})

    @classmethod
    def from_named_tensors(
        cls,
        shape: Any,
        tensors: Mapping[str, Tensor],
        format: ExportFormat | None = None,
        *,
        where: str | None = None,
    ) -> Self:
        """The inverse of `stored_tensors`, in the tensors' own dtype.

        Raises:
            DataError: A tensor is missing, unknown, of another shape or not finite, or names that
                share one differ.
        """
        found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        require_shapes(shape, cls.shapes(shape, format), found, where)
        first = next(tensor for tensor in tensors.values() if tensor.is_floating_point())
        heads = cls(shape, dtype=first.dtype, device=first.device)
        written: dict[int, Tensor] = {}
        for name, view in heads.named_tensors(format).items():
            source = written.setdefault(view.data_ptr(), tensors[name])
            if source is tensors[name]:
                if not is_finite(source):
                    what = f"The tensor {name} holds numbers that are not finite."
                    raise DataError(what, where, "Export or train these heads again.")
                view.copy_(source)
            elif not torch.equal(source, tensors[name]):
                what = (
                    f"These heads share one tensor under several names, and {name} differs from the"
                    " others."
                )
                raise DataError(what, where, "Export or train them again.")
        if shape.is_pruned:
            heads.vocabulary.fill(tensors[TOKEN_MAP], where)
        return heads

    @classmethod
    def shapes(cls, shape: Any, format: ExportFormat | None = None) -> dict[str, tuple[int, ...]]:
        """The shapes of `stored_tensors`: a file holds exactly these."""
        views = cls(shape, device=torch.device("meta")).stored_tensors(format)
        return {name: tuple(view.shape) for name, view in views.items()}

    def take_from(self, target: TargetWeights) -> None:
        """Take the target's matrices where the heads borrow them: an export has none, and tuning
        changes them.
        """


def is_finite(tensor: Tensor) -> bool:
    """Whether all numbers are finite; `isfinite` would hold a second tensor of that size."""
    return bool(torch.stack(tensor.aminmax()).isfinite().all())
