"""What is asked: one answer of each held-out row, and every turn of a question behind the target's
own answers.
"""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PretrainedConfig

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


def test_a_held_out_row_is_asked_for_one_of_its_answers_and_later_turns_come_up_too(
    generated, rows
):
    found = held_out_prompts(generated, 100, ROOM)
    assert [prompt.id for prompt in found.kept] == list(rows) and found.skipped == 0
    for prompt in found.kept:
        row = rows[prompt.id]
        assert prompt.ids == row["input_ids"][: row["spans"][prompt.turn]["start"]]
        assert prompt.category == "seeds"
    turns = [prompt.turn for prompt in found.kept if len(rows[prompt.id]["spans"]) > 1]
    assert 0 < sum(turns) < len(turns), "first and second turns, by the rows' ids"


def test_which_answer_depends_on_the_row_alone(generated):
    found = held_out_prompts(generated, 100, ROOM).kept
    assert held_out_prompts(generated, 2, ROOM).kept == found[:2]
    assert sorted(held_out_prompts(generated[::-1], 100, ROOM).kept, key=lambda p: p.id) == sorted(
        found, key=lambda p: p.id
    )


def test_an_earlier_turn_is_asked_where_the_later_one_does_not_fit_and_rows_without_any_are_counted(
    generated, rows
):
    starts = {name: [span["start"] for span in row["spans"]] for name, row in rows.items()}
    room = sorted(first for first, *_ in starts.values())[3]
    found = held_out_prompts(generated, 100, room)
    assert [prompt.id for prompt in found.kept] == [
        name for name, (first, *_) in starts.items() if first <= room
    ]
    assert all(len(prompt.ids) <= room for prompt in found.kept)
    assert len(found.kept) + found.skipped == len(rows)


def write(path, *questions: dict):
    path.write_text("".join(json.dumps(question) + "\n" for question in questions))
    return path


@pytest.fixture(scope="module")
def ask(tiny_target):
    def run(path, **settings):
        spec = TargetSpec(str(tiny_target))
        return question_prompts(
            spec, read_questions(path), CheckConfig(prompts=path, **settings), "transformers", 0
        )

    return run


