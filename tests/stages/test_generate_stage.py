"""Conversations are held all at once, none waits for another, and a row is the same whoever stands beside it."""

from __future__ import annotations

import hashlib
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from pipeline.conversations.conversation import Conversation, Message
from pipeline.conversations.dialogue import Completion, Dialogue, DialogueSettings, Sampling
from pipeline.conversations.template import ChatTemplate
from pipeline.flow import run_flow
from pipeline.stages.generate import converse
from pipeline.storage.shards import read_rows
from pipeline.targets.spec import TargetSpec, load_tokenizer
from tests.flows.tiny import WORDS

EOS = 1


class ClockworkEngine:
    """Answers a prompt with ids that depend on the prompt alone, after a number of steps that does too."""

    def __init__(self, salt: str):
        self.salt, self.clock = salt, 0
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

    def step(self) -> list[Completion]:
        assert self.running, "nobody steps an engine that has nothing to do"
        self.clock += 1
        due = [name for name, (when, _) in self.running.items() if when <= self.clock]
        self.answered_at |= dict.fromkeys(due, self.clock)
        return [Completion(name, self.running.pop(name)[1], "stop") for name in due]


@pytest.fixture(scope="session")
def template(tiny_target) -> ChatTemplate:
    return ChatTemplate(load_tokenizer(TargetSpec(str(tiny_target))))


def dialogues(template: ChatTemplate, turns: list[int], mode: str = "replay") -> list[Dialogue]:
    sampling = Sampling(temperature=0.7, top_p=1.0, max_new_tokens=16, stop_token_ids=(EOS,))
    held = DialogueSettings(mode=mode, sampling=sampling, max_tokens=4096, rounds=9)
    found = []
    for number, length in enumerate(turns):
        texts = [Message("user", f"{WORDS[(number + turn) % len(WORDS)]} {number}?") for turn in range(length)]
        answers = [Message("assistant", f"{number} is {turn}") for turn in range(length)]
        messages = tuple(message for pair in zip(texts, answers, strict=True) for message in pair)
        found.append(Dialogue(Conversation(f"s:{number}", messages), template, held))
    return found


@settings(max_examples=20)
@given(turns=st.lists(st.integers(1, 6), min_size=1, max_size=12), salt=st.text("ab", max_size=4))
def test_every_next_request_is_made_the_moment_the_last_one_ended(template, turns, salt):
    engine = ClockworkEngine(salt)
    converse(dialogues(template, turns), engine)
    for number, length in enumerate(turns):
        assert engine.asked_at[f"s:{number}/0"] == 0
        for turn in range(1, length):
            assert engine.asked_at[f"s:{number}/{turn}"] == engine.answered_at[f"s:{number}/{turn - 1}"]
    assert len(engine.asked_at) == sum(turns) and not engine.running


@settings(max_examples=20)
@given(turns=st.lists(st.integers(1, 5), min_size=2, max_size=8), seed=st.randoms(use_true_random=False))
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


def rows_of(config):
    run = run_flow(config, until="generate", executor="inline", console=Console(quiet=True))
    return [row for path in run.latest("generate").shards() for row in read_rows(path)]


def test_held_out_rows_are_greedy_and_training_rows_are_sampled_by_the_run_s_seed(finished_run, make_config, tmp_path):
    first = {row["id"]: row for path in finished_run.latest("generate").shards() for row in read_rows(path)}
    other = {row["id"]: row for row in rows_of(make_config(tmp_path, run__seed=1))}

    def of(rows: dict[str, dict], *splits: str) -> dict[str, list[int]]:
        return {name: row["input_ids"] for name, row in rows.items() if row["split"] in splits}

    assert of(first, "calibrate", "check") == of(other, "calibrate", "check")
    assert not [name for name, ids in of(first, "train").items() if of(other, "train").get(name) == ids]


def test_spans_are_what_was_sampled_and_an_ended_answer_holds_its_end_of_turn(finished_run, tiny_target):
    stops = {1, *range(100, 108)}
    finishes = set()
    for path in finished_run.latest("generate").shards():
        for row in read_rows(path):
            assert len(row["finish"]) == len(row["spans"]) == sum(m["role"] == "assistant" for m in row["messages"])
            for span, finish in zip(row["spans"], row["finish"], strict=True):
                answer = row["input_ids"][span["start"] : span["end"]]
                assert (answer[-1] in stops) == (finish == "stop")
                assert not stops & set(answer[:-1]) and len(answer) <= 16
                finishes.add(finish)
    assert finishes == {"stop", "length"}


def test_passthrough_keeps_the_seed_s_own_answers(make_config, tmp_path):
    config = make_config(tmp_path, generate__mode="passthrough", generate__engine="vllm")
    seeds = run_flow(config, until="seeds", executor="inline", console=Console(quiet=True)).latest("seeds")
    messages = {row["id"]: row["messages"] for path in seeds.shards() for row in read_rows(path)}
    rows = rows_of(config)
    assert len(rows) == 40
    assert all(row["messages"] == messages[row["id"]] for row in rows)


def test_self_talk_writes_both_roles(make_config, tmp_path):
    rows = rows_of(make_config(tmp_path, generate__mode="self-talk", generate__rounds=3))
    roles = [[span["role"] for span in row["spans"]] for row in rows]
    assert max(roles, key=len) == ["assistant", "user", "assistant", "user", "assistant"]
    assert all(spans == ["assistant", "user", "assistant", "user", "assistant"][: len(spans)] for spans in roles)


def test_a_template_that_rewrites_its_history_gives_one_row_per_turn_and_every_seed_is_owned(
    make_config, tmp_path, tiny_target
):
    """A mark stands before the last question alone."""
    forgetful = (
        "{% for m in messages %}{{ '<|' + m['role'] + '|>' }}{{ 'now ' if loop.last }}{{ m['content'] + eos_token }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    )
    rows = rows_of(make_config(tmp_path, target__chat_template=forgetful))
    split = [row for row in rows if "#" in row["id"]]
    assert split and all(row["id"] == f"{row['parent_id']}#{row['id'].partition('#')[2]}" for row in split)
    assert all(len(row["spans"]) == 1 for row in rows)
    assert len({row["id"] for row in rows}) == len(rows)
