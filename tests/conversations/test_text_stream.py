"""A streamed text is the text, piece by piece, and never half a character."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from pipeline.conversations.requests import TextStream
from tests.flows.tiny import SPECIAL


@pytest.fixture(scope="module")
def bytewise(tiny_target):
    return AutoTokenizer.from_pretrained(tiny_target)


def pieces(tokenizer, ids: list[int]) -> list[str]:
    stream = TextStream(tokenizer)
    return [*map(stream.push, ids), stream.flush()]


TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd"))


@given(
    TEXTS.filter(lambda text: not any(token in text for token in SPECIAL))
)  # whose tokens have no text
def test_pieces_join_to_the_text_and_no_piece_holds_half_a_character(bytewise, text):
    shown = pieces(bytewise, bytewise(text)["input_ids"])
    assert "".join(shown) == text
    assert not any("\ufffd" in piece for piece in shown)


def test_a_character_comes_with_the_token_that_completes_it(bytewise):
    ids = bytewise("月")["input_ids"]
    assert len(ids) == 3  # one byte each
    assert pieces(bytewise, ids) == ["", "", "月", ""]


def test_a_text_that_ends_within_a_character_is_not_lost(bytewise):
    ids = bytewise("dog月")["input_ids"]
    assert "".join(pieces(bytewise, ids[:-1])) == bytewise.decode(ids[:-1])


def test_special_tokens_have_no_text(bytewise):
    ids = [*bytewise("the moon")["input_ids"], bytewise.eos_token_id]
    assert "".join(pieces(bytewise, ids)) == "the moon"


def test_spaces_between_words_stay_where_a_tokenizer_drops_the_one_before_a_text():
    words = {"▁the": 0, "▁moon": 1, "s": 2}
    backend = Tokenizer(models.WordLevel(words, unk_token="s"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    assert pieces(tokenizer, [0, 1, 2, 1]) == ["the", " moon", "s", " moon", ""]
