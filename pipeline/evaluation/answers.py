"""The answers as texts: files in Spec-Bench's schema, and a few token by token for the report.

One line per question, as Spec-Bench's evaluation writes and reads them (github.com/hemingkx/Spec-Bench, Xia et al.,
arXiv 2401.07851). `new_tokens` and `wall_time` are of whole answers, prefill included; `decoding_steps` and
`accept_lengths` of the steps after it, so that the mean of `accept_lengths` is the acceleration rate.
"""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from pipeline.conversations.text_stream import TextStream
from pipeline.decoding.decoder import Decoded
from pipeline.evaluation.prompts import Prompt

NUM_SAMPLES = 2  # decoded answers that the report shows


def answer_lines(
    model_id: str,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    repetitions: Sequence[Sequence[Decoded]],
) -> list[dict[str, Any]]:
    """One method's answers, a question's turns together; texts are the first repetition's, times medians over all."""
    lines: dict[int | str, dict[str, Any]] = {}
    for index, prompt in enumerate(prompts):
        name = prompt.id if prompt.question_id is None else prompt.question_id
        if name not in lines:
            lines[name] = _no_answer_yet(name, prompt.category, model_id)
        (choice,) = lines[name]["choices"]
        answer = repetitions[0][index]
        seconds = statistics.median(answers[index].seconds_prefill + answers[index].seconds for answers in repetitions)
        choice["turns"].append(tokenizer.decode(answer.token_ids, skip_special_tokens=True).strip())
        choice["decoding_steps"].append(answer.num_steps)
        choice["new_tokens"].append(len(answer.token_ids))
        choice["wall_time"].append(seconds)
        choice["accept_lengths"] += answer.accepted
    return list(lines.values())


def _no_answer_yet(question_id: int | str, category: str | None, model_id: str) -> dict[str, Any]:
    lists: dict[str, list[Any]] = {
        key: [] for key in ("turns", "decoding_steps", "new_tokens", "wall_time", "accept_lengths")
    }
    return {
        "question_id": question_id,
        "category": category or "",
        "answer_id": hashlib.sha256(f"{model_id}/{question_id}".encode()).hexdigest()[:22],
        "model_id": model_id,
        "choices": [{"index": 0, **lists}],
        "tstamp": time.time(),
    }


def samples(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], decoded: Sequence[Decoded]
) -> list[dict[str, Any]]:
    """A few answers, each token with the step that produced it (0: the prefill)."""
    shown = []
    for prompt, answer in list(zip(prompts, decoded, strict=True))[:NUM_SAMPLES]:
        steps = [0] + [step for step, kept in enumerate(answer.accepted, start=1) for _ in range(kept)]
        stream = TextStream(tokenizer)
        texts = [stream.push(token) for token in answer.token_ids]
        texts[-1] += stream.flush()
        question = tokenizer.decode(prompt.ids, skip_special_tokens=True)
        shown.append(
            {"prompt": question, "tokens": [{"text": t, "step": s} for t, s in zip(texts, steps, strict=True)]}
        )
    return shown
