"""Token ids around sampled texts, against transformers' own rendering and tokenization of the whole
conversation.

The reference is always `tokenizer.apply_chat_template` over all messages at once; the template
under test never sees the answers before they are "sampled" out of that reference.
"""

from __future__ import annotations

import copy
import datetime
import itertools

import pytest

from pipeline.conversations.conversation import Message, Reason, RowRejected
from pipeline.conversations.template import ChatTemplate
from pipeline.errors import ConfigError

FAMILIES = ["zephyr", "chatml", "llama-3", "llama-2", "vicuna"]
KINDS = ["byte-level", "metaspace", "legacy"]
END_OF_TURN = {
    "zephyr": "</s>",
    "chatml": "<|im_end|>",
    "llama-3": "<|eot_id|>",
    "llama-2": "</s>",
    "vicuna": "</s>",
}
END_OF_TURN["spaced"] = "</s>"

CHAT = [
    Message("system", "You are a small model."),
    Message("user", "Hello there, who are you?"),
    Message("assistant", "I am a small model.\nThank you!"),
    Message("user", "Tell me about the moon: 你好"),
    Message("assistant", "今天 the moon."),
    Message("user", "A cat? "),
    Message("assistant", "Fine."),
]

every_family = pytest.mark.parametrize("family", FAMILIES)
every_kind = pytest.mark.parametrize("kind", KINDS)
both_systems = pytest.mark.parametrize("chat", [CHAT, CHAT[1:]], ids=["system", "no-system"])


def reference(tokenizer, template, messages, asks=False):
    """What transformers makes of the whole conversation: its text and its ids."""
    dicts = [{"role": message.role, "content": message.content} for message in messages]
    options = {"chat_template": template, "add_generation_prompt": asks}
    text = tokenizer.apply_chat_template(dicts, tokenize=False, **options)
    return text, tokenizer.apply_chat_template(dicts, tokenize=True, **options)["input_ids"]


def up_to(ids, start, end_id):
    return ids[start : ids.index(end_id, start) + 1]


@both_systems
@every_kind
@every_family
def test_prompts_and_sampled_answers_add_up_to_the_ids_that_transformers_gives(
    family, kind, chat, tokenizers, templates
):
    tokenizer, template = tokenizers[kind], templates[family]
    chat_template = ChatTemplate(tokenizer, template)
    end_id = tokenizer.convert_tokens_to_ids(END_OF_TURN[family])
    _, expected = reference(tokenizer, template, chat)
    first = [message.role for message in chat].index("user") + 1
    ids = chat_template.opening(chat[:first])
    for asked in itertools.count(first, 2):
        assert ids == expected[: len(ids)]
        ids = ids + up_to(expected, len(ids), end_id)
        if asked + 1 == len(chat):
            break
        ids = ids + chat_template.separator(chat[:asked], True, chat[asked + 1])
    assert ids == expected[: len(ids)]
    assert tokenizer.decode(expected[len(ids) :]).strip() == ""


@every_family
def test_a_truncated_answer_is_followed_by_the_end_of_turn_that_the_template_writes(
    family, tokenizer, templates
):
    template = templates[family]
    chat_template = ChatTemplate(tokenizer, template)
    cut = [*CHAT[:2], Message("assistant", "I am a sm"), CHAT[3]]
    sampled = tokenizer(
        " I am a sm" if family in ("llama-2", "vicuna") else "I am a sm", add_special_tokens=False
    )
    ids = (
        chat_template.opening(cut[:2])
        + sampled["input_ids"]
        + chat_template.separator(cut[:2], False, cut[3])
    )
    text, _ = reference(tokenizer, template, cut, asks=True)
    assert tokenizer.decode(ids) == text


@every_kind
@every_family
def test_the_end_of_turn_is_the_token_after_an_answer(family, kind, tokenizers, templates):
    found = ChatTemplate(tokenizers[kind], templates[family]).end_of_turn_ids
    assert tokenizers[kind].convert_ids_to_tokens(found) == [END_OF_TURN[family]]


