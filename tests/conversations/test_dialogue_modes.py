"""Self-talk, passthrough, and templates that rewrite history."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeline.conversations.conversation import Conversation, Message, Reason, RowRejected
from pipeline.conversations.dialogue import Dialogue
from pipeline.conversations.requests import Sampling
from pipeline.conversations.template import ChatTemplate
from pipeline.errors import ConfigError
from tests.conversations.scripted_target import (
    LOOP,
    SEED,
    SETTINGS,
    answers,
    hold,
    only_row,
    written,
)

# Self-talk.


def test_self_talk_writes_both_roles_from_the_first_prompt_alone(chatml, tokenizer):
    dialogue = Dialogue(SEED, chatml, replace(SETTINGS, mode="self-talk", rounds=2))
    requests = hold(dialogue, tokenizer, "One.", "A question?", "Two.", "Never asked.")
    row = only_row(dialogue)
    assert len(requests) == 3
    assert [span.role for span in row.spans] == ["assistant", "user", "assistant"]
    assert written(row, tokenizer) == [
        *("One.<|im_end|>", "A question?<|im_end|>", "Two.<|im_end|>")
    ]
    assert tokenizer.decode(row.input_ids) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nHello?<|im_end|>\n<|im_start|>assistant\nOne.<|im_end|>\n"
        "<|im_start|>user\nA question?<|im_end|>\n<|im_start|>assistant\nTwo.<|im_end|>"
    )


def test_self_talk_supplies_the_end_of_a_truncated_user_text(chatml, tokenizer):
    dialogue = Dialogue(SEED, chatml, replace(SETTINGS, mode="self-talk", rounds=2))
    hold(dialogue, tokenizer, "One…", "A question…", "Two.")
    row = only_row(dialogue)
    one, question, two = row.spans
    assert (
        tokenizer.decode(row.input_ids[one.end : question.start])
        == "<|im_end|>\n<|im_start|>user\n"
    )
    assert (
        tokenizer.decode(row.input_ids[question.end : two.start])
        == "<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("text", ["", LOOP + "…"], ids=["empty", "loop"])
def test_self_talk_ends_with_its_last_answer_when_the_user_has_nothing_to_say(
    text, chatml, tokenizer
):
    dialogue = Dialogue(SEED, chatml, replace(SETTINGS, mode="self-talk"))
    assert len(hold(dialogue, tokenizer, "One.", text, "Never asked.")) == 2
    row = only_row(dialogue)
    assert [span.role for span in row.spans] == ["assistant"]
    assert row.messages[-1].content == "One."


def test_self_talk_without_rounds_ends_with_the_context(chatml, tokenizer):
    dialogue = Dialogue(SEED, chatml, replace(SETTINGS, mode="self-talk", max_tokens=100))
    requests = hold(dialogue, tokenizer, *["Fine, thank you."] * 50)
    row = only_row(dialogue)
    assert 3 < len(requests) < 50
    assert len(row.input_ids) <= 100
    assert row.messages[-1].role == "assistant"


def test_self_talk_needs_a_token_that_ends_a_user_text(templates, tokenizer):
    with pytest.raises(ConfigError, match="replay"):
        Dialogue(
            SEED, ChatTemplate(tokenizer, templates["vicuna"]), replace(SETTINGS, mode="self-talk")
        )


# Passthrough.


def test_passthrough_keeps_the_seeds_answers_and_asks_for_nothing(chatml, tokenizer):
    dialogue = Dialogue(SEED, chatml, replace(SETTINGS, mode="passthrough"))
    row = only_row(dialogue)
    assert answers(row) == ["Seed one.", "Seed two."]
    answered = [
        {"role": message.role, "content": message.content} for message in SEED.messages[:-1]
    ]
    expected = tokenizer.apply_chat_template(answered, chat_template=chatml._template)["input_ids"]
    assert row.input_ids == expected[: len(row.input_ids)]
    assert written(row, tokenizer) == [*("Seed one.<|im_end|>", "Seed two.<|im_end|>")]


def test_passthrough_refuses_a_seed_without_answers(chatml):
    dialogue = Dialogue(
        Conversation("q:0", (Message("user", "Hello?"),)),
        chatml,
        replace(SETTINGS, mode="passthrough"),
    )
    assert dialogue.next_request() is None
    with pytest.raises(RowRejected) as caught:
        dialogue.rows()
    assert caught.value.reason is Reason.NOTHING_GENERATED


def test_passthrough_is_cut_by_the_context_and_not_by_the_longest_answer(chatml):
    short = replace(SETTINGS, mode="passthrough", sampling=Sampling(max_new_tokens=1))
    assert answers(only_row(Dialogue(SEED, chatml, short))) == ["Seed one.", "Seed two."]
    whole = only_row(Dialogue(SEED, chatml, short))
    cut = only_row(Dialogue(SEED, chatml, replace(short, max_tokens=len(whole.input_ids) - 1)))
    assert (cut.finish, cut.input_ids) == (["stop", "length"], whole.input_ids[:-1])


def test_an_answer_that_nothing_ends_is_passed_through_whole(tokenizer):
    plain = (
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    row = only_row(
        Dialogue(SEED, ChatTemplate(tokenizer, plain), replace(SETTINGS, mode="passthrough"))
    )
    assert answers(row) == ["Seed one.", "Seed two."]


# Templates that rewrite history.


def test_a_rewritten_history_gives_one_row_per_turn_each_with_the_prompt_that_is_served(
    templates, tokenizer
):
    template = ChatTemplate(tokenizer, templates["forgetful"])
    dialogue = Dialogue(SEED, template, SETTINGS)
    answers = ["<think>\nHm.\n</think>\n\nOne.", "<think>\nOh.\n</think>\n\nTwo.", "Three."]
    hold(dialogue, tokenizer, *answers)
    assert dialogue.next_request() is None
    rows = dialogue.rows()
    assert [(row.id, row.parent_id, len(row.spans)) for row in rows] == [
        (f"seeds:7#{turn}", "seeds:7", 1) for turn in range(3)
    ]
    questions = [message.content for message in SEED.messages if message.role == "user"]
    for turn, row in enumerate(rows):
        history = [{"role": "system", "content": "Be brief."}]
        for question, answer in zip(questions[:turn], answers, strict=False):
            history += [
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer},
            ]
        history.append({"role": "user", "content": questions[turn]})
        served = tokenizer.apply_chat_template(
            history, chat_template=templates["forgetful"], add_generation_prompt=True
        )
        assert row.input_ids[: row.spans[0].start] == served["input_ids"]
        assert tokenizer.decode(row.input_ids[row.spans[0].start :]) == answers[turn] + "<|im_end|>"


def test_self_talk_goes_on_in_a_new_row_where_history_is_rewritten(templates, tokenizer):
    template = ChatTemplate(tokenizer, templates["forgetful"])
    dialogue = Dialogue(SEED, template, replace(SETTINGS, mode="self-talk", rounds=2))
    hold(dialogue, tokenizer, "<think>\nHm.\n</think>\n\nOne.", "A question?", "Two.")
    assert dialogue.next_request() is None
    first, second = dialogue.rows()
    assert tokenizer.decode(first.input_ids).endswith("<think>\nHm.\n</think>\n\nOne.<|im_end|>")
    assert tokenizer.decode(second.input_ids) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nHello?<|im_end|>\n<|im_start|>assistant\nOne.<|im_end|>\n"
        "<|im_start|>user\nA question?<|im_end|>\n<|im_start|>assistant\nTwo.<|im_end|>"
    )
    assert written(second, tokenizer) == ["Two.<|im_end|>"]


def test_a_history_that_is_not_rewritten_stays_one_row_under_its_own_id(templates, tokenizer):
    dialogue = Dialogue(SEED, ChatTemplate(tokenizer, templates["forgetful"]), SETTINGS)
    hold(dialogue, tokenizer, "One.", "Two.", "Three.")
    row = only_row(dialogue)
    assert (row.id, len(row.spans)) == ("seeds:7", 3)
