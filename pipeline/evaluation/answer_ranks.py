"""Rank the tokens of the target's greedy answers among the guesses of the heads.

Letters: T answer tokens, N states at which steps may begin, D hidden size, K heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

import numpy as np
import torch

from pipeline.conversations.spans import IGNORED
from pipeline.decoding.held_out import HeldOutRanks
from pipeline.decoding.steps import last_positions
from pipeline.evaluation.prompts import Prompt
from pipeline.heads.accuracy import label_ranks
from pipeline.heads.kind import Heads
from pipeline.heads.rows import Rows
from pipeline.targets.loading import layer_outputs

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@torch.inference_mode()
def answer_ranks(
    model: PreTrainedModel,
    heads: Heads,
    prompts: Sequence[Prompt],
    answers: Sequence[list[int]],
    top: int,
) -> HeldOutRanks:
    """Rank each token of the answers among the heads' first `top` guesses.

    One forward pass of the target over each prompt and answer gives the states. A step may begin
    at every token of an answer except the last. Answers of one token are left out, and no answer
    counts as seen in training.

    Args:
        answers: The token ids of the answer to each prompt.
    """
    num_heads = heads.shape.max_depth
    layers = heads.shape.row_layers
    device = heads.device
    parts_KN = [np.empty((num_heads, 0), np.uint8)]
    starts = []
    conversations = []
    numbers: dict[int | str, int] = {}
    length = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        if len(answer) == 1:
            continue
        later_N = torch.tensor(answer[1:])
        labels_KN = torch.full((num_heads, len(later_N)), IGNORED)
        for head in range(min(num_heads, len(later_N))):
            labels_KN[head, : len(later_N) - head] = later_N[head:]
        ids = prompt.ids + answer[:-1]
        with layer_outputs(model, layers) if layers else nullcontext() as outputs:
            states_TD, _ = last_positions(model, ids, len(answer))
        rows = None
        if outputs:
            learned_N = torch.arange(len(prompt.ids) - 1, len(ids) - 1, device=device)
            ids_T = torch.tensor(ids, device=device)
            rows = Rows.of_text(outputs[0][0].to(device), ids_T, learned_N)
        read = (states_TD[:-1].to(device), torch.tensor(answer[:-1], device=device))
        ranks_KN = label_ranks(heads, *read, labels_KN.to(device), top, rows)
        parts_KN.append(ranks_KN.cpu().numpy())
        starts.append(length)
        length += len(later_N)
        conversations.append(numbers.setdefault(prompt.conversation, len(numbers)))
    return HeldOutRanks(
        np.concatenate(parts_KN, axis=1),
        np.array(starts, np.int64),
        np.array(conversations, np.int64),
        np.zeros(len(starts), np.bool_),
    )