@every_kind
@pytest.mark.parametrize("family", ["zephyr", "chatml", "llama-3", "spaced"])
def test_role_headers_let_the_target_write_both_sides_as_transformers_would_render_them(
    family, kind, tokenizers, templates
):
    tokenizer, template = tokenizers[kind], templates[family]
    chat_template = ChatTemplate(tokenizer, template)
    end_id = tokenizer.convert_tokens_to_ids(END_OF_TURN[family])
    _, expected = reference(tokenizer, template, CHAT)
    ids = chat_template.opening(CHAT[:2])
    ids = ids + up_to(expected, len(ids), end_id)
    ids = ids + chat_template.role_header(CHAT[:2], True)
    assert ids == expected[: len(ids)]
    ids = ids + up_to(expected, len(ids), end_id)
    ids = ids + chat_template.role_footer(CHAT[:3], True)
    assert ids == expected[: len(ids)]
    assert tokenizer.decode(up_to(expected, len(ids), end_id)).strip().startswith("今天")


@pytest.mark.parametrize("family", ["llama-2", "vicuna"])
def test_a_user_text_that_only_text_ends_has_no_end_token(family, tokenizer, templates):
    assert ChatTemplate(tokenizer, templates[family]).end_of_user_ids == ()


def test_a_mark_behind_text_is_no_end_of_a_user_text(tokenizer, templates):
    marked_later = templates["llama-2"].replace("' [/INST]'", "' [/INST]<|im_start|>'")
    assert ChatTemplate(tokenizer, marked_later).end_of_user_ids == ()


def test_a_line_break_that_is_a_token_of_its_own_ends_no_turn(tokenizer, templates):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_tokens(["\n"])
    broken_line = templates["chatml"].replace("'<|im_end|>'", "'\\n<|im_end|>'")
    found = ChatTemplate(tokenizer, broken_line).end_of_turn_ids
    assert tokenizer.convert_ids_to_tokens(found) == ["<|im_end|>"]


def test_a_recited_last_answer_ends_even_if_the_template_ends_only_the_others(tokenizer, templates):
    open_end = templates["chatml"].replace(
        "'<|im_end|>' + '\n'", "('' if loop.last else '<|im_end|>\n')"
    )
    assert open_end != templates["chatml"]
    ids = ChatTemplate(tokenizer, open_end).recite(CHAT[:2], "Fine.")
    assert tokenizer.decode(ids) == "Fine.<|im_end|>"


@both_systems
@every_kind
@every_family
def test_a_recited_conversation_is_the_one_that_transformers_renders(
    family, kind, chat, tokenizers, templates
):
    tokenizer, template = tokenizers[kind], templates[family]
    chat_template = ChatTemplate(tokenizer, template)
    first = [message.role for message in chat].index("user") + 1
    ids = chat_template.opening(chat[:first])
    for asked in range(first, len(chat), 2):
        ids = ids + chat_template.recite(chat[:asked], chat[asked].content)
        if asked + 1 < len(chat):
            ids = ids + chat_template.separator(chat[:asked], True, chat[asked + 1])
    _, expected = reference(tokenizer, template, chat)
    assert ids == expected[: len(ids)]
    assert tokenizer.decode(expected[len(ids) :]).strip() == ""


@pytest.mark.parametrize("family", ["llama-3", "llama-2", "vicuna"])
def test_bos_stands_where_the_template_has_it_and_is_never_doubled(family, tokenizers, templates):
    for kind, tokenizer in tokenizers.items():
        assert tokenizer("x")["input_ids"][0] == tokenizer.bos_token_id, (
            "the tokenizer itself adds one"
        )
        ids = ChatTemplate(tokenizer, templates[family]).opening(CHAT[:2])
        assert (ids[0], ids.count(tokenizer.bos_token_id)) == (tokenizer.bos_token_id, 1), kind


@every_family
def test_an_ordinary_template_never_rewrites_history(family, tokenizer, templates):
    chat_template = ChatTemplate(tokenizer, templates[family])
    assert not any(
        chat_template.rewrites_history(CHAT[: end - 1], CHAT[end - 1 : end]) for end in (4, 6)
    )


def test_a_template_that_forgets_thoughts_rewrites_history_only_where_there_are_thoughts(
    tokenizer, templates
):
    chat_template = ChatTemplate(tokenizer, templates["forgetful"])
    thought = Message("assistant", "<think>\nThe moon?\n</think>\n\nHello.")
    assert not chat_template.rewrites_history(CHAT[:3], CHAT[3:4])
    assert chat_template.rewrites_history([*CHAT[:2], thought], [CHAT[3]])


def test_a_template_that_forgets_a_thought_two_turns_later_rewrites_history_then(
    tokenizer, templates
):
    forgets_late = templates["chatml"].replace(
        "message['content']",
        "(message['content'] if loop.revindex < 4 else message['content'].split('!')[-1])",
    )
    chat_template = ChatTemplate(tokenizer, forgets_late)
    chat = [
        Message("user", "A"),
        Message("assistant", "Oh! B"),
        Message("user", "C"),
        Message("assistant", "D"),
    ]
    assert not chat_template.rewrites_history(chat[:2], chat[2:3])
    assert chat_template.rewrites_history(chat, [Message("user", "E")])


