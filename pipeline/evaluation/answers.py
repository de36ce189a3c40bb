"""Score the text of decoded answers, and format them for files.

`answer_lines` formats answers in Spec-Bench's schema (github.com/hemingkx/Spec-Bench, Xia et al.,
arXiv 2401.07851), an extension of FastChat's: one line per question. `new_tokens` and `wall_time`
cover whole answers including the prefill, `decoding_steps` and `accept_lengths` the steps after it.
The mean of `accept_lengths` is the acceleration rate.

Letters: T answer tokens, V vocabulary.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from pipeline.artifacts.check_result import Sample, SampleToken
from pipeline.conversations.requests import TextStream
from pipeline.decoding.decoder import Decoded
from pipeline.decoding.steps import last_positions
from pipeline.evaluation.answer_files import Line
from pipeline.evaluation.prompts import Prompt, spread

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

AnswerLines = dict[str, list[Line]]  # by method

NUM_SAMPLES = 2  # decoded answers in the report


def log_probabilities(
    model: PreTrainedModel, prompts: Sequence[Prompt], answers: Sequence[list[int]]
) -> Iterator[Tensor]:
    """Yield the target's log-probabilities [T, V] for each answer, in fp32.

    Row i is the distribution that predicts the answer's token i.
    """
    for prompt, answer in zip(prompts, answers, strict=True):
        _, logits_TV = last_positions(model, prompt.ids + answer[:-1], len(answer))
        yield logits_TV.float().log_softmax(-1)


def answer_lines(
    model_id: str,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    repetitions: Sequence[Sequence[Decoded]],
) -> list[Line]:
    """Format a decoding method's answers in Spec-Bench's schema, one line per question.

    Texts and counts come from the first repetition, wall times are medians over all repetitions.
    """
    lines = {}
    for prompt, answer, *others in zip(prompts, *repetitions, strict=True):
        name = prompt.conversation
        if name not in lines:
            choice: Line = {"index": 0}
            for key in ("turns", "decoding_steps", "new_tokens", "wall_time", "accept_lengths"):
                choice[key] = []
            lines[name] = {
                "question_id": name,
                "category": prompt.category or "",
                "answer_id": f"{model_id}/{name}",
                "model_id": model_id,
                "choices": [choice],
                "tstamp": time.time(),
            }
        choice = lines[name]["choices"][0]
        seconds = [each.seconds_prefill + each.seconds for each in (answer, *others)]
        choice["turns"].append(tokenizer.decode(answer.token_ids, skip_special_tokens=True).strip())
        choice["decoding_steps"].append(answer.num_steps)
        choice["new_tokens"].append(len(answer.token_ids))
        choice["wall_time"].append(statistics.median(seconds))
        choice["accept_lengths"] += answer.accepted
    return list(lines.values())


def samples(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], decoded: Sequence[Decoded]
) -> list[Sample]:
    """Return the `NUM_SAMPLES` longest answers and their prompts, with each token's decoding step.

    Each answer is of another conversation. Step 0 is the prefill.
    """
    found = []
    answers = [(prompts[index], decoded[index]) for index in spread(prompts, len(prompts))]
    answers.sort(key=lambda pair: -len(pair[1].token_ids))
    for prompt, answer in answers[:NUM_SAMPLES]:
        steps = [0]
        for step, kept in enumerate(answer.accepted, start=1):
            steps += [step] * kept
        stream = TextStream(tokenizer)
        texts = [stream.push(token) for token in answer.token_ids]
        texts[-1] += stream.flush()
        tokens = [SampleToken(text, step) for text, step in zip(texts, steps, strict=True)]
        found.append(Sample(tokenizer.decode(prompt.ids, skip_special_tokens=True), tokens))
    return found
