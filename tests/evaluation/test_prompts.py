"""Prompts: one of each held-out row, and every turn of a question after the target's answers."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from pipeline.artifacts.generated_rows import TokenRow, read_token_rows
from pipeline.config import CheckConfig
from pipeline.conversations.conversation import Conversation, Message
from pipeline.conversations.sources import read_questions
from pipeline.conversations.spans import Span
from pipeline.evaluation import prompts
from pipeline.evaluation.prompts import (
    Prompt,
    draw_questions,
    held_out_prompts,
    question_ids,
    question_prompts,
    spread,
    with_room,
    with_room_for,
)
from pipeline.storage.shards import read_rows
from pipeline.targets.spec import TargetSpec, context_length
from tests.flows.tiny import write_lines

EOS = [1]
ROOM = 10_000


@pytest.fixture(scope="module")
def rows(finished_run):
    """The rows that are asked, as the shards hold them."""
    found = (row for path in finished_run.latest("generate").shards() for row in read_rows(path))
    return {row["id"]: row for row in found if row["split"] == "check"}


@pytest.fixture(scope="module")
def generated(finished_run):
    stage = finished_run.latest("generate")
    return list(read_token_rows(stage.shards(), stage.fingerprint))


def test_a_held_out_conversation_gives_one_prompt(generated, rows):
    found = held_out_prompts(generated, 100, ROOM)
    assert {prompt.id for prompt in found.kept} == rows.keys()
    assert len(found.kept) == len(rows) and found.skipped == 0
    turns = []
    for prompt in found.kept:
        row = rows[prompt.id]
        starts = [span["start"] for span in row["spans"]]
        assert prompt.ids == row["input_ids"][: len(prompt.ids)] and prompt.category == "seeds"
        turns.append(starts.index(len(prompt.ids)))
    assert set(turns) == {0, 1}, "first and second turns, by the rows' ids"


def token_row(id: str, split: str = "check", answers: tuple[int, ...] = (2,)) -> TokenRow:
    """A row with answers of three tokens, which begin at these places."""
    spans = [Span(start, start + 3, "assistant") for start in answers]
    return TokenRow(id, id.partition("#")[0], split, np.arange(spans[-1].end), spans)


def test_each_category_of_a_source_gives_its_share():
    rows = [token_row(f"s:{n}") for n in range(90)] + [token_row(f"t:{n}") for n in range(30)]
    categories = {f"s:{n}": "maths" for n in range(30)}
    found = held_out_prompts(rows, 12, ROOM, categories=categories)
    assert Counter(prompt.category for prompt in found.kept) == {"maths": 3, "s": 6, "t": 3}
    assert [vars(source) for source in found.sources] == [
        {"source": "s", "category": "maths", "conversations": 30, "held_out": 30, "prompts": 3},
        {"source": "s", "category": None, "conversations": 60, "held_out": 60, "prompts": 6},
        {"source": "t", "category": None, "conversations": 30, "held_out": 30, "prompts": 3},
    ]


def test_a_conversation_of_several_rows_gives_one_prompt():
    rows = [token_row(f"s:{n}#{turn}") for n in range(20) for turn in range(8)]
    found = held_out_prompts(rows, 12, ROOM).kept
    assert len({prompt.id.partition("#")[0] for prompt in found}) == len(found) == 12
    assert len({prompt.id.partition("#")[2] for prompt in found}) > 2, "of different turns"


def test_a_source_with_fewer_held_out_rows_gives_all():
    """Its share is that of its conversations; samples of a prompt are one conversation."""
    rows = [token_row(f"a:{n}") for n in range(30)]
    rows += [token_row(f"b:{n}", "train") for n in range(27)]
    rows += [replace(row, id=f"{row.id}~2") for row in rows[30:]]
    rows += [token_row("b:28"), token_row("b:29"), token_row("b:30", answers=(50,))]
    found = held_out_prompts(rows, 16, 10)
    assert Counter(prompt.category for prompt in found.kept) == {"a": 14, "b": 2}
    assert found.skipped == 1
    counts = [(each.conversations, each.held_out, each.prompts) for each in found.sources]
    assert counts == [(30, 30, 14), (30, 2, 2)]


held_out_text = st.lists(
    st.tuples(st.sampled_from("ab"), st.integers(0, 40), st.integers(0, 2), st.integers(1, 9)),
    unique_by=lambda row: row[:3],
)


@given(text=held_out_text, number=st.integers(1, 5), random=st.randoms())
def test_the_draw_does_not_depend_on_the_order_of_rows(text, number, random):
    """The smallest hashes of each source are drawn, of all conversations that fit."""
    rows = [token_row(f"{name}:{n}#{turn}", answers=(start,)) for name, n, turn, start in text]
    found = held_out_prompts(rows, number, 6)
    fitting = {row.parent_id for row in rows if row.spans[0].start <= 6}
    assert len(found.kept) == min(number, len(fitting))
    for source in "ab":
        drawn = [p.id.partition("#")[0] for p in found.kept if p.category == source]
        in_order = sorted(filter(lambda id: id[0] == source, fitting), key=sha256)
        assert drawn == in_order[: len(drawn)]
    random.shuffle(rows)
    assert held_out_prompts(rows, number, 6) == found


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def test_few_prompts_are_of_different_questions_and_categories():
    prompts = []
    for number in range(16):
        for turn in range(2):
            prompts.append(Prompt(f"{number}/{turn}", [1], "ab"[number // 12], number))
    chosen = [prompts[index] for index in spread(prompts, 8)]
    assert len({prompt.question_id for prompt in chosen}) == 8
    assert Counter(prompt.category for prompt in chosen) == {"a": 6, "b": 2}
    assert chosen[:4] == [prompts[index] for index in spread(prompts, 4)]


def test_questions_are_drawn_from_every_category_in_order():
    messages = (Message("user", "why?"),)
    asked = [Conversation(f"q:{n}", messages, None, "abcd"[n // 10]) for n in range(40)]
    drawn = draw_questions(asked, 8)
    assert Counter(question.category for question in drawn) == dict.fromkeys("abcd", 2)
    assert drawn == [question for question in asked if question in drawn]


@pytest.fixture
def ask(tiny_target, tmp_path):
    def run(*questions: dict, **settings):
        path = tmp_path / "q.jsonl"
        write_lines(path, *questions)
        check = CheckConfig(prompts=path, **settings)
        spec = TargetSpec(str(tiny_target))
        return question_prompts(spec, read_questions(path), check, "transformers", 0)

    return run


def test_a_second_turn_follows_the_target_s_own_answer(ask, tiny_target, model):
    questions = [
        {"question_id": n, "category": "c", "turns": [f"why {n}?", "how?"]} for n in range(6)
    ]
    found = ask(*questions, max_new_tokens=16)
    tokenizer = AutoTokenizer.from_pretrained(tiny_target)
    settings = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": EOS, "pad_token_id": 1}

    def ids(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    expected, ended_early = [], 0
    for question in questions:
        first = ids(f"<|user|>{question['turns'][0]}</s><|assistant|>")
        written = model.generate(torch.tensor([first]), **settings)[0].tolist()
        ended = written[-1] in EOS
        ended_early += ended
        end = [] if ended else [1]
        second = [*written, *end, *ids("<|user|>how?</s><|assistant|>")]
        number = question["question_id"]
        expected += [(number, "c", first), (number, "c", second)]
    assert 0 < ended_early < 6, "both kinds of answers: those that end, and those that are cut"
    kept = [(p.question_id, p.category, p.ids) for p in found.kept]
    assert kept == expected and found.skipped == 0
    assert len({prompt.id for prompt in found.kept}) == 12


def test_a_looping_answer_does_not_end_the_questions(ask, monkeypatch):
    monkeypatch.setattr("pipeline.conversations.dialogue.degenerate_loop", lambda ids: True)
    found = ask({"turns": ["why?", "how?", "what?"]}, max_new_tokens=4)
    assert [prompt.id for prompt in found.kept] == ["q:0/0", "q:0/1", "q:0/2"]


def test_turns_that_do_not_fit_are_counted(ask):
    short, long = {"turns": ["why?", "how?"]}, {"turns": ["why?", "moon " * 150, "how?"]}
    found = ask(short, long, {"turns": ["moon " * 400]}, max_new_tokens=16)
    assert [prompt.id for prompt in found.kept] == ["q:0/0", "q:0/1", "q:1/0"]
    assert found.skipped == 3
    assert all(len(prompt.ids) <= 192 - 16 for prompt in found.kept)


@pytest.mark.parametrize(
    ("of_target", "of_check", "context"),
    [(64, None, 192), (64, 100, 100), (None, 100, 100), (64, 10_000, 192)],
)
def test_prompts_may_fill_the_context_or_the_check_s_limit(
    tiny_target, of_target, of_check, context
):
    spec = TargetSpec(str(tiny_target), max_tokens=of_target)
    assert context_length(with_room(spec, CheckConfig(max_tokens=of_check))) == context


def test_no_engine_starts_for_questions_of_one_turn(ask, tiny_target, monkeypatch):
    monkeypatch.setattr(prompts, "make_generation_engine", None)
    found = ask({"turns": ["why?"]}, {"turns": ["how?"]})
    assert len(found.kept) == 2 and found.skipped == 0
    spec = with_room_for(TargetSpec(str(tiny_target)), found.kept, 18, 3)
    assert spec.max_tokens == max(len(prompt.ids) for prompt in found.kept) + 18 + 2 * 3


def test_sampled_rules_ask_on_with_answers_of_their_nucleus(ask):
    questions = [{"turns": [f"why {n}?", "how?"]} for n in range(4)]
    rule = {"acceptance": "rejection", "temperature": 1.0, "max_new_tokens": 16}
    greedy, drawn = ask(*questions, max_new_tokens=16), ask(*questions, **rule)
    assert drawn == ask(*questions, **rule) != greedy
    first_turns = [[prompt.ids for prompt in each.kept[::2]] for each in (drawn, greedy)]
    assert first_turns[0] == first_turns[1]
    assert ask(*questions, **rule, top_p=1e-6) == greedy, (
        "a nucleus of one token is greedy decoding"
    )


def question(number: int, source_id: str | None) -> Conversation:
    return Conversation(f"q:{number}", (Message("user", "why?"),), source_id)


def test_question_ids_are_unique_and_integers_where_they_are_written_so():
    names = ["81", "001", "1", "٣", None, "b", "b"]
    ids = question_ids([question(n, name) for n, name in enumerate(names)])
    assert ids == [81, "001", 1, "٣", "q:4", "q:5", "q:6"]
