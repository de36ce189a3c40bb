"""Speculative sampling with a draft model: the target's own distribution, and counts that are right."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from transformers import AutoModelForCausalLM

from pipeline.evaluation.draft_sampling import NUM_DRAFTED, DraftSampling, kept_and_next
from pipeline.evaluation.speed import CannotDecode

DRAWS = 20_000


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_the_next_token_is_distributed_as_the_target_s_whatever_the_draft_s(seed):
    generator = torch.Generator().manual_seed(seed)
    p_V, q_V = (torch.rand(5, generator=generator).pow(2) for _ in range(2))
    p_V, q_V = p_V / p_V.sum(), q_V / q_V.sum()
    q_V = torch.where(torch.arange(5) == seed, 0.0, q_V) if seed else q_V  # a token that is never drafted
    q_V = q_V / q_V.sum()
    found: Counter[int] = Counter()
    kept = 0
    for token in torch.multinomial(q_V, DRAWS, replacement=True, generator=generator).tolist():
        tokens = kept_and_next(torch.stack([p_V, p_V]), q_V[None], [token], generator)
        found[tokens[0]] += 1
        kept += len(tokens) - 1
    for token, p in enumerate(p_V.tolist()):
        assert found[token] / DRAWS == pytest.approx(p, abs=4 * (p * (1 - p) / DRAWS) ** 0.5 + 1e-9)
    assert kept / DRAWS == pytest.approx(float(torch.minimum(p_V, q_V).sum()), abs=0.015), "sum of min(p, q)"


def test_a_draft_model_that_is_the_target_loses_nothing(tiny_target):
    model = AutoModelForCausalLM.from_pretrained(tiny_target).eval()
    decode = DraftSampling(model, AutoModelForCausalLM.from_pretrained(tiny_target).eval(), (), 25, 1.0)
    answer = decode([5, 6, 7, 8], seed=3)
    assert len(answer.token_ids) == 25 and answer.finished == "length"
    assert sum(answer.accepted) == 24 and answer.accepted[:3] == [NUM_DRAFTED + 1] * 3
    assert decode.facts["acceptance"] > 0.99 and decode.facts["draft_length"] <= NUM_DRAFTED
    assert decode([5, 6, 7, 8], seed=3).token_ids == answer.token_ids != decode([5, 6, 7, 8], seed=4).token_ids


def test_text_ends_with_the_end_of_sequence_and_its_caches_hold_what_was_kept(tiny_target, tmp_path):
    """A draft of other weights: many rejections, and every step's distributions are still the target's."""
    target = AutoModelForCausalLM.from_pretrained(tiny_target).eval()
    torch.manual_seed(1)
    draft = AutoModelForCausalLM.from_config(target.config).eval()
    decode = DraftSampling(target, draft, (), 12, 0.5)
    read: list[tuple[list[int], torch.Tensor]] = []
    plain = decode._distributions

    def noted(model, caches, ids, last):
        found = plain(model, caches, ids, last)
        if model is target:
            read.append((list(ids), found))
        return found

    decode._distributions = noted
    answer = decode([5, 6, 7, 8], seed=0)
    assert decode.facts["acceptance"] < 0.9 and len(answer.token_ids) == 12
    for ids, p_MV in read:
        with torch.inference_mode():
            logits_MV = target(torch.tensor([ids])).logits[0, -len(p_MV) :]
        torch.testing.assert_close(p_MV, (logits_MV / 0.5).softmax(-1), atol=1e-4, rtol=1e-3)
    ends = DraftSampling(target, draft, range(len(target.lm_head.weight)), 12, 1.0)([5], 0)
    assert (len(ends.token_ids), ends.finished, ends.accepted) == (1, "stop", [])


def test_what_a_model_cannot_do_is_said_and_a_fault_of_ours_is_not_taken_for_it(tiny_target, monkeypatch):
    model = AutoModelForCausalLM.from_pretrained(tiny_target).eval()
    decode = DraftSampling(model, model, (), 4, 1.0)

    def broken(*arguments, **more):
        raise IndexError("not with this cache\nmore")

    with monkeypatch.context() as patch:
        patch.setattr(model, "forward", broken)
        with pytest.raises(CannotDecode, match=r"^not with this cache$"):
            decode([5, 6], 0)
    monkeypatch.setattr("pipeline.evaluation.draft_sampling._draw", broken)
    with pytest.raises(IndexError):
        decode([5, 6], 0)
