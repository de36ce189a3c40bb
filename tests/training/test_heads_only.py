from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

from pipeline.conversations.spans import IGNORED
from pipeline.errors import CheckFailed, DataError, EnvironmentFault
from pipeline.heads.medusa import MedusaHeads
from pipeline.storage.shards import read_rows
from pipeline.targets.lm_head import read_lm_head
from pipeline.training.checkpoints import read_checkpoint
from pipeline.training.heads_only import add_noise, initial_heads
from pipeline.training.metrics import read_metrics
from pipeline.training.trainer import train
from tests.training.conftest import STATES, V
from tests.training.trainings import trainer_of


@pytest.mark.parametrize("lm_head", ["shared", pytest.param("untied", marks=pytest.mark.slow)])
def test_heads_learn_what_can_be_learned(make_spec, lm_head):
    spec = make_spec(epochs=24, lm_head=lm_head)
    after = train(spec).held_out
    before = next(read_metrics(spec.path))["held_out"]
    for start, end in zip(before, after, strict=True):
        assert end["loss"] < 0.5 * start["loss"] and end["top1"] > 0.5
    assert before[0]["top1"] < 0.1, "the target's own guess is t+1"


@pytest.mark.parametrize("lm_head", ["untied", "shared", "tied"])
@pytest.mark.parametrize("soft_labels", [0.0, 0.4])
def test_one_step_follows_the_gradient_of_the_paper(make_spec, lm_head, soft_labels):
    """Against autograd over all logits, and torch's own AdamW without fusing."""
    spec = make_spec(
        lm_head=lm_head,
        soft_labels=soft_labels,
        max_grad_norm=0.5,
        lr=1e-3,
        warmup_steps=0,
        batch_tokens=10_000,
    )
    trainer, plain = trainer_of(spec), initial_heads(spec)
    batch = next(trainer.learner.steps(0))[0]
    trainer.step(0, [batch])

    is_label_KN = batch.labels_KN != IGNORED
    logits_KNV = plain(batch.hidden_ND)
    sums_K = cross_entropy(logits_KNV.mT, batch.labels_KN, reduction="none").sum(1)
    if soft_labels:
        # What the target predicts before a token is, in these rows, said by that token alone.
        p_KNV = (STATES @ read_lm_head(spec.target).T).softmax(1)[batch.labels_KN.clamp(min=0)]
        soft_KN = -(p_KNV * logits_KNV.log_softmax(2)).sum(2)
        sums_K = (1 - soft_labels) * sums_K + soft_labels * (soft_KN * is_label_KN).sum(1)
    counts_K = is_label_KN.sum(1)
    loss = sum(0.8 ** (k + 1) * sums_K[k] / counts_K[k] for k in range(3))
    loss.backward()
    trained = [parameter for parameter in plain.parameters() if parameter.requires_grad]
    norm = torch.sqrt(sum((parameter.grad**2).sum() for parameter in trained))
    assert norm > 0.5
    for parameter in trained:
        parameter.grad *= 0.5 / norm
    torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.0, foreach=False, fused=False).step()
    theirs = dict(plain.named_parameters())
    for name, ours in trainer.learner.heads.named_parameters():
        torch.testing.assert_close(ours, theirs[name], rtol=1e-4, atol=1e-6, msg=name)


def test_a_head_without_labels_adds_nothing_and_does_not_move(make_spec):
    spec = make_spec(lr=1e-3, warmup_steps=0, batch_tokens=10_000)
    trainer, start = trainer_of(spec), initial_heads(spec)
    batch = next(trainer.learner.steps(0))[0]
    batch.labels_KN[2] = IGNORED
    metrics = trainer.step(0, [batch]).metrics
    heads, (first, second, third) = trainer.learner.heads, metrics["head_losses"]
    assert metrics["loss"] == pytest.approx(0.8 * first + 0.64 * second) and third == 0
    moved_K = heads.lm_head.ne(start.lm_head).flatten(1).any(1) & heads.block_weight[0].any((1, 2))
    assert moved_K.tolist() == [True, True, False]


def test_draft_vocabulary_is_what_train_rows_hold_most_often(make_spec):
    spec = make_spec(draft_vocab=10)
    counts: Counter[int] = Counter()
    for path in spec.shards:
        for row in read_rows(path):
            for span in row["spans"]:
                if row["split"] == "train" and span["role"] == "assistant":
                    counts.update(row["input_ids"][span["start"] : span["end"]])
    by_frequency = sorted(range(V), key=lambda token: (-counts[token], token))
    assert initial_heads(spec).vocabulary.token_map.tolist() == sorted(by_frequency[:10])


def test_divergence_stops_training_and_spoils_no_checkpoint(make_spec, monkeypatch):
    spec = make_spec(checkpoint_every=1)
    spoil = iter([False, False, True])
    hidden = MedusaHeads.hidden

    def spoiled(self, states, *rest):
        result = hidden(self, states, *rest)
        return result * torch.inf if torch.is_grad_enabled() and next(spoil) else result

    monkeypatch.setattr(MedusaHeads, "hidden", spoiled)
    with pytest.raises(CheckFailed, match=r"train\.lr"):
        train(spec)
    assert not spec.heads_path.exists()
    newest = sorted(spec.path.glob("checkpoints/*"))[-1]
    assert newest.name == "step-00000002.safetensors"
    for name, tensor in read_checkpoint(newest).tensors.items():
        assert not tensor.is_floating_point() or tensor.isfinite().all(), name


def test_missing_rows_are_refused(make_spec):
    with pytest.raises(DataError, match=r"train\.roles"):
        train(replace(make_spec(), shards=()))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_missing_gpu_is_refused(make_spec):
    with pytest.raises(EnvironmentFault, match=r"placement\.train"):
        train(replace(make_spec(), device="cuda"))


NUM_NOISED = 800
NOISED = torch.randn(NUM_NOISED, 16, generator=torch.Generator().manual_seed(0))
NOISED *= torch.logspace(-3, 3, NUM_NOISED)[:, None]


def relative(noise_ND: torch.Tensor, states_ND: torch.Tensor) -> torch.Tensor:
    return noise_ND / states_ND.square().mean(1, keepdim=True).sqrt()


def test_noise_is_uniform_within_a_share_of_the_rms():
    share = relative(add_noise(NOISED, 0.3, (1, 2)) - NOISED, NOISED)
    assert 0.295 < share.abs().max() <= 0.3001
    assert share.mean().abs() < 0.01 and share.std() == pytest.approx(0.6 / 12**0.5, rel=0.02)


@given(cuts=st.lists(st.integers(0, NUM_NOISED), max_size=4))
def test_the_same_states_get_the_same_noise_on_any_workers(cuts):
    edges = [0, *sorted(cuts), NUM_NOISED]
    pairs = pairwise(edges)
    parts = [add_noise(NOISED[start:stop], 0.1, (5,), start, NUM_NOISED) for start, stop in pairs]
    assert torch.equal(torch.cat(parts), add_noise(NOISED, 0.1, (5,)))