@pytest.mark.parametrize("acceptance", ["greedy", "typical"], ids=["greedy", "first-token-greedy"])
def test_the_second_turn_s_prompt_holds_the_target_s_own_answer_to_the_first(
    ask, tmp_path, tiny_target, acceptance
):
    questions = [
        {"question_id": 80 + n, "category": f"c{n % 2}", "turns": [f"why {n}?", "how?"]}
        for n in range(6)
    ]
    rule = {"acceptance": acceptance} | ({"temperature": 0.7} if acceptance == "typical" else {})
    found = ask(write(tmp_path / "mt.jsonl", *questions), max_new_tokens=16, **rule)
    model = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(tiny_target)

    def ids(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    expected, ended_early = [], 0
    for question in questions:
        first = ids(f"<|user|>{question['turns'][0]}</s><|assistant|>")
        answer = model.generate(
            torch.tensor([first]),
            max_new_tokens=16,
            do_sample=False,
            eos_token_id=EOS,
            pad_token_id=1,
        )[0, len(first) :].tolist()
        ended_early += answer[-1] in EOS
        end = [] if answer[-1] in EOS else [1]
        second = [*first, *answer, *end, *ids("<|user|>how?</s><|assistant|>")]
        expected += [(question, 0, first), (question, 1, second)]
    assert 0 < ended_early < 6, "both kinds of answers: those that end, and those that are cut"
    assert [(p.question_id, p.category, p.turn, p.ids) for p in found.kept] == [
        (question["question_id"], question["category"], turn, prompt)
        for question, turn, prompt in expected
    ]
    assert len({prompt.id for prompt in found.kept}) == 12 and found.skipped == 0


@pytest.mark.parametrize("flaw", [True, False], ids=["a-loop", "no-text"])
def test_an_answer_that_nobody_would_learn_from_is_no_reason_to_ask_no_further(
    ask, tmp_path, monkeypatch, flaw
):
    from pipeline.conversations import dialogue

    monkeypatch.setattr(dialogue, "degenerate_loop", lambda ids: flaw)
    if not flaw:
        monkeypatch.setattr(dialogue.ChatTemplate, "decode", lambda self, ids: "")
    found = ask(write(tmp_path / "q.jsonl", {"turns": ["why?", "how?", "what?"]}), max_new_tokens=4)
    assert [prompt.turn for prompt in found.kept] == [0, 1, 2]


def test_turns_that_do_not_fit_are_counted(ask, tmp_path):
    short, long = {"turns": ["why?", "how?"]}, {"turns": ["why?", "moon " * 150, "how?"]}
    found = ask(
        write(tmp_path / "q.jsonl", short, long, {"turns": ["moon " * 400]}), max_new_tokens=16
    )
    assert [(prompt.id, prompt.turn) for prompt in found.kept] == [
        ("q:0/0", 0),
        ("q:0/1", 1),
        ("q:1/0", 0),
    ]
    assert found.skipped == 3
    assert all(len(prompt.ids) <= 192 - 16 for prompt in found.kept)


@pytest.mark.parametrize(
    ("of_target", "of_check", "context"),
    [(None, None, 192), (64, None, 192), (64, 100, 100), (None, 100, 100), (64, 10_000, 192)],
)
def test_a_prompt_may_fill_the_model_s_own_context_unless_the_check_says_less(
    tiny_target, of_target, of_check, context
):
    spec = TargetSpec(str(tiny_target), max_tokens=of_target)
    assert context_length(with_room(spec, CheckConfig(max_tokens=of_check))) == context


def test_a_model_that_does_not_say_its_context_has_the_target_s_limit(monkeypatch, tiny_target):
    monkeypatch.setattr("pipeline.targets.spec.model_config", lambda spec: PretrainedConfig())
    spec = TargetSpec(str(tiny_target), max_tokens=64)
    assert context_length(with_room(spec, CheckConfig())) == 64


def test_engines_are_given_the_context_that_the_questions_need_and_no_more(
    ask, tmp_path, monkeypatch
):
    given = []
    make = prompts.make_generation_engine
    monkeypatch.setattr(
        prompts,
        "make_generation_engine",
        lambda name, spec, *rest: (given.append(spec), make(name, spec, *rest))[1],
    )
    found = ask(
        write(tmp_path / "q.jsonl", {"turns": ["why?"]}, {"turns": ["why?", "how?"]}),
        max_new_tokens=16,
    )
    assert len(found.kept) == 3 and found.skipped == 0
    longest = max(len(prompt.ids) for prompt in found.kept)
    assert longest + 16 <= given[0].max_tokens < 192
    assert with_room_for(given[0], found.kept, 18, 3).max_tokens == longest + 18 + 2 * 3
    ask(write(tmp_path / "q.jsonl", {"turns": ["moon " * 400, "how?"]}), max_new_tokens=16)
    assert given[1].max_tokens == 192


def test_nobody_answers_a_last_question_and_no_engine_starts_for_questions_of_one_turn(
    ask, tmp_path, monkeypatch
):
    asked, make = [], prompts.make_generation_engine

    def counted(*arguments):
        engine = make(*arguments)
        add = engine.add
        engine.add = lambda request: (asked.append(request.prompt_ids), add(request))[1]
        return engine

    monkeypatch.setattr(prompts, "make_generation_engine", counted)
    found = ask(
        write(tmp_path / "q.jsonl", {"turns": ["why?"]}, {"turns": ["why?", "how?", "what?"]})
    )
    assert asked == [prompt.ids for prompt in found.kept[1:3]] and len(found.kept) == 4
    monkeypatch.setattr(prompts, "make_generation_engine", None)
    alone = ask(write(tmp_path / "q.jsonl", {"turns": ["why?"]}, {"turns": ["how?"]}))
    assert [prompt.ids for prompt in alone.kept][:1] == [found.kept[0].ids] and len(alone.kept) == 2


def test_sampled_rules_ask_on_with_sampled_answers(ask, tmp_path):
    path = write(tmp_path / "q.jsonl", *({"turns": [f"why {n}?", "how?"]} for n in range(4)))
    rejection = {"acceptance": "rejection", "temperature": 1.0, "max_new_tokens": 16}
    greedy, drawn, again = (
        ask(path, max_new_tokens=16),
        ask(path, **rejection),
        ask(path, **rejection),
    )
    assert drawn == again != greedy
    assert [p.ids for p in drawn.kept[::2]] == [p.ids for p in greedy.kept[::2]], (
        "first turns are the questions alone"
    )


def test_question_ids_are_the_file_s_own_unless_it_has_none_or_repeats_them():
    def question(number: int, source_id: str | None) -> Conversation:
        return Conversation(f"q:{number}", (Message("user", "why?"),), source_id)

    ids = question_ids([question(n, name) for n, name in enumerate(["81", "a", None, "b", "b"])])
    assert ids == [81, "a", "q:2", "q:3", "q:4"]


def test_earlier_answers_are_drawn_from_the_rule_s_nucleus(ask, tmp_path):
    """A nucleus of one token is greedy decoding."""
    path = write(tmp_path / "q.jsonl", *({"turns": [f"why {n}?", "how?"]} for n in range(4)))
    narrow = ask(path, acceptance="rejection", temperature=1.0, top_p=1e-6, max_new_tokens=16)
    assert narrow == ask(path, max_new_tokens=16)
