"""transformers' own ways to decode: greedy text, and every forward counted."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from pipeline.decoding.decoder import plain_decoder
from pipeline.evaluation.speed import CannotDecode, baseline
from pipeline.targets.spec import TargetSpec

EOS = (1, *range(100, 108))
PROMPTS = torch.randint(3, 300, (6, 24), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.fixture
def model(tiny_target):
    return AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32).eval()


@pytest.fixture
def forwards(model):
    """How many forwards the target has done."""
    counted = []
    model.register_forward_hook(lambda *_: counted.append(1))
    return counted


def assistant_of(name: str, tiny_target):
    """The target itself: a guesser that is always right."""
    return TargetSpec(str(tiny_target)) if name == "assistant" else None


@pytest.mark.parametrize("name", ["generate", "prompt-lookup", "assistant"])
def test_a_baseline_writes_the_greedy_text_and_its_steps_are_the_target_s_forwards(
    model, forwards, tiny_target, name
):
    decode = baseline(name, model, EOS, 20, assistant_of(name, tiny_target))
    plain = plain_decoder(model, eos_token_ids=EOS)
    ended = 0
    for ids in PROMPTS:
        expected = plain.generate(ids, 20)
        before = len(forwards)
        found = decode(ids, 0)
        assert (found.token_ids, found.finished) == (expected.token_ids, expected.finished)
        assert len(forwards) - before == 1 + found.num_steps, "the prefill and the steps"
        assert sum(found.accepted) < len(found.token_ids) and min(found.accepted, default=1) >= 1
        assert found.seconds_prefill > 0 and found.seconds >= 0
        ended += found.finished == "stop"
        if name == "generate":
            assert found.accepted == [1] * (len(found.token_ids) - 1)
    assert 0 < ended < len(PROMPTS)


def test_text_that_repeats_is_looked_up(model, forwards):
    """A text that continues as it went before gives several tokens per forward."""
    ids = PROMPTS[0]
    for _ in range(3):  # let the target write on, until what it writes has stood before
        ids = ids + plain_decoder(model, eos_token_ids=()).generate(ids, 40).token_ids
    found = baseline("prompt-lookup", model, (), 30)(ids, 0)
    assert found.token_ids == plain_decoder(model, eos_token_ids=()).generate(ids, 30).token_ids
    assert len(found.token_ids) == 30 and max(found.accepted) > 1


def test_the_target_s_own_generation_settings_do_not_apply(model):
    model.generation_config.update(
        repetition_penalty=50.0, min_new_tokens=15, do_sample=True, temperature=9.0
    )
    found = baseline("generate", model, EOS, 20)(PROMPTS[1], 0)
    assert (
        found.token_ids
        == plain_decoder(model, eos_token_ids=EOS).generate(PROMPTS[1], 20).token_ids
    )


def test_what_transformers_cannot_do_is_said_in_one_line(model, monkeypatch):
    def broken(*arguments, **more):
        raise ValueError("not with this cache\nmore")

    decode = baseline("generate", model, EOS, 4)
    assert decode(PROMPTS[0], 0).token_ids
    monkeypatch.setattr(model, "generate", broken)
    with pytest.raises(CannotDecode, match=r"^not with this cache$"):
        decode(PROMPTS[0], 0)
