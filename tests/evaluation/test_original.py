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
    """Here by torch's KL divergence and cross-entropy, one written token after another."""
    model, tuned = (AutoModelForCausalLM.from_pretrained(tiny_target) for _ in range(2))
    torch.nn.init.normal_(tuned.lm_head.weight, std=0.1)
    tuned.save_pretrained(tmp_path)
    rows = [row_of([3, 2]), row_of([4])]
    divergences, losses, tuned_losses, agreed = [], [], [], []
    for row in rows:
        row.input_ids[:] = torch.randint(3, 300, (len(row.input_ids),)).numpy()
        ids_T = torch.from_numpy(row.input_ids).long()
        with torch.inference_mode():
            log_p_TV = model(ids_T[None]).logits[0].double().log_softmax(-1)
            log_q_TV = tuned(ids_T[None]).logits[0].double().log_softmax(-1)
        for span in row.spans:
            for place in range(span.start, span.end):
                p_V, q_V = log_p_TV[place - 1], log_q_TV[place - 1]
                divergences.append(float(kl_div(q_V, p_V, reduction="sum", log_target=True)))
                losses.append(float(nll_loss(p_V, ids_T[place])))
                tuned_losses.append(float(nll_loss(q_V, ids_T[place])))
                agreed.append(bool(p_V.argmax() == q_V.argmax()))
    before, after = float(np.exp(np.mean(losses))), float(np.exp(np.mean(tuned_losses)))
    found = published_drift(TargetSpec(str(tiny_target)), TargetSpec(str(tmp_path)), rows)
    assert found.kl == pytest.approx(np.mean(divergences), rel=1e-4)
    assert found.perplexity == pytest.approx({"original": before, "tuned": after}, rel=1e-4)
    assert found.perplexity_change == pytest.approx(after / before - 1, abs=1e-4)
    assert found.greedy_agreement == pytest.approx(np.mean(agreed))
    assert found.positions == 3 + 2 + 4
