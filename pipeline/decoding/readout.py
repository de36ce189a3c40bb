"""Reading a transformers causal LM: one forward that gives the logits and the hidden states they were read from.

The hidden states are taken where the lm_head takes them, by a hook on that module, and the logits from the model
itself: whatever a model does around its lm_head (scaling, soft-capping, adapters) is then right without knowing of
it.

Letters: B sequences, T positions, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any, Protocol

from torch import Tensor
from transformers import Cache, PreTrainedModel

from pipeline.decoding.masks import Masks
from pipeline.errors import ConfigError
from pipeline.heads.kind import Heads

_TREE_ATTENTION = ("sdpa", "eager")


class Forward(Protocol):
    """One forward over rows [B, T]: hidden states [B, T, D] and logits [B, T, V], or the last row's only (T = 1)."""

    def __call__(
        self, ids_BT: Tensor, positions_BT: Tensor, mask: Masks, cache: Cache, *, last_only: bool = False
    ) -> tuple[Tensor, Tensor]: ...


@contextmanager
def reading(model: PreTrainedModel) -> Iterator[Forward]:
    """The model's forward with its hidden states, while the context lasts; afterwards the model is as it was."""
    seen: list[Tensor] = []
    can_select = "logits_to_keep" in signature(model.forward).parameters

    def forward(ids_BT: Tensor, positions_BT: Tensor, mask: Masks, cache: Cache, *, last_only: bool = False):
        selection: dict[str, Any] = {"logits_to_keep": 1} if last_only and can_select else {}
        logits_BTV = model(
            input_ids=ids_BT,
            position_ids=positions_BT,
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
            **selection,
        ).logits
        hidden_BTD = seen.pop()
        return (hidden_BTD[:, -1:], logits_BTV[:, -1:]) if last_only else (hidden_BTD, logits_BTV)

    hook = model.get_output_embeddings().register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    try:
        yield forward
    finally:
        hook.remove()


def check_pair(model: PreTrainedModel, heads: Heads) -> None:
    """ConfigError unless the heads have the target's sizes and its attention takes a mask of our own."""
    config = model.config.get_text_config(decoder=True)
    for name, of_heads in (("hidden_size", heads.shape.hidden_size), ("vocab_size", heads.shape.vocab_size)):
        of_target = getattr(config, name)
        if of_target != of_heads:
            raise ConfigError(
                f"The heads have {name} {of_heads}, the target has {of_target}.",
                "target.model",
                "Use the heads with the target that they were trained for.",
            )
    attention = config._attn_implementation
    if attention not in _TREE_ATTENTION:
        raise ConfigError(
            f"The target runs its attention by {attention!r}, which takes no mask of a tree.",
            "attn_implementation",
            f"Load the target with one of {', '.join(_TREE_ATTENTION)}.",
        )
