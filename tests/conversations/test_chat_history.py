"""A chat's prompts are what the chat template would write, around the very ids that the model
wrote.
"""

from __future__ import annotations

import pytest
from transformers import AutoTokenizer

from pipeline.conversations.conversation import RowRejected
from pipeline.conversations.row_builder import Chat
from pipeline.conversations.template import ChatTemplate


@pytest.fixture(scope="module")
def tokenizer(tiny_target):
    return AutoTokenizer.from_pretrained(tiny_target)


@pytest.fixture
def template(tokenizer) -> ChatTemplate:
    return ChatTemplate(tokenizer)


def rendered(tokenizer, *turns: tuple[str, str]) -> list[int]:
    """What transformers itself makes of these messages."""
    messages = [{"role": role, "content": text} for role, text in turns]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def test_a_second_question_follows_the_first_answer_as_the_template_has_it(tokenizer, template):
    chat = Chat(template, room=100, system="be old")
    turns = [("system", "be old"), ("user", "why")]
    assert chat.ask("why") == (rendered(tokenizer, *turns), False)
    chat.answered([*tokenizer("the moon")["input_ids"], tokenizer.eos_token_id], ended=True)
    turns += [("assistant", "the moon"), ("user", "how")]
    assert chat.ask("how") == (rendered(tokenizer, *turns), False)


def test_an_answer_that_was_cut_short_is_closed_by_the_template(tokenizer, template):
    chat = Chat(template, room=100)
    chat.ask("why")
    chat.answered(tokenizer("the moo")["input_ids"], ended=False)
    prompt, _ = chat.ask("how")
    assert prompt == rendered(tokenizer, ("user", "why"), ("assistant", "the moo"), ("user", "how"))


def test_a_question_without_an_answer_is_dropped(tokenizer, template):
    chat = Chat(template, room=100)
    chat.ask("why")
    chat.answered([], ended=False)
    assert chat.ask("how") == (rendered(tokenizer, ("user", "how")), False)


def test_a_full_context_forgets_the_earlier_turns_but_not_the_system_message(tokenizer, template):
    alone = rendered(tokenizer, ("system", "be old"), ("user", "how"))
    chat = Chat(template, room=len(alone) + 3, system="be old")
    chat.ask("why")
    chat.answered([tokenizer.eos_token_id], ended=True)
    assert chat.ask("how") == (alone, True)


def test_a_question_that_is_too_long_is_refused_and_changes_nothing(tokenizer, template):
    chat = Chat(template, room=30)
    chat.ask("why")
    chat.answered([tokenizer.eos_token_id], ended=True)
    with pytest.raises(RowRejected, match="room for 30"):
        chat.ask("stone " * 40)
    prompt, forgets = chat.ask("how")
    assert not forgets and prompt == rendered(
        tokenizer, ("user", "why"), ("assistant", ""), ("user", "how")
    )


def test_half_a_surrogate_pair_cannot_be_asked(tokenizer, template):
    chat = Chat(template, room=100)
    with pytest.raises(RowRejected, match="undecodable"):
        chat.ask("why \ud83d")
    assert chat.ask("how") == (rendered(tokenizer, ("user", "how")), False)
