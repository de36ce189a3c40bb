"""Token ids around sampled texts, against transformers' own rendering of the whole conversation.

The reference is always `tokenizer.apply_chat_template` over all messages at once; the template
under test never sees the answers before they are "sampled" out of that reference.
"""

from __future__ import annotations

import pytest

from pipeline.conversations.conversation import Message, RowRejected
from pipeline.conversations.template import ChatTemplate
from pipeline.errors import ConfigError

END_OF_TURN = {
    "zephyr": "</s>",
    "chatml": "<|im_end|>",
    "llama-3": "<|eot_id|>",
    "llama-2": "</s>",
    "vicuna": "</s>",
}
CHAT = [
    Message("system", "You are a small model."),
    Message("user", "Hello there, who are you?"),
    Message("assistant", "I am a small model.\nThank you!"),
    Message("user", "Tell me about the moon: 你好"),
    Message("assistant", "今天 the moon."),
    Message("user", "A cat? "),
    Message("assistant", "Fine."),
]

every_family = pytest.mark.parametrize("family", END_OF_TURN)
every_kind = pytest.mark.parametrize("kind", ["byte-level", "metaspace", "legacy"])
both_systems = pytest.mark.parametrize("chat", [CHAT, CHAT[1:]], ids=["system", "no-system"])


def reference(tokenizer, template, messages, asks=False):
    """The whole conversation by transformers: its text and its ids."""
    dicts = [{"role": message.role, "content": message.content} for message in messages]
    options = {"chat_template": template, "add_generation_prompt": asks}
    text = tokenizer.apply_chat_template(dicts, tokenize=False, **options)
    return text, tokenizer.apply_chat_template(dicts, tokenize=True, **options)["input_ids"]


def up_to(ids, start, end_id):
    return ids[start : ids.index(end_id, start) + 1]


@both_systems
@every_kind
@every_family
def test_prompts_and_answers_add_up_to_the_ids_of_transformers(
    family, kind, chat, tokenizers, templates
):
    """Sampled answers and recited ones alike."""
    tokenizer = tokenizers[kind]
    template = ChatTemplate(tokenizer, templates[family])
    assert tokenizer.convert_ids_to_tokens(template.end_ids["assistant"]) == [END_OF_TURN[family]]
    (end_id,) = template.end_ids["assistant"]
    _, expected = reference(tokenizer, templates[family], chat)
    first = [message.role for message in chat].index("user") + 1
    ids = template.opening(chat[:first])
    for asked in range(first, len(chat), 2):
        assert ids == expected[: len(ids)]
        answer = up_to(expected, len(ids), end_id)
        assert template.recite(chat[:asked], chat[asked].content) == answer
        ids = ids + answer
        if asked + 1 < len(chat):
            question = chat[asked + 1 : asked + 2]
            ids = ids + template.continuation(chat[: asked + 1], question, "assistant", end_id)
    assert ids == expected[: len(ids)]
    assert tokenizer.decode(expected[len(ids) :]).strip() == ""


@every_family
def test_a_truncated_answer_is_followed_by_the_end_of_turn(family, tokenizer, templates):
    template = ChatTemplate(tokenizer, templates[family])
    cut = [*CHAT[:2], Message("assistant", "I am a sm"), CHAT[3]]
    text = " I am a sm" if family in ("llama-2", "vicuna") else "I am a sm"
    ids = template.opening(cut[:2]) + tokenizer(text, add_special_tokens=False)["input_ids"]
    ids += template.continuation(cut[:3], cut[3:], "assistant", None)
    assert tokenizer.decode(ids) == reference(tokenizer, templates[family], cut, asks=True)[0]


@every_kind
@pytest.mark.parametrize("family", ["zephyr", "chatml", "llama-3", "spaced"])
def test_headers_and_footers_give_the_ids_of_transformers(family, kind, tokenizers, templates):
    tokenizer = tokenizers[kind]
    template = ChatTemplate(tokenizer, templates[family])
    (end_id,) = template.end_ids["assistant"]
    _, expected = reference(tokenizer, templates[family], CHAT)
    ids = template.opening(CHAT[:2])
    ids = ids + up_to(expected, len(ids), end_id)
    ids = ids + template.continuation(CHAT[:3], (), "user", end_id)
    assert ids == expected[: len(ids)]
    ids = ids + up_to(expected, len(ids), end_id)
    ids = ids + template.continuation(CHAT[:4], (), "assistant", end_id)
    assert ids == expected[: len(ids)]
    assert tokenizer.decode(up_to(expected, len(ids), end_id)).strip().startswith("今天")


def test_user_turns_ended_by_text_have_no_end_token(tokenizer, templates):
    for family in ("llama-2", "vicuna"):
        assert ChatTemplate(tokenizer, templates[family]).end_ids["user"] == ()


def test_a_recited_last_answer_ends_where_the_template_ends_others(tokenizer, templates):
    ended = "'<|im_end|>' + '\n'"
    open_end = templates["chatml"].replace(ended, "('' if loop.last else '<|im_end|>\n')")
    assert open_end != templates["chatml"]
    ids = ChatTemplate(tokenizer, open_end).recite(CHAT[:2], "Fine.")
    assert tokenizer.decode(ids) == "Fine.<|im_end|>"


def test_a_template_that_forgets_thoughts_rewrites_history_only_there(tokenizer, templates):
    template = ChatTemplate(tokenizer, templates["forgetful"])
    thought = Message("assistant", "<think>\nThe moon?\n</think>\n\nHello.")
    assert template.continuation(CHAT[:3], CHAT[3:4], "assistant", None)
    assert template.continuation([*CHAT[:2], thought], CHAT[3:4], "assistant", None) is None


@pytest.mark.parametrize("template", [None, "{% for message in %}", "{{ 'always the same' }}"])
def test_a_template_without_a_conversation_is_a_configuration_error(template, tokenizer):
    with pytest.raises(ConfigError, match=r"target\.chat_template"):
        ChatTemplate(tokenizer, template)


def test_a_template_that_raises_rejects_the_row_or_the_target(tokenizer, templates):
    endless = "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}"
    with pytest.raises(ConfigError, match="recursion"):
        ChatTemplate(tokenizer, endless)
    at_one = "{% if messages[0].content == 'odd' %}" + endless + "{% endif %}"
    template = ChatTemplate(tokenizer, at_one + templates["chatml"])
    with pytest.raises(RowRejected, match="recursion"):
        template.render([Message("user", "odd")], asks=True)
    assert template.render([Message("user", "even")], asks=True)
