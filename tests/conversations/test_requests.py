"""Streamed text of sampled ids, and detection of degenerate loops."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from pipeline.conversations.requests import TextStream, degenerate_loop
from tests.flows.tiny import SPECIAL


@pytest.fixture(scope="module")
def bytewise(tiny_target):
    return AutoTokenizer.from_pretrained(tiny_target)


def pieces(tokenizer, ids: list[int]) -> list[str]:
    stream = TextStream(tokenizer)
    return [*map(stream.push, ids), stream.flush()]


texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd"))


@given(texts.filter(lambda text: not any(token in text for token in SPECIAL)))
def test_pieces_join_to_the_text_without_half_characters(bytewise, text):
    shown = pieces(bytewise, bytewise(text)["input_ids"])
    assert "".join(shown) == text and not any("\ufffd" in piece for piece in shown)


def test_a_character_comes_with_the_token_that_completes_it(bytewise):
    ids = [*bytewise("月")["input_ids"], bytewise.eos_token_id]  # one byte each
    assert pieces(bytewise, ids) == ["", "", "月", "", ""]
    ids = bytewise("dog月")["input_ids"][:-1]
    assert "".join(pieces(bytewise, ids)) == bytewise.decode(ids)


few_tokens = st.lists(st.integers(0, 3), min_size=1, max_size=20)


@given(few_tokens, few_tokens, st.integers(1, 33), st.integers(0, 19))
def test_a_loop_repeats_four_times_over_32_tokens(before, ngram, num_times, broken_off):
    ids = before + ngram * num_times + ngram[:broken_off]

    def repeats(period):
        length = max(32, 4 * period)
        tail = range(len(ids) - length + period, len(ids))
        return length <= len(ids) and all(ids[at] == ids[at - period] for at in tail)

    assert degenerate_loop(ids) == any(repeats(period) for period in range(1, len(ids) // 4 + 1))
