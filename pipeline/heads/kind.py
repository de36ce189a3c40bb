"""The interface of a kind of draft heads, and draft vocabularies.

A kind is one file in this package with a subclass of `Heads`, a `HeadsShape` (shapes.py) and an
entry in `KINDS` (kinds.py). Training, calibration, decoding, export and serving use this interface
only and never ask which kind they have.

All kinds predict alike: head k (0-based) at position t predicts the token at t+2+k from the
target's hidden state at t, after the target's final norm. A kind may also read the tokens t+1 …
t+1+k between: the true ones in training (teacher forcing), the proposed ones in decoding.

With a draft vocabulary (`train.draft_vocab`) heads propose only the tokens that the target writes
most often: `lm_head` is most of what a head computes and reads, and a quarter of its rows take a
quarter of that (FR-Spec, arXiv 2502.14856). A kind need not know: its `lm_head` has
`shape.vocab_size` rows. Tokens that it reads are any of the target's.

Letters: B texts, N rows (positions) or nodes of a tree, M nodes of one depth, P of them with
children, D hidden size, V vocabulary of the heads, W vocabulary of the target, K heads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Protocol, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from pipeline.config.training import TrainConfig
from pipeline.conversations.spans import IGNORED
from pipeline.errors import ConfigError, DataError
from pipeline.heads.losses import Teacher, summed_cross_entropy
from pipeline.heads.shapes import EXPANDED, ExportFormat, HeadsShape, require_shapes

TOKEN_MAP = "token_map"  # the draft vocabulary's name in files, as in vLLM


@dataclass(frozen=True)
class TargetWeights:
    """The target's lm_head and embedding for building heads, each read when it is called."""

    lm_head: Callable[[], Tensor]
    embedding: Callable[[], Tensor]

    def drafting(self, tokens: Tensor | None) -> TargetWeights:
        """Return the weights for building heads, with the lm_head rows of their draft vocabulary.

        `tokens` are those of the draft vocabulary; for None the weights are unchanged.
        """
        if tokens is None:
            return self
        return replace(self, lm_head=lambda: self.lm_head()[tokens])


class Level(NamedTuple):
    """One depth of a candidate tree: M nodes below P nodes of the depth above."""

    inner: Tensor  # [P]: places of the parents among the nodes of the depth above
    parent: Tensor  # [M]: each node's parent, as a place in `inner`
    guess: Tensor  # [M]: each node's place in the parents' flattened [P, top] guesses


class ProposalTree(Protocol):
    """The parts of a candidate tree that `Heads.propose` reads."""

    max_depth: int
    top: int  # guesses per head
    guess: Tensor  # [N]: each node's place in the flattened [max_depth, top] guesses
    levels: tuple[Level, ...]  # from the root's children on; end to end they are all nodes


