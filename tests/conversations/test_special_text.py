"""Special tokens in a seed's text are text, unless they are to be kept."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from pipeline.conversations.conversation import Message, RowRejected
from pipeline.conversations.template import ChatTemplate
from tests.conversations.conftest import SPECIAL
from tests.conversations.scripted_target import ids_of

FAMILIES = ["zephyr", "chatml", "llama-3", "llama-2", "vicuna", "forgetful"]
PIECES = [*SPECIAL[1:], "</", "s>", "<|", "im_end|>", "Hello", " ", "\n", "你好", "."]
PIECES += ["\ufdd1", "\ufdd10\ufdd1", "<s</s>>"]
ROLES = ("system", "user", "assistant", "user", "assistant")

texts = st.lists(st.sampled_from(PIECES), min_size=1, max_size=6).map("".join)
chats = st.lists(texts, min_size=3, max_size=5).map(
    lambda said: [
        Message(*turn) for turn in zip(ROLES, [f"a{text}b" for text in said], strict=False)
    ]
)


@pytest.mark.parametrize("kind", ["byte-level", "metaspace", "legacy"])
@pytest.mark.parametrize("family", FAMILIES)
def test_no_token_of_a_seed_s_text_is_special(family, kind, tokenizers, templates):
    """The special tokens are those of the same conversation with harmless texts."""
    tokenizer = tokenizers[kind]
    template = ChatTemplate(tokenizer, templates[family])
    special = {*tokenizer.all_special_ids, *range(1, len(SPECIAL))}
    special.remove(tokenizer.unk_token_id)  # text without a token of its own is that one

    def control(messages) -> list[list[int]]:
        asked = messages[: 4 if len(messages) > 3 else 2]
        answered = [*asked, Message("assistant", messages[-1].content)]
        parts = [
            template.opening(asked),
            template.continuation(answered, messages[1:2], "assistant", None),
            template.recite(asked[:2], messages[-1].content),
        ]
        return [[id for id in ids if id in special] for ids in parts]

    @settings(max_examples=20)
    @given(chats)
    def holds(messages):
        harmless = [replace(message, content="aHellob") for message in messages]
        assert control(messages) == control(harmless)

    holds()


@settings(max_examples=50)
@given(chats, st.sampled_from(FAMILIES))
def test_the_target_reads_the_text_that_the_template_writes(tokenizer, templates, messages, family):
    clean = []
    for message in messages[:2]:
        content = message.content.replace("\ufdd1", "\ufffd")
        clean.append({"role": message.role, "content": content})
    text = tokenizer.apply_chat_template(
        clean, chat_template=templates[family], add_generation_prompt=True, tokenize=False
    )
    opening = ChatTemplate(tokenizer, templates[family]).opening(messages[:2])
    assert tokenizer.decode(opening) == text


@pytest.mark.parametrize("kind", ["byte-level", "metaspace", "legacy"])
def test_other_text_and_kept_tokens_are_tokenized_as_ever(kind, tokenizers, templates):
    tokenizer = tokenizers[kind]
    template = ChatTemplate(tokenizer, templates["chatml"])
    keeping = template.variant(escapes=False)
    for text, read_by in (("Hello </ s> there", template), ("Hello</s> there", keeping)):
        messages = [Message("user", text)]
        assert read_by.opening(messages) == ids_of(read_by.render(messages, asks=True), tokenizer)


def test_a_special_token_of_one_character_cannot_be_text(tokenizer, templates):
    odd = copy.deepcopy(tokenizer)
    odd.add_special_tokens({"additional_special_tokens": ["☃"]})
    with pytest.raises(RowRejected, match="☃"):
        ChatTemplate(odd, templates["chatml"]).opening([Message("user", "a ☃ man")])


def test_ordinary_added_tokens_stay_tokens(tokenizer, templates):
    """Engines read `<think>`, of Qwen, as the same token whoever writes it."""
    thinking = copy.deepcopy(tokenizer)
    thinking.add_tokens([AddedToken("<think>", special=False)])
    template = ChatTemplate(thinking, templates["chatml"])
    ids = template.opening([Message("user", "write <think> now")])
    assert thinking.convert_tokens_to_ids("<think>") in ids
