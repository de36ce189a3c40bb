"""States in 8 bits come back within what the formats' definitions allow, and their cache is half as
large.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.artifacts import quantized_states
from pipeline.artifacts.feature_rows import FeatureRows
from pipeline.artifacts.feature_writer import FeatureWriter, WaitingMemory
from pipeline.artifacts.generated_rows import TokenRow
from pipeline.artifacts.quantized_states import dequantize, quantize
from pipeline.artifacts.state_format import StateFormat
from pipeline.conversations.spans import Span
from pipeline.storage.shards import ShardTask, ShardWriter, open_shard, read_rows

UNIT_ROUNDOFF = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(
        st.lists(st.floats(-6e4, 6e4, width=16), min_size=8, max_size=8), min_size=1, max_size=6
    ),
    dtype=st.sampled_from(list(UNIT_ROUNDOFF)),
    exponent=st.integers(-30, 0),
)
def test_quantized_states_are_within_half_a_step(values, dtype, exponent):
    hidden_ND = (torch.tensor(values) * 2.0**exponent).to(dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantized_states, "PIECE", 16)  # two rows at a time
        stored_ND, scales_N = quantize(hidden_ND)
        found_ND = dequantize(stored_ND.view(torch.uint8).numpy(), scales_N.numpy(), dtype)
    assert found_ND.dtype == dtype
    true_ND, error_ND = hidden_ND.double(), (found_ND.double() - hidden_ND.double()).abs()
    largest_N1 = true_ND.abs().amax(1, keepdim=True).clamp_min(1e-30)
    # four bits with the leading one; below 2^-6 of the scale, multiples of 2^-9 of it
    allowed_ND = torch.maximum(true_ND.abs() / 16, largest_N1 / 448 * 2.0**-10)
    smallest = 2.0**-24 if dtype == torch.float16 else 0.0  # float16's own last place near zero
    assert (
        error_ND
        <= allowed_ND * (1 + 1e-5) + (true_ND.abs() + allowed_ND) * UNIT_ROUNDOFF[dtype] + smallest
    ).all()


@pytest.mark.parametrize("precision", ["native", "fp8"])
def test_an_8_bit_shard_is_read_in_the_target_dtype(tmp_path, precision):
    states = StateFormat(torch.bfloat16, 64, precision)
    rows = [
        TokenRow(n, n, "train", np.arange(40, dtype=np.int32), [Span(1, 40, "assistant")])
        for n in "abc"
    ]
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 40, 64, generator=random).bfloat16()
    hidden[1, 5, 7] = torch.nan
    path = tmp_path / "0.parquet"
    task = ShardTask(0, path, path.with_suffix(".q"), "f")
    with (
        ShardWriter(task, states.schema, footer=states.footer) as writer,
        FeatureWriter(writer, rows, states, WaitingMemory()) as features,
    ):
        for index in (2, 0, 1):
            features.put(index, hidden[index])
        assert features.finish() == 78
        receipt = writer.commit("features", "abc")
    assert (receipt.num_rows, receipt.num_quarantined) == (2, 1)
    with open_shard(path) as shard:
        assert StateFormat.of(shard.schema_arrow.metadata) == states
    stored = next(read_rows(path))
    scales = 4 * len(stored.get("scales", ()))
    assert len(stored["hidden"]) + scales == 39 * states.stored_bytes
    opened = FeatureRows(
        [str(path)],
        fingerprint="f",
        num_heads=2,
        roles=["assistant"],
    )
    group = opened.read_group(0)
    for index, true_TD in enumerate((hidden[0], hidden[2])):
        found_ND = group[index].hidden_ND
        assert found_ND.dtype == torch.bfloat16
        worst = {"native": 0.0, "fp8": 1 / 16}[precision] * 1.1
        assert (found_ND - true_TD[:39]).abs().max() <= worst * true_TD.abs().max()
