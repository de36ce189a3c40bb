"""The drift of published weights from the original's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.functional import kl_div, nll_loss
from transformers import AutoModelForCausalLM

from pipeline.artifacts.generated_rows import TokenRow
from pipeline.conversations.spans import Span
from pipeline.evaluation import original
from pipeline.evaluation.original import first_positions, published_drift
from pipeline.targets.spec import TargetSpec


def row_of(lengths: list[int], name: str = "row") -> TokenRow:
    spans, start = [], 1
    for length in lengths:
        spans.append(Span(start, start + length, "assistant"))
        start += length + 2
    return TokenRow(name, name, "calibrate", np.arange(start, dtype=np.int32), spans)


def test_the_first_positions_are_measured_and_no_more(monkeypatch):
    monkeypatch.setattr(original, "MAX_POSITIONS", 6)
    prompts, answers = first_positions([row_of([3, 1], "a"), row_of([4, 2], "b")])
    assert answers == [[1, 2, 3], [6], [1, 2]]
    assert [prompt.id for prompt in prompts] == ["a", "a", "b"]
    assert [prompt.ids for prompt in prompts] == [[0], [0, 1, 2, 3, 4, 5], [0]]


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
