"""Claim: conversation-wise generation writes at least 1.25 times as many tokens per second as one call per turn.

Measured: the stage's own loop (`converse`: a conversation's next turn is requested as soon as its last one ended) on
vLLM. Against: one `LLM.generate()` call per turn over all conversations with such a turn, which waits for the slowest
answer before the next turn begins. Same engine, conversations and settings, the prefix cache emptied before
each run; both write the same tokens (`same_tokens`). 60 ragged conversations: 1 to 8 turns, and answers whose lengths,
drawn beforehand, spread log-normally (median 32 tokens, sigma 0.85, which is the spread of the answers in
MT-Bench-101). The target has the demo's shape and random weights.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks import targets
from benchmarks.claims import Result, in_turns, speed_ratio
from pipeline.conversations.conversation import Conversation, Message
from pipeline.conversations.dialogue import Dialogue, DialogueSettings
from pipeline.conversations.requests import Completion, Finish, Request, Sampling
from pipeline.conversations.template import ChatTemplate
from pipeline.targets.dialogue_pool import converse
from pipeline.targets.engines import GenerationEngine
from pipeline.targets.spec import context_length, eos_token_ids, load_tokenizer
from pipeline.targets.vllm_engine import VLLMGenerationEngine, sampling_params

AIM = 1.25
NUM_CONVERSATIONS, MAX_TURNS = 60, 8
MEDIAN_TOKENS, SIGMA, MOST_TOKENS = 32, 0.85, 384
ROUNDS = 4


def measure(*, tiny: bool = False) -> Result:
    """One target, four rounds."""
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as temporary:
        target = targets.random_demo_target(Path(temporary))
        template = ChatTemplate(load_tokenizer(target))
        conversations = _conversations(6 if tiny else NUM_CONVERSATIONS, rng)
        lengths = {
            f"{each.id}/{turn}": min(MOST_TOKENS, 1 + int(rng.lognormal(np.log(MEDIAN_TOKENS), SIGMA)))
            for each in conversations
            for turn in range(MAX_TURNS)
        }
        settings = DialogueSettings("replay", Sampling(temperature=0.7), max_tokens=context_length(target))
        engine = VLLMGenerationEngine(target)
        llm = engine._running.llm  # the engine's own `LLM`: both sides share its weights, its cache and its settings
        written: dict[str, list[list[int]]] = {}

        def side(name: str, hold: Callable[[Sequence[Dialogue]], None]) -> Callable[[], float]:
            def run() -> float:
                dialogues = [Dialogue(each, template, settings) for each in conversations]
                llm.reset_prefix_cache()
                started = perf_counter()
                hold(dialogues)
                seconds = perf_counter() - started
                written[name] = [row.input_ids for dialogue in dialogues for row in dialogue.rows()]
                return seconds

            return run

        ragged = RaggedEngine(engine, lengths)
        sides = {
            "conversation-wise": side("conversation-wise", lambda dialogues: converse(dialogues, ragged)),
            "one call per turn": side(
                "one call per turn", lambda dialogues: by_turn(dialogues, llm, lengths, eos_token_ids(target))
            ),
        }
        seconds = in_turns(sides, 1 if tiny else ROUNDS)
        engine.close()
    num_tokens = ragged.num_tokens // (1 + (1 if tiny else ROUNDS))
    same = written["conversation-wise"] == written["one call per turn"]
    claim = speed_ratio("conversation-wise over one call per turn", seconds, num_tokens, "tokens", AIM)
    return Result([claim], {"conversations": len(conversations), "tokens": num_tokens, "same_tokens": same})


def _conversations(number: int, rng: np.random.Generator) -> list[Conversation]:
    """Seeds of 1 to 8 questions, taken one after another from the bundled ones."""
    questions = cycle(
        message.content[:200]
        for each in targets.bundled_conversations()
        for message in each.messages
        if message.role == "user"
    )
    return [
        Conversation(
            f"c:{index}", tuple(Message("user", next(questions)) for _ in range(rng.integers(1, MAX_TURNS + 1)))
        )
        for index in range(number)
    ]


class RaggedEngine:
    """An engine whose answers end at given lengths, as a real target's answers vary in length."""

    def __init__(self, engine: GenerationEngine, lengths: dict[str, int]):
        self._engine, self._lengths = engine, lengths
        self.num_tokens = 0

    @property
    def num_unfinished(self) -> int:
        return self._engine.num_unfinished

    @property
    def capacity(self) -> int:
        return self._engine.capacity

    def add(self, request: Request) -> None:
        self._engine.add(limited(request, self._lengths))

    def step(self) -> list[Completion]:
        completions = self._engine.step()
        self.num_tokens += sum(len(completion.token_ids) for completion in completions)
        return completions

    def close(self) -> None:
        self._engine.close()


def limited(request: Request, lengths: dict[str, int]) -> Request:
    """The request with its answer's length."""
    return replace(request, max_new_tokens=min(request.max_new_tokens, lengths[request.id]))


def by_turn(dialogues: Iterable[Dialogue], llm: Any, lengths: dict[str, int], eos: tuple[int, ...]) -> None:
    """One `LLM.generate()` call for all conversations' first turns, one for all second turns, and so on."""
    asking = [(dialogue, request) for dialogue in dialogues if (request := dialogue.next_request())]
    while asking:
        outputs = llm.generate(
            [{"prompt_token_ids": request.prompt_ids} for _, request in asking],
            [sampling_params(limited(request, lengths), eos) for _, request in asking],
            use_tqdm=False,
        )
        for (dialogue, request), output in zip(asking, outputs, strict=True):
            text = output.outputs[0]
            finished: Finish = "stop" if text.finish_reason == "stop" else "length"
            dialogue.receive(Completion(request.id, list(text.token_ids), finished))
        asking = [(dialogue, request) for dialogue, _ in asking if (request := dialogue.next_request())]
