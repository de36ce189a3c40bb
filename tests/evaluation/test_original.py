"""The drift of published weights from the original's."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn.functional import kl_div, nll_loss
from transformers import AutoModelForCausalLM

from pipeline.artifacts.generated_rows import TokenRow
from pipeline.conversations.spans import Span
from pipeline.evaluation import original
from pipeline.evaluation.original import drift_answers, published_drift
from pipeline.targets.spec import TargetSpec


def row_of(lengths: list[int], name: str = "row") -> TokenRow:
    spans, start = [], 1
    for length in lengths:
        spans.append(Span(start, start + length, "assistant"))
        start += length + 2
    parent = name.partition("#")[0]
    return TokenRow(name, parent, "calibrate", np.arange(start, dtype=np.int32), spans)


def test_drift_is_of_every_source_and_every_answer(monkeypatch):
    """Short answers as they are, equal parts of longer ones, the split's alone."""
    monkeypatch.setattr(original, "MAX_POSITIONS", 50)
    rows = [row_of([90, 3], f"a:{n}") for n in range(3)] + [row_of([40], f"b:{n}") for n in (0, 1)]
    rows.append(replace(row_of([90], "b:2"), split="check"))
    found = drift_answers(rows, 1000)
    assert sorted(len(answer) for _, answer in found) == [3, 3, 3, 8, 8, 8, 8, 9]
    assert {prompt.id for prompt, _ in found} == {"a:0", "a:1", "a:2", "b:0", "b:1"}
    assert len({len(prompt.ids) for prompt, _ in found}) > 3, "not at the answers' beginnings alone"
    for prompt, answer in found:
        text = prompt.ids + answer
        assert text == list(range(len(text))), "the row's own text before the answer's part"


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
    found = published_drift(
        TargetSpec(str(tiny_target)), TargetSpec(str(tmp_path)), drift_answers([row], 100)
    )
    kl = kl_div(log_q_NV, log_p_NV, reduction="batchmean", log_target=True)
    assert found.kl == pytest.approx(float(kl), rel=1e-4)
    assert found.perplexity == pytest.approx(perplexity, rel=1e-4)
    change = perplexity["tuned"] / perplexity["original"] - 1
    assert found.perplexity_change == pytest.approx(change, abs=1e-4)
    agreed = (log_p_NV.argmax(-1) == log_q_NV.argmax(-1)).double().mean()
    assert found.greedy_agreement == pytest.approx(float(agreed))
    assert found.positions == 3 + 2 + 4
