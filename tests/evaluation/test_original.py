"""The drift of published weights from the original's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import kl_div, nll_loss
from transformers import AutoModelForCausalLM

from pipeline.artifacts.generated_rows import TokenRow
from pipeline.conversations.spans import Span
from pipeline.evaluation import original
from pipeline.evaluation.original import first_positions, published_drift
from pipeline.targets.spec import TargetSpec

LENGTHS = st.lists(st.lists(st.integers(1, 9), max_size=3), max_size=5)


def row_of(lengths: list[int], name: int = 0) -> TokenRow:
    spans, start = [], 1
    for length in lengths:
        spans.append(Span(start, start + length, "assistant"))
        start += length + 2
    return TokenRow(str(name), str(name), "calibrate", np.arange(start, dtype=np.int32), spans)


@given(LENGTHS, st.integers(1, 40))
def test_the_first_positions_are_measured_and_no_more(lengths, most):
    rows = [row_of(each, number) for number, each in enumerate(lengths)]
    written = []
    for row in rows:
        for span in row.spans:
            written += [(row.id, place) for place in range(span.start, span.end)]
    found = []
    for prompt, answer in zip(*first_positions(rows, most), strict=True):
        assert prompt.ids == list(range(answer[0]))
        found += [(prompt.id, token) for token in answer]
    assert found == written[:most]
    _, (answer,) = first_positions([row_of([10 * original.MAX_POSITIONS])])
    assert len(answer) == original.MAX_POSITIONS


def test_drift_is_measured_where_the_original_wrote(tiny_target, tmp_path):
    model, tuned = (AutoModelForCausalLM.from_pretrained(tiny_target) for _ in range(2))
    torch.nn.init.normal_(tuned.lm_head.weight, std=0.1)
    tuned.save_pretrained(tmp_path)
    row = row_of([3, 2, 4])
    row.input_ids[:] = torch.randint(3, 300, (len(row.input_ids),)).numpy()
    ids_T = torch.from_numpy(row.input_ids).long()
    places = [place for span in row.spans for place in range(span.start, span.end)]
    before = torch.tensor(places) - 1
    with torch.inference_mode():
        log_p_NV = model(ids_T[None]).logits[0].double().log_softmax(-1)[before]
        log_q_NV = tuned(ids_T[None]).logits[0].double().log_softmax(-1)[before]
    perplexity = {
        "original": float(nll_loss(log_p_NV, ids_T[places]).exp()),
        "tuned": float(nll_loss(log_q_NV, ids_T[places]).exp()),
    }
    found = published_drift(TargetSpec(str(tiny_target)), TargetSpec(str(tmp_path)), [row])
    kl = kl_div(log_q_NV, log_p_NV, reduction="batchmean", log_target=True)
    assert found.kl == pytest.approx(float(kl), rel=1e-4)
    assert found.perplexity == pytest.approx(perplexity, rel=1e-4)
    change = perplexity["tuned"] / perplexity["original"] - 1
    assert found.perplexity_change == pytest.approx(change, abs=1e-4)
    agreed = (log_p_NV.argmax(-1) == log_q_NV.argmax(-1)).double().mean()
    assert found.greedy_agreement == pytest.approx(float(agreed))
    assert found.positions == 3 + 2 + 4
