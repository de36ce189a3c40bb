"""Chat prompts: the chat template around the token ids that the model sampled."""

from __future__ import annotations

import pytest
from transformers import AutoTokenizer

from pipeline.conversations.conversation import RowRejected
from pipeline.conversations.row_builder import Chat
from pipeline.conversations.template import ChatTemplate


@pytest.fixture(scope="module")
def tokenizer(tiny_target):
    return AutoTokenizer.from_pretrained(tiny_target)


@pytest.fixture(scope="module")
def template(tokenizer) -> ChatTemplate:
    return ChatTemplate(tokenizer)


def rendered(tokenizer, *texts: str, system: str | None = None) -> list[int]:
    """The prompt of a question after earlier ones with their answers, by transformers."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    for number, text in enumerate(texts):
        messages.append({"role": ("user", "assistant")[number % 2], "content": text})
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


@pytest.mark.parametrize("ended", [True, False])
def test_a_second_question_follows_the_answer_as_in_the_template(ended, tokenizer, template):
    chat = Chat(template, room=100, system="be old")
    assert chat.ask("why") == (rendered(tokenizer, "why", system="be old"), False)
    ids = tokenizer("the moon")["input_ids"]
    chat.answered([*ids, tokenizer.eos_token_id] if ended else ids, ended=ended)
    expected = rendered(tokenizer, "why", "the moon", "how", system="be old")
    assert chat.ask("how") == (expected, False)


def test_a_full_context_forgets_all_but_the_system_message(tokenizer, template):
    alone = rendered(tokenizer, "how", system="be old")
    chat = Chat(template, room=len(alone) + 3, system="be old")
    chat.ask("why")
    chat.answered([tokenizer.eos_token_id], ended=True)
    assert chat.ask("how") == (alone, True)


@pytest.mark.parametrize(
    ("question", "detail"), [("stone " * 40, "limit is 30"), ("why \ud83d", "surrogate")]
)
def test_a_rejected_or_unanswered_question_changes_nothing(question, detail, tokenizer, template):
    chat = Chat(template, room=30)
    chat.ask("why")
    chat.answered([tokenizer.eos_token_id], ended=True)
    with pytest.raises(RowRejected, match=detail):
        chat.ask(question)
    chat.ask("old")
    chat.answered([], ended=False)
    assert chat.ask("how") == (rendered(tokenizer, "why", "", "how"), False)