def test_a_system_prompt_that_the_template_refuses_refuses_the_row_with_the_templates_own_words(
    tokenizer, templates
):
    with pytest.raises(RowRejected, match="System role not supported") as caught:
        ChatTemplate(tokenizer, templates["without-system"]).opening(CHAT[:2])
    assert caught.value.reason is Reason.TEMPLATE_REFUSED


def test_a_message_that_says_what_stands_in_for_messages_changes_nothing(tokenizer, templates):
    chat_template = ChatTemplate(tokenizer, templates["chatml"])
    odd = [
        Message("user", "Placeholder PlaceholderX"),
        Message("assistant", "PlaceholderXX"),
        Message("user", "Placeholder"),
    ]
    ids = chat_template.opening(odd[:1]) + chat_template.recite(odd[:1], odd[1].content)
    ids += chat_template.separator(odd[:1], True, odd[2])
    assert ids == reference(tokenizer, templates["chatml"], odd, asks=True)[1]


def test_no_template_anywhere_is_a_configuration_error_that_names_the_key(tokenizer):
    with pytest.raises(ConfigError, match=r"no chat template.*target\.chat_template"):
        ChatTemplate(tokenizer)


@pytest.mark.parametrize(
    "broken", ["{% for message in %}", "{{ 'always the same' }}", "{{ raise_exception('never') }}"]
)
def test_a_template_that_renders_no_conversation_is_a_configuration_error(broken, tokenizer):
    with pytest.raises(ConfigError, match=r"target\.chat_template"):
        ChatTemplate(tokenizer, broken)


@pytest.mark.parametrize(
    ("sum_or_loop", "said"),
    [
        ("{{ 1 // 0 }}", "by zero"),
        ("{{ 'abc' | dictsort }}", "items"),
        ("{{ 'a' * 10**15 }}", "MemoryError"),
        ("{{ 2.0 ** 5000 }}", "out of range"),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "recursion"),
    ],
)
def test_a_template_that_cannot_calculate_refuses_the_row_and_a_target_that_has_it(
    sum_or_loop, said, tokenizer, templates
):
    with pytest.raises(ConfigError, match=said):
        ChatTemplate(tokenizer, sum_or_loop)
    at_one = (
        "{% if messages[0].content == 'odd' %}" + sum_or_loop + "{% endif %}" + templates["chatml"]
    )
    template = ChatTemplate(tokenizer, at_one)
    with pytest.raises(RowRejected, match=said):
        template.render([Message("user", "odd")], asks=True)
    assert template.render([Message("user", "even")], asks=True)


def test_a_template_that_does_not_end_is_stopped_and_refused(tokenizer, monkeypatch):
    monkeypatch.setattr("pipeline.conversations.template.PATIENCE", 0.1)
    loop = "{% for i in range(50000) %}{% for j in range(50000) %}{% endfor %}{% endfor %}"
    with pytest.raises(ConfigError, match="takes more than"):
        ChatTemplate(tokenizer, loop)


def test_the_tokenizers_own_template_serves_and_the_argument_goes_before_it(
    tokenizer, templates, monkeypatch
):
    monkeypatch.setattr(tokenizer, "chat_template", templates["zephyr"])
    assert tokenizer.convert_ids_to_tokens(ChatTemplate(tokenizer).end_of_turn_ids) == ["</s>"]
    own = ChatTemplate(tokenizer, templates["chatml"])
    assert tokenizer.convert_ids_to_tokens(own.end_of_turn_ids) == ["<|im_end|>"]


def test_a_template_that_asks_for_the_date_is_told_the_one_that_it_is_given(tokenizer, templates):
    """As Llama 3's: `strftime_now` is transformers' own function of today."""
    dated = (
        "{{ strftime_now('%d %b %Y') if strftime_now is defined else 'undated' }} "
        + templates["chatml"]
    )
    text = ChatTemplate(tokenizer, dated, datetime.date(2024, 2, 29)).render(CHAT[:2], asks=True)
    assert text.startswith("29 Feb 2024 ")
    today = ChatTemplate(tokenizer, dated).render(CHAT[:2], asks=True)
    assert today.startswith(datetime.date.today().strftime("%d %b %Y"))
