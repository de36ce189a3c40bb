"""Dialogues of a pool run at once, and each one's text is independent of the others."""

from __future__ import annotations

import hashlib
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.conversations.conversation import Conversation, Message
from pipeline.conversations.dialogue import Completion, Dialogue, DialogueSettings, Sampling
from pipeline.conversations.template import ChatTemplate
from pipeline.targets.dialogue_pool import DialoguePool, run_dialogues
from pipeline.targets.spec import TargetSpec, load_tokenizer

EOS = 1


class ClockworkEngine:
    """An engine that answers after some steps, with ids that depend on the prompt alone."""

    def __init__(self, salt="a", capacity=10**6):
        self.salt, self.clock, self.capacity = salt, 0, capacity
        self.fullest = 0
        self.running = {}
        self.asked_at = {}
        self.answered_at = {}

    def add(self, request):
        assert request.id not in self.asked_at, "a request is made once"
        self.asked_at[request.id] = self.clock
        answer = random.Random(hashlib.sha256(str(request.prompt_ids).encode()).digest())
        wait = random.Random(f"{self.salt}{request.id}").randrange(1, 12)
        ids = [answer.randrange(10, 250) for _ in range(answer.randrange(3, 9))] + [EOS]
        self.running[request.id] = (self.clock + wait, ids)
        self.fullest = max(self.fullest, len(self.running))

    def step(self):
        assert self.running, "an engine with nothing to do is not stepped"
        self.clock += 1
        due = [name for name, (when, _) in self.running.items() if when <= self.clock]
        self.answered_at |= dict.fromkeys(due, self.clock)
        return [Completion(name, self.running.pop(name)[1], "stop") for name in due]

    def lengths(self):
        return {name: len(ids) - 1 for name, (_, ids) in self.running.items()}

    def assert_answers_are_followed_at_once(self, turns):
        for number, length in enumerate(turns):
            for turn in range(1, length):
                answered = self.answered_at[f"s:{number}/{turn - 1}"]
                assert self.asked_at[f"s:{number}/{turn}"] == answered


@pytest.fixture(scope="session")
def template(tiny_target):
    return ChatTemplate(load_tokenizer(TargetSpec(str(tiny_target))))


def dialogues(template, turns, shard="s"):
    sampling = Sampling(temperature=0.7, top_p=1.0, max_new_tokens=16, stop_token_ids=(EOS,))
    held = DialogueSettings(mode="replay", sampling=sampling, max_tokens=4096, rounds=9)
    found = []
    for number, length in enumerate(turns):
        messages = []
        for turn in range(length):
            messages.append(Message("user", f"{number} and {turn}?"))
            messages.append(Message("assistant", f"{number} is {turn}"))
        conversation = Conversation(f"{shard}:{number}", tuple(messages))
        found.append(Dialogue(conversation, template, held))
    return found


def rows_of(dialogues):
    return [dialogue.rows() for dialogue in dialogues]


def rows_alone(template, turns):
    held = dialogues(template, turns)
    run_dialogues(held, ClockworkEngine("b"))
    return rows_of(held)


TURNS = st.lists(st.integers(1, 6), min_size=1, max_size=12)


@settings(max_examples=30)
@given(turns=TURNS, seed=st.randoms(use_true_random=False), capacity=st.integers(1, 15))
def test_rows_depend_on_no_order_pace_or_capacity(template, turns, seed, capacity):
    engine, held = ClockworkEngine("a", capacity), dialogues(template, turns)
    mixed = list(held)
    seed.shuffle(mixed)
    run_dialogues(mixed, engine)
    assert engine.fullest == min(capacity, len(turns))
    assert len(engine.asked_at) == sum(turns) and not engine.running
    assert sum(asked == 0 for asked in engine.asked_at.values()) == engine.fullest
    engine.assert_answers_are_followed_at_once(turns)
    assert rows_of(held) == rows_alone(template, turns)


@settings(max_examples=30)
@given(one=TURNS, other=TURNS, capacity=st.integers(1, 6))
def test_the_next_shard_takes_the_capacity_left_free(template, one, other, capacity):
    engine = ClockworkEngine("a", capacity)
    pool, later, reports = DialoguePool(engine), [], []
    first = pool.add(dialogues(template, one), lambda *report: reports.append(report))

    def begin_next():
        if not later:
            later.append(pool.add(dialogues(template, other, shard="t")))

    pool.finish(first, begin_next)
    ends = sorted(engine.answered_at[f"s:{number}/{turns - 1}"] for number, turns in enumerate(one))
    first_free = 0 if len(one) < capacity else ends[len(one) - capacity]
    assert engine.asked_at["t:0/0"] == first_free
    rows = rows_of(first.dialogues)
    spans = [span for rows_of_one in rows for row in rows_of_one for span in row.spans]
    assert reports[-1] == (len(one), sum(map(len, spans)), 0)
    pool.finish(later[0])
    assert rows == rows_alone(template, one)
    assert len(engine.asked_at) == sum(one) + sum(other) and engine.fullest <= capacity


class SlowEngine:
    """An engine that adds a token to every text in each step, a second apart; none ends early."""

    capacity = 100

    def __init__(self, clock):
        self.clock, self.requests, self.written = clock, {}, {}

    def add(self, request):
        self.requests[request.id], self.written[request.id] = request, []

    def lengths(self):
        return {name: len(ids) for name, ids in self.written.items()}

    def step(self):
        self.clock.now += 1.0
        ended = []
        for name, ids in list(self.written.items()):
            ids.append(20 + len(ids))
            if len(ids) == self.requests[name].max_new_tokens:
                ended.append(Completion(name, self.written.pop(name), "length"))
        return ended


def test_tokens_are_counted_while_no_text_has_ended(template, monkeypatch):
    """Three conversations of one, one and two answers; each answer has all of its 16 tokens."""

    class Clock:
        now = 0.0

    monkeypatch.setattr("pipeline.targets.dialogue_pool.time.monotonic", lambda: Clock.now)
    reports = []
    run_dialogues(
        dialogues(template, [1, 1, 2]), SlowEngine(Clock), lambda *report: reports.append(report)
    )
    running = [report for report in reports if report[0] == 0]
    assert running[:15] == [(0, 3 * made, 4 * 16 - 3 * made) for made in range(1, 16)]
    assert reports[-1] == (3, 4 * 16, 0)
    assert all(tokens + left == 4 * 16 for _, tokens, left in reports[-10:])