class DraftVocabulary(nn.Module):
    """The heads' draft vocabulary: the target's token for each row of their `lm_head`.

    Unless the shape is pruned, rows are token ids. A token outside the draft vocabulary is never
    proposed; only the target writes it. A label outside it adds no loss (EAGLE-3's code, arXiv
    2503.01840, decides by the target's most likely token instead). Soft labels are the target's
    distribution over the draft vocabulary, renormalized, as in EAGLE-3. In accuracies a token
    outside it is a miss.
    """

    token_map: Tensor | None  # int64 [V], ascending, zeros until `fill`; None where not pruned
    rows_W: Tensor | None  # each token's row of `lm_head`, -100 outside; None where not pruned

    def __init__(self, shape: HeadsShape):
        super().__init__()
        self.target_size = shape.target_vocab_size
        token_map = None
        rows_W = None
        if shape.is_pruned:
            token_map = torch.zeros(shape.vocab_size, dtype=torch.int64)
            rows_W = torch.full((self.target_size,), IGNORED)
        self.register_buffer(TOKEN_MAP, token_map, persistent=False)
        self.register_buffer("rows_W", rows_W, persistent=False)

    def fill(self, tokens_V: Tensor, where: str | None = None) -> None:
        """Set the draft vocabulary of pruned heads.

        Raises:
            DataError: The tokens are not V ascending ids of the target's vocabulary.
        """
        assert self.token_map is not None and self.rows_W is not None, "not pruned"
        size = len(self.token_map)
        tokens_V = tokens_V.long()
        is_ascending = tokens_V.shape == (size,) and (tokens_V.diff() > 0).all()
        if not is_ascending or tokens_V[0] < 0 or tokens_V[-1] >= self.target_size:
            raise DataError(
                f"The draft vocabulary is not {size} of the target's {self.target_size} tokens in"
                " order.",
                where,
                "Export or train these heads again.",
            )
        self.token_map.copy_(tokens_V)
        self.rows_W.fill_(IGNORED)
        self.rows_W[self.token_map] = torch.arange(size, device=self.rows_W.device)

    def tokens_of_rows(self, rows: Tensor) -> Tensor:
        """Map rows of the heads' lm_head, a tensor of any shape, to tokens on the same device."""
        return rows if self.token_map is None else self.token_map[rows]

    def rows_of_labels(self, labels: Tensor) -> Tensor:
        """Map labels to rows of the heads' lm_head.

        Labels outside the draft vocabulary become -100, and -100 stays.
        """
        if self.rows_W is None:
            return labels
        return self.rows_W[labels.clamp(min=0)].where(labels != IGNORED, IGNORED)

    def num_learned(self, labels_KN: Tensor) -> Tensor:
        """Count the labels that each head learns, [K], without those outside a draft vocabulary."""
        return (self.rows_of_labels(labels_KN) != IGNORED).sum(1)

    def over_all_tokens(self, lm_head: Tensor) -> Tensor:
        """Expand the heads' lm_head [..., V, D] to all tokens of the target, [..., W, D].

        For engines without draft vocabularies. A token outside the draft vocabulary gets the mean
        of the rows. Its logit is the mean of their logits, which is never above the largest, so the
        first guess stays the same. The result is detached; without a draft vocabulary, `lm_head`
        itself is returned.
        """
        if self.token_map is None:
            return lm_head
        rows = lm_head.detach()
        whole = rows.mean(-2, keepdim=True).repeat_interleave(self.target_size, -2)
        return whole.index_copy_(-2, self.token_map.to(whole.device), rows)


def most_frequent_tokens(counts_W: npt.NDArray[np.int64], num_tokens: int) -> Tensor:
    """Choose the heads' draft vocabulary: the `num_tokens` most frequent tokens, ascending by id.

    Ties go to the lower id.
    """
    order = np.argsort(-counts_W, kind="stable")
    return torch.from_numpy(np.sort(order[:num_tokens]))


