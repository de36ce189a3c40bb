"""Row features are joined with feature rows by id, whichever rows either side lacks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.artifacts import feature_writer
from pipeline.artifacts.feature_rows import FeatureRows
from pipeline.artifacts.feature_writer import FeatureWriter, WaitingMemory
from pipeline.artifacts.generated_rows import TokenRow
from pipeline.artifacts.row_states import RowStates
from pipeline.artifacts.state_format import StateFormat
from pipeline.conversations.spans import Span
from pipeline.errors import DataError
from pipeline.storage.shards import ShardTask, ShardWriter

D, LAYERS = 4, (2, 5, 7)


def write(path, rows, states, not_finite=()):
    """Write a shard of random states; return them by row id."""
    hidden = {}
    task = ShardTask(0, path, path.with_suffix(".q"), path.name[0])
    with (
        ShardWriter(task, states.schema, footer=states.footer) as writer,
        FeatureWriter(writer, rows, states, WaitingMemory()) as features,
    ):
        for number, row in enumerate(rows):
            hidden_TX = torch.randn(len(row.input_ids), D * max(1, len(states.layers)))
            hidden[row.id] = hidden_TX.bfloat16()
            if number in not_finite:
                hidden[row.id][1] = torch.inf
            features.put(number, hidden[row.id])
        features.finish()
        writer.commit("features", [row.id for row in rows])
    return hidden


def conversations(lengths):
    rows = []
    for number, length in enumerate(lengths):
        spans = [Span(1, 3, "user"), Span(4, length, "assistant")]
        ids = np.random.default_rng(number).integers(0, 50, length, np.int32)
        rows.append(TokenRow(f"r{number}", f"p{number}", "train", ids, spans))
    return rows


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(6, 20), min_size=1, max_size=10),
    bad=st.tuples(st.sets(st.integers(0, 9)), st.sets(st.integers(0, 9))),
    precision=st.sampled_from(["native", "fp8"]),
    layers=st.sampled_from([LAYERS, (5,)]),
)
def test_a_row_has_the_states_of_its_tokens(tmp_path_factory, lengths, bad, precision, layers):
    folder, rows = tmp_path_factory.mktemp("shards"), conversations(lengths)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(feature_writer, "ROW_GROUP_BYTES", 100)  # one to three rows
        write(folder / "a", rows, StateFormat(torch.bfloat16, D, precision), bad[0])
        states = StateFormat(torch.bfloat16, D, precision, LAYERS)
        hidden = write(folder / "b", rows, states, bad[1])
    row_states = RowStates([folder / "b"], fingerprint="b", layers=layers)
    assert (row_states.dtype, row_states.size) == (torch.bfloat16, D * len(layers))
    opened = FeatureRows(
        [folder / "a"], fingerprint="a", num_heads=2, roles=["assistant"], row_states=row_states
    )
    kept = [row for number, row in enumerate(rows) if number not in bad[0]]
    lacking = {row.id for number, row in enumerate(rows) if number in bad[1]}
    seen = 0
    for group, lengths_of_group in enumerate(opened.lengths("train")):
        for row, length in zip(opened.read_group(group), lengths_of_group, strict=True):
            expected = kept[seen]
            seen += 1
            assert row.parent_id == expected.parent_id
            if expected.id in lacking:
                assert length == 0 and not row.layers
                continue
            assert np.array_equal(row.input_ids, expected.input_ids)
            assert row.positions_N.tolist() == list(range(3, len(expected.input_ids) - 2))
            assert length == len(row.positions_N)
            assert np.array_equal(row.next_N, row.input_ids[row.positions_N + 1])
            chosen = [LAYERS.index(layer) for layer in layers]
            hidden_TX = hidden[expected.id].unflatten(1, (3, D))[:, chosen].flatten(1)
            tolerance = {"native": 0.0, "fp8": 1 / 16 * 1.1}[precision]
            difference = (row.states_TX - hidden_TX).float().abs().max()
            assert difference <= tolerance * hidden_TX.float().abs().max()
    assert seen == len(kept)


def test_row_features_of_another_run_are_refused(tmp_path):
    write(tmp_path / "b", conversations([6]), StateFormat(torch.bfloat16, D, layers=LAYERS))
    with pytest.raises(DataError, match="belongs to another run"):
        RowStates([tmp_path / "b"], fingerprint="c", layers=LAYERS)
