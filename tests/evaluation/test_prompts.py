"""Prompts: one of each held-out row, and every turn of a question after the target's answers."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoTokenizer, PretrainedConfig

from pipeline.artifacts.generated_rows import read_token_rows
from pipeline.config import CheckConfig
from pipeline.conversations.conversation import Conversation, Message
from pipeline.conversations.sources import read_questions
from pipeline.evaluation import prompts
from pipeline.evaluation.prompts import (
    held_out_prompts,
    question_ids,
    question_prompts,
    with_room,
    with_room_for,
)
from pipeline.storage.shards import read_rows
from pipeline.targets.spec import TargetSpec, context_length
from tests.flows.tiny import write_lines

EOS = [1, *range(100, 108)]
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


def test_a_held_out_row_gives_one_prompt(generated, rows):
    found = held_out_prompts(generated, 100, ROOM)
    assert [prompt.id for prompt in found.kept] == list(rows) and found.skipped == 0
    turns = []
    for prompt in found.kept:
        row = rows[prompt.id]
        starts = [span["start"] for span in row["spans"]]
        assert prompt.ids == row["input_ids"][: len(prompt.ids)] and prompt.category == "seeds"
        turns.append(starts.index(len(prompt.ids)))
    assert set(turns) == {0, 1}, "first and second turns, by the rows' ids"
    assert held_out_prompts(generated, 2, ROOM).kept == found.kept[:2]


def test_an_earlier_turn_is_asked_where_no_later_one_fits(generated, rows):
    firsts = sorted(row["spans"][0]["start"] for row in rows.values())
    found = held_out_prompts(generated, 100, firsts[3])
    assert len(found.kept) == sum(first <= firsts[3] for first in firsts)
    assert all(len(prompt.ids) <= firsts[3] for prompt in found.kept)
    assert len(found.kept) + found.skipped == len(rows)


@pytest.fixture
def ask(tiny_target, tmp_path):
    def run(*questions: dict, **settings):
        path = tmp_path / "q.jsonl"
        write_lines(path, *questions)
        check = CheckConfig(prompts=path, **settings)
        spec = TargetSpec(str(tiny_target))
        return question_prompts(spec, read_questions(path), check, "transformers", 0)

    return run


@pytest.mark.parametrize("rule", [{}, {"acceptance": "typical", "temperature": 0.7}])
def test_a_second_turn_follows_the_target_s_own_answer(ask, tiny_target, model, rule):
    """Also by typical acceptance with a greedy first token, which is deterministic."""
    questions = [
        {"question_id": n, "category": "c", "turns": [f"why {n}?", "how?"]} for n in range(6)
    ]
    found = ask(*questions, max_new_tokens=16, **rule)
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


def test_a_model_without_context_has_the_target_s_limit(monkeypatch, tiny_target):
    monkeypatch.setattr("pipeline.targets.spec.model_config", lambda spec: PretrainedConfig())
    spec = TargetSpec(str(tiny_target), max_tokens=64)
    assert context_length(with_room(spec, CheckConfig())) == 64


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


def test_ids_with_leading_zeros_stay_different():
    names = ["001", "1", "007", "٣"]
    ids = question_ids([question(n, name) for n, name in enumerate(names)])
    assert ids == ["001", 1, "007", "٣"]


def test_missing_and_repeated_question_ids_are_replaced():
    ids = question_ids([question(n, name) for n, name in enumerate(["81", "a", None, "b", "b"])])
    assert ids == [81, "a", "q:2", "q:3", "q:4"]
