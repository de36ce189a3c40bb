"""Base class of the kinds of draft heads, and draft vocabularies.

A kind is one file in this package with a subclass of `Heads`, a `HeadsShape` (shapes.py) and an
entry in `KINDS` (kinds.py). Training, calibration, decoding, export and serving use the interface
of `Heads` only and do not depend on the kind.

In every kind, head k (0-based) at position t predicts the token at t+2+k from the target's hidden
state at t, after the target's final norm. A kind may also read the tokens t+1 … t+1+k: the true
ones in training (teacher forcing), the proposed ones in decoding.

With a draft vocabulary (`train.draft_vocab`) heads propose only the tokens that the target writes
most often, so that their `lm_head` has fewer rows and costs less memory and time (FR-Spec, arXiv
2502.14856). A kind needs no code for this: its `lm_head` has `shape.vocab_size` rows. The tokens
that heads read may be any of the target's.

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
from pipeline.heads.draft_cache import DraftCache
from pipeline.heads.losses import Teacher, weighted_cross_entropy
from pipeline.heads.rows import Rows
from pipeline.heads.shapes import EXPANDED, ExportFormat, HeadsShape, require_shapes

TOKEN_MAP = "token_map"  # the draft vocabulary's name in files, as in vLLM
# The tensors of a draft vocabulary in files, and their dtypes; EAGLE-3 has the last two.
DRAFT_VOCABULARY = {TOKEN_MAP: "int64", "d2t": "int64", "t2d": "bool"}


@dataclass(frozen=True)
class TargetWeights:
    """Functions that return the target's lm_head and embedding, for building heads."""

    lm_head: Callable[[], Tensor]
    embedding: Callable[[], Tensor]

    def drafting(self, tokens: Tensor | None) -> TargetWeights:
        """Return these weights with only the lm_head rows of the draft vocabulary `tokens`.

        Without a draft vocabulary (None) they are unchanged.
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
    """The mapping between rows of the heads' `lm_head` and token ids of the target.

    Without a draft vocabulary, rows are token ids. With one, heads never propose a token outside
    it. A label outside it adds no loss and is a miss in accuracies. Soft labels are the target's
    distribution over the draft vocabulary, renormalized as in EAGLE-3 (arXiv 2503.01840).
    """

    token_map: Tensor | None  # int64 [V], ascending, zeros until `fill`; None if not pruned
    rows_W: Tensor | None  # each token's row of `lm_head`, or -100; None if not pruned

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
        """Set the tokens of the draft vocabulary; the heads must be pruned.

        Raises:
            DataError: The tokens are not V ascending ids of the target's vocabulary. `where` is
                the file that the error names.
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
        """Map row indices of the heads' lm_head, of any shape, to token ids of the target."""
        return rows if self.token_map is None else self.token_map[rows]

    def rows_of_labels(self, labels: Tensor) -> Tensor:
        """Map labels, token ids of any shape, to row indices of the heads' lm_head.

        Labels outside the draft vocabulary become -100, and -100 stays.
        """
        if self.rows_W is None:
            return labels
        return self.rows_W[labels.clamp(min=0)].where(labels != IGNORED, IGNORED)

    def num_learned(self, labels_KN: Tensor) -> Tensor:
        """Count each head's labels that are in the vocabulary of the heads, [K]."""
        return (self.rows_of_labels(labels_KN) != IGNORED).sum(1)

    def over_all_tokens(self, lm_head: Tensor) -> Tensor:
        """Expand the heads' lm_head [..., V, D] to all tokens of the target, [..., W, D].

        This is for engines without draft vocabularies. A token outside the draft vocabulary gets
        the mean of the V rows. Its logit is the mean of the V logits, which is never above their
        maximum, so the first guess stays the same. The result is detached. Without a draft
        vocabulary, `lm_head` itself is returned.
        """
        if self.token_map is None:
            return lm_head
        rows = lm_head.detach()
        whole = rows.mean(-2, keepdim=True).repeat_interleave(self.target_size, -2)
        return whole.index_copy_(-2, self.token_map.to(whole.device), rows)


def most_frequent_tokens(counts_W: npt.NDArray[np.int64], num_tokens: int) -> Tensor:
    """Return the ids of the `num_tokens` most frequent tokens, ascending, for a draft vocabulary.

    `counts_W` is each token's count. Ties go to the lower id.
    """
    order = np.argsort(-counts_W, kind="stable")
    return torch.from_numpy(np.sort(order[:num_tokens]))


