"""Conversations are held all at once, none waits for another, and each one's text is its own."""

from __future__ import annotations

import hashlib
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.conversations.conversation import Conversation, Message
from pipeline.conversations.dialogue import Completion, Dialogue, DialogueSettings, Sampling
from pipeline.conversations.template import ChatTemplate
from pipeline.targets.dialogue_pool import DialoguePool, converse
from pipeline.targets.spec import TargetSpec, load_tokenizer
from tests.flows.tiny import WORDS

EOS = 1


class ClockworkEngine:
    """Answers a prompt with ids that depend on the prompt alone, after a number of steps that does
    too.
    """

    def __init__(self, salt: str, capacity: int = 10**6):
        self.salt, self.clock, self.capacity = salt, 0, capacity
        self.fullest = 0
        self.running: dict[str, tuple[int, list[int]]] = {}
        self.asked_at: dict[str, int] = {}
        self.answered_at: dict[str, int] = {}

    def add(self, request) -> None:
        assert request.id not in self.asked_at, "a request is made once"
        self.asked_at[request.id] = self.clock
        answer = random.Random(hashlib.sha256(str(request.prompt_ids).encode()).digest())
        wait = random.Random(hashlib.sha256(f"{self.salt}{request.id}".encode()).digest())
        ids = [answer.randrange(10, 250) for _ in range(answer.randrange(3, 9))] + [EOS]
        self.running[request.id] = (self.clock + wait.randrange(1, 12), ids)
        self.fullest = max(self.fullest, len(self.running))

    def step(self) -> list[Completion]:
        assert self.running, "nobody steps an engine that has nothing to do"
        self.clock += 1
        due = [name for name, (when, _) in self.running.items() if when <= self.clock]
        self.answered_at |= dict.fromkeys(due, self.clock)
        return [Completion(name, self.running.pop(name)[1], "stop") for name in due]


@pytest.fixture(scope="session")
def template(tiny_target) -> ChatTemplate:
    return ChatTemplate(load_tokenizer(TargetSpec(str(tiny_target))))


def dialogues(
    template: ChatTemplate, turns: list[int], mode: str = "replay", shard: str = "s"
) -> list[Dialogue]:
    sampling = Sampling(temperature=0.7, top_p=1.0, max_new_tokens=16, stop_token_ids=(EOS,))
    held = DialogueSettings(mode=mode, sampling=sampling, max_tokens=4096, rounds=9)
    found = []
    for number, length in enumerate(turns):
        texts = [
            Message("user", f"{WORDS[(number + turn) % len(WORDS)]} {number}?")
            for turn in range(length)
        ]
        answers = [Message("assistant", f"{number} is {turn}") for turn in range(length)]
        messages = tuple(message for pair in zip(texts, answers, strict=True) for message in pair)
        found.append(Dialogue(Conversation(f"{shard}:{number}", messages), template, held))
    return found


@settings(max_examples=20)
@given(turns=st.lists(st.integers(1, 6), min_size=1, max_size=12), salt=st.text("ab", max_size=4))
def test_every_next_request_is_made_the_moment_the_last_one_ended(template, turns, salt):
    engine = ClockworkEngine(salt)
    converse(dialogues(template, turns), engine)
    for number, length in enumerate(turns):
        assert engine.asked_at[f"s:{number}/0"] == 0
        for turn in range(1, length):
            assert (
                engine.asked_at[f"s:{number}/{turn}"]
                == engine.answered_at[f"s:{number}/{turn - 1}"]
            )
    assert len(engine.asked_at) == sum(turns) and not engine.running


@settings(max_examples=20)
@given(
    turns=st.lists(st.integers(1, 5), min_size=2, max_size=8),
    seed=st.randoms(use_true_random=False),
)
def test_a_row_is_the_same_in_any_order_and_at_any_pace(template, turns, seed):
    one, other = dialogues(template, turns), dialogues(template, turns)
    converse(one, ClockworkEngine("quick"))
    mixed = list(other)
    seed.shuffle(mixed)
    converse(mixed, ClockworkEngine("slow"))
    assert [dialogue.rows() for dialogue in one] == [dialogue.rows() for dialogue in other]


def test_passthrough_asks_no_engine(template):
    held = dialogues(template, [1, 3], mode="passthrough")
    converse(held, None)
    assert [len(dialogue.rows()[0].spans) for dialogue in held] == [1, 3]


@settings(max_examples=30)
@given(turns=st.lists(st.integers(1, 6), min_size=1, max_size=12), capacity=st.integers(1, 5))
def test_no_more_are_open_than_there_are_seats_and_who_has_begun_never_waits(
    template, turns, capacity
):
    engine = ClockworkEngine("a", capacity)
    held = dialogues(template, turns)
    converse(held, engine)
    assert engine.fullest == min(capacity, len(turns))
    for number, length in enumerate(turns):
        for turn in range(1, length):
            assert (
                engine.asked_at[f"s:{number}/{turn}"]
                == engine.answered_at[f"s:{number}/{turn - 1}"]
            )
    assert [d.rows() for d in held] == [d.rows() for d in _alone(template, turns)]


def _alone(template: ChatTemplate, turns: list[int]) -> list[Dialogue]:
    held = dialogues(template, turns)
    converse(held, ClockworkEngine("b"))
    return held


@settings(max_examples=30)
@given(
    one=st.lists(st.integers(1, 6), min_size=1, max_size=8),
    other=st.lists(st.integers(1, 6), min_size=1, max_size=8),
    capacity=st.integers(1, 6),
)
def test_the_next_shard_takes_the_seats_that_the_last_ones_of_this_one_leave_free(
    template, one, other, capacity
):
    engine = ClockworkEngine("a", capacity)
    pool, later = DialoguePool(engine), []
    reports: list[tuple[int, int]] = []
    first = pool.add(dialogues(template, one), lambda *report: reports.append(report))

    def begin_next() -> None:
        if not later:
            later.append(pool.add(dialogues(template, other, shard="t")))

    pool.finish(first, begin_next)
    ends = sorted(
        engine.answered_at[f"s:{number}/{length - 1}"] for number, length in enumerate(one)
    )
    first_free_seat = 0 if len(one) < capacity else ends[len(one) - capacity]
    assert engine.asked_at["t:0/0"] == first_free_seat
    written = sum(
        len(span) for dialogue in first.dialogues for row in dialogue.rows() for span in row.spans
    )
    assert (sum(done for done, _ in reports), sum(tokens for _, tokens in reports)) == (
        len(one),
        written,
    )
    begin_next()
    pool.finish(later[0])
    assert [d.rows() for d in first.dialogues] == [d.rows() for d in _alone(template, one)]
    assert len(engine.asked_at) == sum(one) + sum(other) and engine.fullest <= capacity
