"""Benchmark of conversation-wise generation over one vLLM call per turn.

Claim: at least 1.25 times as many tokens per second.

Measured: the stage's own loop (`run_dialogues`: a conversation's next turn is requested as soon as
its last one ended) on vLLM. Against: one `LLM.generate()` call per turn over all conversations with
such a turn, which waits for the slowest answer before the next turn begins. Both use the same
engine, conversations and settings, start with an empty prefix cache, and write the same tokens
(`same_tokens`). There are 60 ragged conversations of 1 to 8 turns. The lengths of the answers are
drawn beforehand from a log-normal distribution (median 32 tokens, sigma 0.85, which is the spread
of the answers in MT-Bench-101). The target has the demo's shape and random weights.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
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
from pipeline.targets.dialogue_pool import run_dialogues
from pipeline.targets.spec import context_length, eos_token_ids, load_tokenizer
from pipeline.targets.vllm_engine import VLLMGenerationEngine, sampling_params

AIM = 1.25
NUM_CONVERSATIONS, MAX_TURNS = 60, 8
MEDIAN_TOKENS, SIGMA, MOST_TOKENS = 32, 0.85, 384
ROUNDS = 4


def measure(*, tiny: bool = False) -> Result:
    """Measure both ways of generation with one target in four rounds."""
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as temporary:
        target = targets.random_demo_target(Path(temporary))
        template = ChatTemplate(load_tokenizer(target))
        conversations = _conversations(2 if tiny else NUM_CONVERSATIONS, rng)
        lengths = {
            f"{each.id}/{turn}": min(
                MOST_TOKENS, 1 + int(rng.lognormal(np.log(MEDIAN_TOKENS), SIGMA))
            )
            for each in conversations
            for turn in range(MAX_TURNS)
        }
        settings = DialogueSettings(
            "replay", Sampling(temperature=0.7), max_tokens=context_length(target)
        )
        rounds = 1 if tiny else ROUNDS
        engine = VLLMGenerationEngine(target, {})
        llm = (
            engine._running.llm
        )  # the engine's own `LLM`: both sides share its weights, its cache and its settings
        last: dict[str, list[RaggedDialogue]] = {}  # of each side's last run

        def run(name: str, hold: Callable[[Sequence[Dialogue]], None]) -> float:
            last[name] = [
                RaggedDialogue(each, template, settings, lengths) for each in conversations
            ]
            llm.reset_prefix_cache()
            started = perf_counter()
            hold(last[name])
            return perf_counter() - started

        by_conversation = partial(run_dialogues, engine=engine)
        turn_by_turn = partial(by_turn, llm=llm, eos=eos_token_ids(target))
        sides = {"conversation-wise": by_conversation, "one call per turn": turn_by_turn}
        seconds = in_turns({name: partial(run, name, hold) for name, hold in sides.items()}, rounds)
        engine.close()
    ours, theirs = (
        [row.input_ids for each in dialogues for row in each.rows()] for dialogues in last.values()
    )
    num_tokens, same = sum(each.num_tokens for each in last["conversation-wise"]), ours == theirs
    claim = speed_ratio(
        "conversation-wise over one call per turn", seconds, num_tokens, "tokens", AIM
    )
    return Result(
        [claim], {"conversations": len(conversations), "tokens": num_tokens, "same_tokens": same}
    )


def _conversations(number: int, rng: np.random.Generator) -> list[Conversation]:
    """Build seeds of 1 to 8 questions from the bundled conversations."""
    questions = cycle(
        message.content[:200]
        for each in targets.bundled_conversations()
        for message in each.messages
        if message.role == "user"
    )
    return [
        Conversation(
            f"c:{index}",
            tuple(Message("user", next(questions)) for _ in range(rng.integers(1, MAX_TURNS + 1))),
        )
        for index in range(number)
    ]


class RaggedDialogue(Dialogue):
    """A dialogue whose answers end at given lengths, which vary like a real target's answers."""

    def __init__(
        self,
        conversation: Conversation,
        template: ChatTemplate,
        settings: DialogueSettings,
        lengths: dict[str, int],
    ):
        super().__init__(conversation, template, settings)
        self._lengths, self.num_tokens = lengths, 0

    def next_request(self) -> Request | None:
        request = super().next_request()
        return request and replace(
            request, max_new_tokens=min(request.max_new_tokens, self._lengths[request.id])
        )

    def receive(self, completion: Completion) -> None:
        super().receive(completion)
        self.num_tokens += len(completion.token_ids)


def by_turn(dialogues: Iterable[Dialogue], llm: Any, eos: tuple[int, ...]) -> None:
    """Generate all conversations with one `LLM.generate()` call per turn, the baseline."""
    asking = [(dialogue, request) for dialogue in dialogues if (request := dialogue.next_request())]
    while asking:
        outputs = llm.generate(
            [{"prompt_token_ids": request.prompt_ids} for _, request in asking],
            [sampling_params(request, eos) for _, request in asking],
            use_tqdm=False,
        )
        for (dialogue, request), output in zip(asking, outputs, strict=True):
            text = output.outputs[0]
            finished: Finish = "stop" if text.finish_reason == "stop" else "length"
            dialogue.receive(Completion(request.id, list(text.token_ids), finished))
        asking = [
            (dialogue, request) for dialogue, _ in asking if (request := dialogue.next_request())
        ]