class Heads(nn.Module, ABC):
    """Base class of the kinds of draft heads; an instance holds the parameters of K heads.

    `__init__` sets the parameters to zeros; `initial` and `from_named_tensors` build heads with
    values. A subclass defines `__init__` with this signature, the class variables without a
    default, and the abstract methods. Frozen parameters have `requires_grad=False`.
    """

    Shape: ClassVar[type[HeadsShape]]
    version: ClassVar[int] = 1  # raise it when losses, proposals or exports change
    title: ClassVar[str]  # in the model card: "Medusa heads"
    units: ClassVar[str] = "heads"  # what `num_heads` counts, in the report and the model card
    vllm_method: ClassVar[str | None] = None  # `method` in vLLM; None: vLLM cannot serve them
    formats: ClassVar[tuple[ExportFormat, ...]] = (EXPANDED,)  # possible formats of an export
    weights_file: ClassVar[str] = "model.safetensors"  # in an export
    choices_file: ClassVar[str] = "tree_choices.json"  # in an export: the tree's paths
    card_about: ClassVar[str]  # Jinja template of the model card: about these heads
    card_engines: ClassVar[str] = ""  # Jinja template of the model card: engines other than vLLM
    lr_scale: ClassVar[float] = 1.0  # factor on the learning rate of `train.lr: auto`
    batch_scale: ClassVar[float] = 1.0  # factor on `train.batch_tokens: auto`
    saves_memory: ClassVar[tuple[str, ...]] = ()  # settings of this kind that save memory

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
    def shape_of(
        cls, settings: TrainConfig, hidden_size: int, vocab_size: int, num_layers: int
    ) -> HeadsShape:
        """Return the shape of the configured heads for a target of these sizes.

        The shape has the target's whole vocabulary; callers apply `train.draft_vocab`.

        Raises:
            ConfigError: The heads are configured to read a layer that the target does not have.
        """

    @classmethod
    @abstractmethod
    def initial(cls, shape: Any, target: TargetWeights) -> Self:
        """Build untrained heads, in the dtype and on the device of the target's lm_head.

        For pruned heads, `target.lm_head` has the rows of the draft vocabulary, and the caller
        calls `vocabulary.fill`.
        """

    @property
    def device(self) -> torch.device:
        """The device of the heads' parameters."""
        return next(self.parameters()).device

    # Training and calibration

    @abstractmethod
    def states(
        self, hidden_ND: Tensor, next_N: Tensor, labels_KN: Tensor, rows: Rows | None = None
    ) -> Tensor:
        """Compute the input of each head's lm_head, [K, N, D], with teacher forcing.

        Args:
            hidden_ND: The target's hidden states at positions t, in any float dtype.
            next_N: The tokens at t+1, int64.
            labels_KN: The tokens at t+2+k, int64, for `shape.num_heads` to `shape.max_depth` heads.
                They are -100 past the end of the span, and otherwise any token ids of the target.
            rows: The rows of these positions, for a kind with `row_layers`.
        """

    def weighted_loss(
        self,
        hidden_ND: Tensor,
        next_N: Tensor,
        labels_KN: Tensor,
        teacher: Teacher | None,
        weights_K: Tensor,
        rows: Rows | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the weighted sum of the heads' losses, and each head's own sum [K], detached.

        The first three arguments and `rows` are those of `states`, the others those of
        `weighted_cross_entropy`. Labels outside the draft vocabulary add nothing. Under autocast,
        matrix products are in its dtype.
        """
        states_KND = self.states(hidden_ND, next_N, labels_KN, rows)
        states_KND = states_KND.to(computing_dtype(states_KND))
        labels_KN = self.vocabulary.rows_of_labels(labels_KN)
        tokens = self.vocabulary.token_map
        if teacher is not None and tokens is not None:
            teacher = teacher._replace(head=teacher.head.of_tokens(tokens))
        return weighted_cross_entropy(states_KND, self.lm_head, labels_KN, teacher, weights_K)

    def lm_head_of(self, head: int) -> Tensor:
        """Return the lm_head [V, D] of one head."""
        return self.lm_head if self.lm_head.dim() == 2 else self.lm_head[head]

    # Decoding

    def open_cache(self, num_texts: int, num_slots: int) -> DraftCache | None:
        """Allocate the heads' key/value cache; None, the default, for heads that do not attend."""
        return None

    def advance(
        self, read_BTX: Tensor, next_BT: Tensor, num_B: Tensor, cache: DraftCache | None
    ) -> Tensor:
        """Read positions that the target has computed; return each text's root state [B, D].

        `expand` reads it at depth 0. By default it is the state of the last position.

        Args:
            read_BTX: What the heads read at T positions after those of the cache.
            next_BT: The token after each position.
            num_B: The number of each text's positions; the others are padding.
            cache: The heads' cache, which is extended; None for heads without one.
        """
        return read_BTX.take_along_dim(num_B[:, None, None] - 1, 1)[:, 0]

    @abstractmethod
    def expand(
        self, hidden_BPD: Tensor, tokens_BP: Tensor, depth: int, cache: DraftCache | None = None
    ) -> tuple[Tensor, Tensor]:
        """Expand P tree nodes at `depth`: return states [B, P, D] and logits [B, P, V].

        The logits score the children of each node. At depth 0 the only node is the root: its token
        is the target's last token, its hidden state that of `advance`. The hidden state of a deeper
        node is the state that this method returned for its parent. Shapes are fixed and nothing is
        copied to the host, so that a decoding step can be captured as a CUDA graph.
        """

    def propose(
        self,
        hidden_BD: Tensor,
        token_B: Tensor,
        tree: ProposalTree,
        cache: DraftCache | None = None,
    ) -> Tensor:
        """Propose the tokens [B, N] of the candidate tree's nodes below the root, level by level.

        `hidden_BD` holds the root states of `advance`, `token_B` the root tokens. The result is on
        the device of `token_B`.
        """
        hidden_BMD = hidden_BD[:, None]
        tokens_BM = token_B.to(hidden_BD.device)[:, None]
        proposed = []
        for depth, level in enumerate(tree.levels):
            inner, parent, guess = (places.to(hidden_BD.device) for places in level)
            inner_BPD = hidden_BMD.index_select(1, inner)
            inner_BP = tokens_BM.index_select(1, inner)
            hidden_BPD, logits_BPV = self.expand(inner_BPD, inner_BP, depth, cache)
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
                f"{shape.kind} heads support these formats: {known}. Set export.formats to one of"
                " them.",
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
        """Return why vLLM cannot serve these heads with this target, or None if it can.

        `target` is the target's config.json.
        """
        return None if cls.vllm_method else f"vLLM does not serve {cls.Shape.kind} heads."

    @classmethod
    def speculative_config(
        cls, export: str, num_speculative_tokens: int | str
    ) -> dict[str, object]:
        """Return vLLM's `speculative_config` for the heads in the export directory `export`."""
        return {
            "method": cls.vllm_method,
            "model": export,
            "num_speculative_tokens": num_speculative_tokens,
        }

    # Files

    def named_tensors(self, format: ExportFormat | None = None) -> dict[str, Tensor]:
        """Return the heads' detached tensors by their names in a heads file or export.

        Without `format`, these are the names in a heads file. An export leaves out matrices that
        engines take from the target. The default `from_named_tensors` copies values into these
        tensors, so they must share the heads' memory.
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
        leaves out are zeros until `take_from` is called. `where` is the file or directory that
        errors name.

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
                raise DataError(
                    f"The tensor {name} is not finite, or differs from the tensors it equals.",
                    where,
                    "Export or train these heads again.",
                )
            view.copy_(source)
        if shape.is_pruned:
            heads.vocabulary.fill(cls.draft_tokens(tensors, where), where)
        heads.complete(tensors, format)
        return heads

    @classmethod
    def draft_tokens(cls, tensors: Mapping[str, Tensor], where: str | None = None) -> Tensor:
        """Return the tokens [V] of the draft vocabulary in a heads file or export.

        `where` is the file or directory that errors name.
        """
        return tensors[TOKEN_MAP]

    def complete(self, tensors: Mapping[str, Tensor], format: ExportFormat | None) -> None:
        """Complete heads whose parameters were filled from the tensors of a file.

        The default does nothing.
        """

    @classmethod
    def shapes(cls, shape: Any, format: ExportFormat | None) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the heads' tensors in a heads file or export, by name."""
        views = cls(shape, device=torch.device("meta")).stored_tensors(format)
        return {name: tuple(view.shape) for name, view in views.items()}

    def take_from(self, target: TargetWeights) -> None:
        """Replace the matrices that exports leave out by the target's, as engines do.

        The default replaces nothing.
        """


def zero_parameter(
    *sizes: int, dtype: torch.dtype | None, device: torch.device | None, trains: bool = True
) -> nn.Parameter:
    """Return a parameter of zeros, frozen unless `trains`."""
    return nn.Parameter(torch.zeros(*sizes, dtype=dtype, device=device), requires_grad=trains)


def computing_dtype(tensor: Tensor) -> torch.dtype:
    """Return autocast's dtype if autocast is enabled on the tensor's device, else its own dtype."""
    device = tensor.device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return tensor.dtype


def is_finite(tensor: Tensor) -> bool:
    """Return whether all values of a tensor are finite, without allocating a mask of its size."""
    return bool(torch.stack(tensor.aminmax()).isfinite().all())
