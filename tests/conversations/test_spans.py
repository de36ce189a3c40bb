"""Masks, against a slow reading of the rule: head k at t learns iff t+1 and t+2+k lie in the same
span.
"""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pipeline.conversations.spans import IGNORED, Span, feature_positions, head_labels


@st.composite
def rows(draw):
    """Token ids and spans in them: neighbours may touch, lengths go down to one."""
    spans, end = [], 0
    for gap, length in draw(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9)), max_size=6)):
        start = max(1, end + gap)
        end = start + length
        spans.append(Span(start, end, draw(st.sampled_from(["user", "assistant"]))))
    length = max(1, end + draw(st.integers(0, 4)))
    ids = draw(st.lists(st.integers(0, 99), min_size=length, max_size=length))
    return ids, spans


def span_of(position, spans):
    return next((span for span in spans if span.start <= position < span.end), None)


@given(rows())
def test_positions_are_the_states_that_predict_a_target_written_token(row):
    ids, spans = row
    expected = [t for t in range(len(ids)) if span_of(t + 1, spans)]
    positions = feature_positions(spans)
    assert positions.dtype == np.int32 and positions.tolist() == expected


@given(
    rows(), st.integers(1, 6), st.sampled_from([("assistant",), ("user",), ("assistant", "user")])
)
def test_a_head_learns_where_the_rule_says_and_nowhere_else(row, num_heads, roles):
    ids, spans = row
    labels_KN = head_labels(ids, spans, num_heads, roles)
    positions = feature_positions(spans).tolist()
    assert labels_KN.dtype == np.int32
    assert labels_KN.shape == (num_heads, len(positions))
    for k in range(num_heads):
        for n, t in enumerate(positions):
            here, there = span_of(t + 1, spans), span_of(t + 2 + k, spans)
            learns = here is not None and here == there and here.role in roles
            assert labels_KN[k, n] == (ids[t + 2 + k] if learns else IGNORED)


def test_head_never_learns_across_a_span_boundary():
    ids = list(range(100, 110))
    touching = [Span(2, 4, "assistant"), Span(4, 7, "assistant")]
    assert feature_positions(touching).tolist() == [1, 2, 3, 4, 5]
    assert head_labels(ids, touching, 2, ("assistant",)).tolist() == [
        [103, IGNORED, 105, 106, IGNORED],
        [IGNORED, IGNORED, 106, IGNORED, IGNORED],
    ]
