"""Logits of a target in a running vLLM engine, for a few tokens at each place of a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.targets.spec import EngineArgs

if TYPE_CHECKING:
    from vllm import LLM

Logits = dict[int, float]  # by token id
LOGITS: EngineArgs = {"logprobs_mode": "raw_logits"}  # vLLM's default is log-probabilities


@dataclass(frozen=True)
class LogitRequest:
    """A prompt to continue greedily, and the tokens whose logits are asked for at each place.

    `num_top` asks for the largest logits, `token_ids` for the logits of given tokens. The logit of
    the token that vLLM chooses is always returned.
    """

    prompt_ids: list[int]
    num_tokens: int = 1
    num_top: int | None = None
    token_ids: Sequence[int] = ()


@dataclass(frozen=True)
class LogitAnswer:
    """The tokens with which vLLM continues a prompt, and the logits at the place of each."""

    token_ids: list[int]
    logits: list[Logits]


def read_logits(llm: LLM, requests: Sequence[LogitRequest]) -> list[LogitAnswer]:
    """Run requests at once in an engine that was started with `LOGITS`.

    All of them must set `num_top`, or all `token_ids`: vLLM 0.32 loses logits of mixed batches.
    """
    from vllm import SamplingParams

    prompts = []
    params = []
    for request in requests:
        prompts.append({"prompt_token_ids": request.prompt_ids})
        params.append(
            SamplingParams(
                temperature=0,
                max_tokens=request.num_tokens,
                ignore_eos=True,
                detokenize=False,
                logprobs=request.num_top,
                logprob_token_ids=list(request.token_ids) or None,
            )
        )
    answers = []
    if requests:
        for output in llm.generate(prompts, params, use_tqdm=False):
            text = output.outputs[0]
            logits = []
            for place in text.logprobs:
                logits.append({token: each.logprob for token, each in place.items()})
            answers.append(LogitAnswer(list(text.token_ids), logits))
    return answers
