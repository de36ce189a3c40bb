"""Baselines: transformers' own greedy decoding of the same prompts, plain and speculative.

    generate       plain decoding with its dynamic cache
    prompt-lookup  guesses are the tokens that followed an earlier occurrence of the last tokens
    assistant      guesses come from a smaller model with the same vocabulary
    (`check.assistant_model`)

A streamer records the tokens of each forward, so that they are counted and timed as in our own
decoding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal

import torch
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from pipeline.config import BaselineName
from pipeline.decoding.decoder import Decoded
from pipeline.evaluation.prompts import Prompt
from pipeline.evaluation.speed import Decode, Pass, categories_of, code_of_others, pace_beside
from pipeline.targets.loading import input_device, load_causal_lm
from pipeline.targets.spec import TargetSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NUM_LOOKED_UP = 10  # guesses per step, as in transformers' guide


class ForwardRecorder(BaseStreamer):
    """Records the tokens and the time of each forward of the target."""

    def __init__(self) -> None:
        self.forwards: list[list[int]] = []
        self.times: list[float] = []
        self._began = False

    def put(self, value: torch.Tensor) -> None:
        """Receive the prompt, then each forward's tokens."""
        if self._began:
            self.forwards.append(value.flatten().tolist())
            self.times.append(perf_counter())
        self._began = True

    def end(self) -> None:
        """The text is over."""


def baseline(
    name: BaselineName,
    model: PreTrainedModel,
    eos_token_ids: tuple[int, ...],
    max_new_tokens: int,
    assistant: TargetSpec | None = None,
) -> Decode:
    """A greedy decoder of transformers; the model's own generation settings do not apply.

    It raises `CannotDecode` where transformers cannot decode this target or prompt in this way.

    Raises:
        ConfigError, EnvironmentFault: The assistant cannot be loaded.
    """
    device = input_device(model)
    settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": max_new_tokens}
    if eos_token_ids:
        settings |= {"eos_token_id": list(eos_token_ids), "pad_token_id": eos_token_ids[0]}
    more: dict[str, Any] = {}
    if name == "prompt-lookup":
        settings["prompt_lookup_num_tokens"] = NUM_LOOKED_UP
    if name == "assistant":
        assert assistant is not None, "CheckConfig asks for both or neither"
        more["assistant_model"] = load_causal_lm(assistant, device)
    chosen = GenerationConfig(**settings)
    model.generation_config = GenerationConfig()  # generate takes unset values from it

    def decode(prompt_ids: list[int], seed: int) -> Decoded:
        ids_1T = torch.tensor([prompt_ids], device=device)
        recorder = ForwardRecorder()
        given = {
            "attention_mask": torch.ones_like(ids_1T),
            "generation_config": chosen,
            "streamer": recorder,
            **more,
        }
        start = perf_counter()
        with code_of_others():
            model.generate(ids_1T, **given)
        token_ids = [token for new_ids in recorder.forwards for token in new_ids]
        finished: Literal["stop", "length"] = "stop" if token_ids[-1] in eos_token_ids else "length"
        accepted = [len(new_ids) for new_ids in recorder.forwards[1:]]
        first, last = recorder.times[0], recorder.times[-1]
        return Decoded(token_ids, finished, accepted, first - start, last - first)

    return decode


def beside_by_category(
    rows: Sequence[Mapping[str, Any]],
    prompts: Sequence[Prompt],
    passes: Sequence[Pass],
    names: Sequence[str],
) -> list[dict[str, Any]]:
    """The rows of `by_category`, each with `baselines` on its prompts: {name: {acceleration_rate,
    speedup}}.

    Args:
        passes: Greedy ones, in which the baselines decoded.
        names: The baselines that decoded every prompt.
    """
    members = categories_of(prompts)

    def figures(category: str, name: str) -> dict[str, float | None]:
        of_these = [
            {side: [answers[i] for i in members[category]] for side, answers in one.items()}
            for one in passes
        ]
        pace = pace_beside(of_these, name)
        return {key: pace[key] for key in ("acceleration_rate", "speedup")}

    return [
        {**row, "baselines": {name: figures(row["category"], name) for name in names}}
        for row in rows
    ]