class Heads(nn.Module, ABC):
    """Base class of the kinds of draft heads; an object holds the parameters of K heads.

    The parameters are zeros until `initial` or `from_named_tensors` sets them. A subclass defines
    an `__init__` with this signature and everything without a default below. Parameters that do not
    train have `requires_grad=False`.
    """

    Shape: ClassVar[type[HeadsShape]]
    version: ClassVar[int] = 1  # of the code: raise it when losses, proposals or exports change
    title: ClassVar[str]  # in the model card: "Medusa heads"
    units: ClassVar[str] = "heads"  # what `num_heads` counts, in the report and the model card
    vllm_method: ClassVar[str | None] = None  # vLLM's name for them; None: it does not serve them
    formats: ClassVar[tuple[ExportFormat, ...]] = (EXPANDED,)  # in which they can be exported
    weights_file: ClassVar[str] = "model.safetensors"  # of the export
    choices_file: ClassVar[str] = "tree_choices.json"  # of the export: the tree's paths
    card_about: ClassVar[str]  # Jinja of the model card: what these heads are
    card_engines: ClassVar[str] = ""  # Jinja of the model card: engines other than vLLM
    lr_scale: ClassVar[float] = 1.0  # factor on the learning rate of `train.lr: auto`
    saves_memory: ClassVar[tuple[str, ...]] = ()  # own settings that lower training's memory

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
        """Return the shape of the heads that `train` configures for a target of these sizes.

        The shape has the target's whole vocabulary; callers apply `train.draft_vocab`.
        """

    @classmethod
    @abstractmethod
    def initial(cls, shape: Any, target: TargetWeights) -> Self:
        """Build untrained heads, in the dtype and on the device of the target's lm_head."""

    @property
    def device(self) -> torch.device:
        """The device of the heads' parameters."""
        return next(self.parameters()).device

    # Training and calibration

    @abstractmethod
    def states(self, hidden_ND: Tensor, next_N: Tensor, labels_KN: Tensor) -> Tensor:
        """Compute the input of each head's lm_head, [K, N, D], with teacher forcing.

        Args:
            hidden_ND: The target's states at positions t, in any float dtype.
            next_N: The tokens at t+1, int64.
            labels_KN: The tokens at t+2+k, int64, for up to `shape.max_depth` heads; -100 where the
                span has ended, and from there on for every later k. Any of the target's tokens.
        """

    def summed_losses(
        self,
        hidden_ND: Tensor,
        next_N: Tensor,
        labels_KN: Tensor,
        teacher: Teacher | None,
        weights_K: Tensor,
    ) -> Tensor:
        """Sum each head's cross entropy over its labels, [K]; see `summed_cross_entropy`.

        The first three arguments are those of `states`. Labels outside the draft vocabulary add
        nothing. Under autocast, matrix products are in its dtype.
        """
        states_KND = self.states(hidden_ND, next_N, labels_KN)
        device = hidden_ND.device.type
        if torch.is_autocast_enabled(device):
            states_KND = states_KND.to(torch.get_autocast_dtype(device))
        labels_KN = self.vocabulary.rows_of_labels(labels_KN)
        tokens = self.vocabulary.token_map
        if teacher is not None and tokens is not None:
            teacher = teacher._replace(head=teacher.head.of_tokens(tokens))
        return summed_cross_entropy(states_KND, self.lm_head, labels_KN, teacher, weights_K)

    def lm_head_of(self, head: int) -> Tensor:
        """Return the lm_head [V, D] of one head."""
        return self.lm_head if self.lm_head.dim() == 2 else self.lm_head[head]

    # Decoding

    @abstractmethod
    def expand(self, hidden_BPD: Tensor, tokens_BP: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        """Expand P tree nodes at `depth`: return states [B, P, D] and logits [B, P, V].

        The logits are of the tokens below each node. At depth 0 the only node is the root: the
        target's last token, with the target's hidden state that predicted it. A deeper node comes
        with the state that this method returned for its parent. Shapes are fixed and nothing is
        copied to the host, so that a decoding step can be captured as a CUDA graph.
        """

    def propose(self, hidden_BD: Tensor, token_B: Tensor, tree: ProposalTree) -> Tensor:
        """Propose the tokens [B, N] of the candidate tree's nodes below the root, level by level.

        `hidden_BD` are the target's hidden states that predicted the root tokens `token_B`. The
        tokens are on the device of `token_B`.
        """
        hidden_BMD = hidden_BD[:, None]
        tokens_BM = token_B.to(hidden_BD.device)[:, None]
        proposed = []
        for depth, level in enumerate(tree.levels):
            inner, parent, guess = (places.to(hidden_BD.device) for places in level)
            inner_BPD = hidden_BMD.index_select(1, inner)
            inner_BP = tokens_BM.index_select(1, inner)
            hidden_BPD, logits_BPV = self.expand(inner_BPD, inner_BP, depth)
            rows_BM = logits_BPV.topk(tree.top).indices.flatten(1).index_select(1, guess)
            tokens_BM = self.vocabulary.tokens_of_rows(rows_BM)
            hidden_BMD = hidden_BPD.index_select(1, parent)
            proposed.append(tokens_BM)
        return torch.cat(proposed, 1).to(token_B.device)

    # Export: one directory that engines load; config.json, weights, tree, tokenizer and card

    @classmethod
    def check_format(cls, shape: Any, format: ExportFormat) -> None:
        """Raise ConfigError unless heads of this kind and shape can be exported in this format."""
        if format not in cls.formats:
            known = ", ".join(each.name for each in cls.formats)
            raise ConfigError(
                f"The {format.name} format does not apply to {shape.kind} heads.",
                "export.formats",
                f"Export with `formats: [expanded]`; such heads have {known}.",
            )

    @classmethod
    @abstractmethod
    def engine_config(
        cls, shape: Any, format: ExportFormat, target: Mapping[str, Any]
    ) -> dict[str, object]:
        """Return the keys that this kind of heads adds to an export's config.json.

        `target` is the target's config.json. The exporter adds sizes, dtype, the heads' shape,
        `base_model_name_or_path` and, where vLLM serves the heads, the keys of its speculators
        format.
        """

    @classmethod
    def vllm_refusal(cls, shape: Any, target: Mapping[str, Any]) -> str | None:
        """Return why vLLM cannot serve such heads with a target of this config.json, or None."""
        return None if cls.vllm_method else f"vLLM does not serve {cls.Shape.kind} heads."

    @classmethod
    def speculative_config(
        cls, export: str, num_speculative_tokens: int | str
    ) -> dict[str, object]:
        """Return vLLM's `speculative_config` for this kind of heads, given their export."""
        return {
            "method": cls.vllm_method,
            "model": export,
            "num_speculative_tokens": num_speculative_tokens,
        }

    # Files

    def named_tensors(self, format: ExportFormat | None = None) -> dict[str, Tensor]:
        """Return the heads' detached tensors by their names in a heads file or export.

        Without `format` they are those of a heads file. An export leaves out matrices that engines
        take from the target. `from_named_tensors` copies into these tensors, so they share the
        heads' memory; a kind whose tensors do not has to override it.
        """
        return {name: parameter.detach() for name, parameter in self.named_parameters()}

    def stored_tensors(self, format: ExportFormat | None = None) -> dict[str, Tensor]:
        """Return all tensors of a heads file or export, by name.

        These are `named_tensors` and, if the heads are pruned, `token_map` [V].
        """
        tensors = self.named_tensors(format)
        if self.vocabulary.token_map is not None:
            tensors[TOKEN_MAP] = self.vocabulary.token_map
        return tensors

    @classmethod
    def from_named_tensors(
        cls,
        shape: Any,
        tensors: Mapping[str, Tensor],
        format: ExportFormat | None = None,
        *,
        where: str | None = None,
    ) -> Self:
        """Build heads from the tensors of a heads file or export.

        Dtype and device are those of the first floating-point tensor. Matrices that an export
        leaves out stay zeros until `take_from`.

        Raises:
            DataError: A tensor is missing, unknown, of another shape or not finite, names of one
                shared tensor have different contents, or the draft vocabulary is invalid.
        """
        found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        require_shapes(shape, cls.shapes(shape, format), found, where)
        first = next(tensor for tensor in tensors.values() if tensor.is_floating_point())
        heads = cls(shape, dtype=first.dtype, device=first.device)
        written: dict[int, Tensor] = {}
        for name, view in heads.named_tensors(format).items():
            tensor = tensors[name]
            source = written.setdefault(view.data_ptr(), tensor)
            if not is_finite(tensor) or not torch.equal(source, tensor):
                what = f"The tensor {name} is not finite, or differs from the tensors it equals."
                raise DataError(what, where, "Export or train these heads again.")
            view.copy_(source)
        if shape.is_pruned:
            heads.vocabulary.fill(tensors[TOKEN_MAP], where)
        return heads

    @classmethod
    def shapes(cls, shape: Any, format: ExportFormat | None = None) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the heads' tensors in a heads file or export, by name."""
        views = cls(shape, device=torch.device("meta")).stored_tensors(format)
        return {name: tuple(view.shape) for name, view in views.items()}

    def take_from(self, target: TargetWeights) -> None:
        """Replace the heads' lm_head and embedding, which exports leave out, by the target's.

        Engines take these matrices from the target. The default replaces nothing.
        """


def is_finite(tensor: Tensor) -> bool:
    """Return whether a tensor of heads holds finite numbers only, without a mask of its size."""
    return bool(torch.stack(tensor.aminmax()).isfinite().all())
