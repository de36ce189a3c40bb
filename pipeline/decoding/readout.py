"""Forwards of a transformers causal LM that return its logits and the hidden states that its
lm_head read.

The hidden states come from a hook on the lm_head and the logits from the model itself, so whatever
a model does around its lm_head (scaling, soft-capping, adapters) is included.

Letters: B sequences, T positions, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from transformers import Cache

from pipeline.decoding.masks import Masks
from pipeline.errors import ConfigError
from pipeline.heads.kind import Heads
from pipeline.targets.loading import input_device, lm_head_inputs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_TREE_ATTENTION = ("sdpa", "eager")


class Forward(Protocol):
    """One forward over rows [B, T]: hidden states [B, T, D] and logits [B, T, V], or the last row's
    only (T = 1).
    """

    def __call__(
        self,
        ids_BT: Tensor,
        positions_BT: Tensor,
        mask: Masks,
        cache: Cache,
        *,
        last_only: bool = False,
    ) -> tuple[Tensor, Tensor]: ...


@contextmanager
def reading(model: PreTrainedModel) -> Iterator[Forward]:
    """The model's forward with its hidden states; the hook is removed when the context ends."""
    from pipeline.decoding.grouped_attention import (
        GroupedRows,
    )  # transformers' models: only who runs one waits

    can_select, attention = _can_select_logits(model), GroupedRows(model)
    with lm_head_inputs(model) as seen:

        def forward(
            ids_BT: Tensor,
            positions_BT: Tensor,
            mask: Masks,
            cache: Cache,
            *,
            last_only: bool = False,
        ):
            selection: dict[str, Any] = {"logits_to_keep": 1} if last_only and can_select else {}
            with attention.grouped():
                logits_BTV = model(
                    input_ids=ids_BT,
                    position_ids=positions_BT,
                    attention_mask=mask,
                    past_key_values=cache,
                    use_cache=True,
                    **selection,
                ).logits
            hidden_BTD = seen.pop()
            return (
                (hidden_BTD[:, -1:], logits_BTV[:, -1:]) if last_only else (hidden_BTD, logits_BTV)
            )

        yield forward


@torch.inference_mode()
def last_positions(
    model: PreTrainedModel, ids: Sequence[int], number: int
) -> tuple[Tensor, Tensor]:
    """One forward over a text: the hidden states [number, D] and logits [number, V] of its last
    positions.

    Where the model supports it, no other logits are computed: for a long prompt they would take
    gigabytes.
    """
    ids_1T = torch.tensor([ids], device=input_device(model))
    selection: dict[str, Any] = {"logits_to_keep": number} if _can_select_logits(model) else {}
    with lm_head_inputs(model) as seen:
        logits_1TV = model(input_ids=ids_1T, use_cache=False, **selection).logits
    return seen[-1][0, -number:], logits_1TV[0, -number:]


def _can_select_logits(model: PreTrainedModel) -> bool:
    return "logits_to_keep" in signature(model.forward).parameters


def check_pair(model: PreTrainedModel, heads: Heads) -> None:
    """ConfigError unless the heads have the target's sizes and its attention takes a custom
    mask.
    """
    config = model.config.get_text_config(decoder=True)
    for name, of_heads in (
        ("hidden_size", heads.shape.hidden_size),
        ("vocab_size", heads.shape.target_vocab_size),
    ):
        of_target = getattr(config, name)
        if of_target != of_heads:
            fix = "Use the heads with the target that they were trained for."
            raise ConfigError(
                f"The heads have {name} {of_heads}, the target has {of_target}.",
                "target.model",
                fix,
            )
    attention = config._attn_implementation
    if attention not in _TREE_ATTENTION:
        what = f"The target's attention is {attention!r}, which takes no tree mask."
        fix = f"Load the target with one of {', '.join(_TREE_ATTENTION)}."
        raise ConfigError(what, "attn_implementation", fix)
