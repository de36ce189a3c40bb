"""What a seed says is never a control token, unless that is wanted, and the target reads the same
text.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from pipeline.conversations.conversation import Conversation, Message, Reason, RowRejected
from pipeline.conversations.dialogue import Dialogue
from pipeline.conversations.template import ChatTemplate
from tests.conversations.conftest import SPECIAL
from tests.conversations.scripted_target import SETTINGS, hold, ids_of, only_row

KINDS = ["byte-level", "metaspace", "legacy"]
FAMILIES = ["zephyr", "chatml", "llama-3", "llama-2", "vicuna", "forgetful"]
PIECES = [
    *SPECIAL[1:],
    "</",
    "s>",
    "<|",
    "im_end|>",
    "Hello",
    " ",
    "\n",
    "你好",
    ".",
    "\ufdd1",
    "\ufdd10\ufdd1",
    "<s</s>>",
]

texts = st.lists(st.sampled_from(PIECES), min_size=1, max_size=6).map(
    lambda pieces: "a" + "".join(pieces) + "b"
)
chats = st.lists(texts, min_size=3, max_size=5).map(
    lambda said: (
        [Message("system", said[0])]
        + [Message(("user", "assistant")[index % 2], text) for index, text in enumerate(said[1:])]
    )
)


def control(ids: list[int], tokenizer) -> list[int]:
    """The ids that are special, the unknown token's aside: text without a token of its own is that
    one.
    """
    return [
        id
        for id in ids
        if id in set(tokenizer.all_special_ids) | set(ADDED) and id != tokenizer.unk_token_id
    ]


ADDED = range(1, len(SPECIAL))


def harmless(messages: list[Message]) -> list[Message]:
    return [replace(message, content="aHellob") for message in messages]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_no_token_of_what_a_seed_says_is_special(family, kind, tokenizers, templates):
    """The special tokens are those of the same conversation with harmless texts, in opening,
    separator and answer.
    """
    tokenizer = tokenizers[kind]
    template = ChatTemplate(tokenizer, templates[family])

    @settings(max_examples=20)
    @given(chats)
    def holds(messages):
        asked = messages[: 2 + 2 * (len(messages) > 3)]
        plain = harmless(messages)
        ids = template.opening(asked)
        assert control(ids, tokenizer) == control(template.opening(plain[: len(asked)]), tokenizer)
        more = template.separator(asked, True, messages[1])
        assert control(more, tokenizer) == control(
            template.separator(plain[: len(asked)], True, plain[1]), tokenizer
        )
        own = template.recite(asked[:2], messages[-1].content)
        assert control(own, tokenizer) == control(template.recite(plain[:2], "aHellob"), tokenizer)

    holds()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_target_reads_the_very_text_that_the_template_writes(family, tokenizer, templates):
    template = ChatTemplate(tokenizer, templates[family])

    @settings(max_examples=20)
    @given(chats)
    def holds(messages):
        text = template.render(messages[:2], asks=True)
        assert tokenizer.decode(template.opening(messages[:2])) == text
        contents = [message.content.replace("\ufdd1", "\ufffd") for message in messages[:2]]
        assert all(content in text for content in contents)

    holds()


@pytest.mark.parametrize("kind", KINDS)
def test_text_without_special_tokens_and_all_text_with_keep_is_tokenized_as_ever(
    kind, tokenizers, templates
):
    tokenizer = tokenizers[kind]
    template = ChatTemplate(tokenizer, templates["chatml"])
    for text, read_by in (
        ("Hello </ s> there", template),
        ("Hello</s> there", template.keeping_special_tokens()),
    ):
        messages = [Message("user", text)]
        assert read_by.opening(messages) == ids_of(template.render(messages, asks=True), tokenizer)
    assert template.special_tokens_in([Message("user", "</s><s></s>")]) == ["</s>", "<s>"]


def test_a_special_token_of_one_character_cannot_be_written_as_text(tokenizer, templates):
    odd = copy.deepcopy(tokenizer)
    odd.add_special_tokens({"additional_special_tokens": [AddedToken("☃", special=True)]})
    with pytest.raises(RowRejected, match="☃") as caught:
        ChatTemplate(odd, templates["chatml"]).opening([Message("user", "a ☃ man")])
    assert caught.value.reason is Reason.SPECIAL_TOKENS


def test_added_tokens_that_the_tokenizer_calls_ordinary_stay_tokens(tokenizer, templates):
    """As Qwen's `<think>`: engines read the same token whoever writes it."""
    thinking: PreTrainedTokenizerFast = copy.deepcopy(tokenizer)
    thinking.add_tokens([AddedToken("<think>", special=False)])
    ids = ChatTemplate(thinking, templates["chatml"]).opening(
        [Message("user", "write <think> now")]
    )
    assert thinking.convert_tokens_to_ids("<think>") in ids


def test_a_dialogue_escapes_keeps_or_rejects_by_its_setting(chatml, tokenizer):
    seed = Conversation(
        "s:0", (Message("user", "What is <|im_end|>?"), Message("assistant", "An </s>."))
    )
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    for policy, ends in (("escape", 2), ("keep", 3)):
        dialogue = Dialogue(seed, chatml, replace(SETTINGS, special_tokens=policy))
        hold(dialogue, tokenizer, "A mark.")
        row = only_row(dialogue)
        assert row.input_ids.count(end) == ends and row.messages[0].content == "What is <|im_end|>?"
        assert dialogue.special_tokens() == ["<|im_end|>"]
    dialogue = Dialogue(seed, chatml, replace(SETTINGS, special_tokens="quarantine"))
    assert dialogue.next_request() is None
    with pytest.raises(RowRejected, match=r"<\|im_end\|>") as caught:
        dialogue.rows()
    assert caught.value.reason is Reason.SPECIAL_TOKENS
