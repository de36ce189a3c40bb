from __future__ import annotations

from collections import Counter

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy

from pipeline.artifacts.trained_heads import read_trained_heads
from pipeline.conversations.spans import IGNORED
from pipeline.errors import CheckFailed, ConfigError, DataError, EnvironmentFault
from pipeline.heads.medusa import MedusaHeads
from pipeline.storage.shards import read_rows
from pipeline.targets.lm_head import read_lm_head
from pipeline.training.feature_batches import Batch
from pipeline.training.heads_only import initial_heads, open_features
from pipeline.training.metrics import read_metrics
from pipeline.training.phases import train
from pipeline.training.task import TrainSpec
from tests.training.conftest import STATES, V
from tests.training.trainings import trainer_of


def all_positions(spec: TrainSpec, split: str) -> tuple[torch.Tensor, ...]:
    """Every learnable state, the token that follows and its labels, read row by row."""
    rows = open_features(spec)
    found = []
    for group, lengths in enumerate(rows.lengths(split)):
        taken = [rows.read_group(group)[row] for row in lengths.nonzero()[0]]
        found += [
            (
                row.hidden_ND[row.learnable],
                torch.from_numpy(row.next_N),
                torch.from_numpy(row.labels_KN),
            )
            for row in taken
        ]
    hidden, following, labels = zip(*found, strict=True)
    return torch.cat(hidden), torch.cat(following).long(), torch.cat(labels, 1).long()


def test_training_starts_at_the_targets_own_prediction(make_spec):
    spec = make_spec(epochs=1, batch_tokens=10_000, warmup_steps=0)
    train(spec)
    hidden_ND, _, labels_KN = all_positions(spec, "train")
    logits_NV = hidden_ND @ read_lm_head(spec.target).T
    losses = [
        torch.nn.functional.cross_entropy(logits_NV, labels_N, ignore_index=IGNORED)
        for labels_N in labels_KN
    ]
    expected = sum(0.8 ** (k + 1) * loss for k, loss in enumerate(losses))
    first = next(line for line in read_metrics(spec.path) if line["step"] == 1)
    assert first["loss"] == pytest.approx(float(expected), rel=1e-5)
    assert first["head_losses"] == pytest.approx([float(loss) for loss in losses], rel=1e-5)


OTHER_FORMS = [("untied", 1), ("untied", 2), ("shared", 1), ("tied", 1), ("tied", 2)]


@pytest.mark.parametrize(
    ("lm_head", "num_layers"),
    [("shared", 2), *(pytest.param(*form, marks=pytest.mark.slow) for form in OTHER_FORMS)],
)
def test_heads_learn_what_can_be_learned(make_spec, lm_head, num_layers):
    spec = make_spec(epochs=24, lm_head=lm_head, num_layers=num_layers)
    summary = train(spec)
    before, after = next(read_metrics(spec.path))["held_out"], summary["held_out"]
    assert all(end["loss"] < 0.5 * start["loss"] for start, end in zip(before, after, strict=True))
    assert (
        all(head["top1"] > 0.5 for head in after) and before[0]["top1"] < 0.1
    )  # the target's own guess is t+1


def test_tied_heads_never_train_the_lm_head(make_spec):
    spec = make_spec(lm_head="tied")
    train(spec)
    heads = read_trained_heads(spec.heads_path)
    assert heads.shape.lm_head == "tied" and torch.equal(heads.lm_head, read_lm_head(spec.target))
    assert heads.block_weight.any()
    assert not any(
        "lm_head" in name for path in spec.path.glob("checkpoints/*") for name in load_file(path)
    )


@pytest.mark.parametrize("lm_head", ["untied", "shared", "tied"])
@pytest.mark.parametrize("soft_labels", [0.0, 0.4])
def test_one_step_moves_the_weights_by_the_gradient_of_the_paper(make_spec, lm_head, soft_labels):
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

    logits_KVN = plain(batch.hidden_ND).mT
    sums_K = cross_entropy(logits_KVN, batch.labels_KN, reduction="none").sum(1)
    if soft_labels:
        # What the target predicts before a token is, in these rows, said by that token alone.
        p_KNV = (STATES @ read_lm_head(spec.target).T).softmax(1)[batch.labels_KN.clamp(min=0)]
        soft_KN = -(p_KNV * plain(batch.hidden_ND).log_softmax(2)).sum(2)
        sums_K = (1 - soft_labels) * sums_K + soft_labels * (
            soft_KN * (batch.labels_KN != IGNORED)
        ).sum(1)
    counts_K = (batch.labels_KN != IGNORED).sum(1)
    loss = sum(0.8 ** (k + 1) * sums_K[k] / counts_K[k] for k in range(3))
    trained = [parameter for parameter in plain.parameters() if parameter.requires_grad]
    loss.backward()
    norm = torch.sqrt(sum((parameter.grad**2).sum() for parameter in trained))
    assert norm > 0.5
    for parameter in trained:
        parameter.grad *= 0.5 / norm
    torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.0, foreach=False, fused=False).step()
    for (name, ours), (_, theirs) in zip(
        trainer.learner.heads.named_parameters(), plain.named_parameters(), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6, msg=name)


def test_a_head_without_labels_adds_nothing_and_does_not_move(make_spec):
    spec = make_spec(lr=1e-3, warmup_steps=0)
    batch = Batch(*all_positions(spec, "train"))
    batch.labels_KN[2] = IGNORED
    trainer, start = trainer_of(spec), initial_heads(spec)
    figures = trainer.step(0, [batch])
    heads = trainer.learner.heads
    assert figures["loss"] == pytest.approx(
        sum(0.8 ** (k + 1) * figures["head_losses"][k] for k in range(2))
    )
    assert figures["head_losses"][2] == 0
    moved_K = heads.lm_head.ne(start.lm_head).flatten(1).any(1) & heads.block_weight[0].any((1, 2))
    assert moved_K.tolist() == [True, True, False]


def test_draft_vocabulary_is_what_train_rows_hold_most_often(make_spec):
    spec = make_spec(draft_vocab=10)
    counts: Counter[int] = Counter()
    for row in (row for path in spec.shards for row in read_rows(path)):
        for span in row["spans"]:
            if row["split"] == "train" and span["role"] == "assistant":
                counts.update(row["input_ids"][span["start"] : span["end"]])
    by_frequency = sorted(range(V), key=lambda token: (-counts[token], token))
    assert initial_heads(spec).vocabulary.token_map.tolist() == sorted(by_frequency[:10])


def test_every_position_with_a_label_is_learned_once_per_epoch(make_spec):
    spec = make_spec(epochs=2)
    assert train(spec)["tokens"] == 2 * len(all_positions(spec, "train")[0])


def test_a_loss_that_is_not_finite_stops_with_a_readable_error_and_spoils_no_checkpoint(
    make_spec, monkeypatch
):
    spec = make_spec(checkpoint_every=1)
    spoil = iter([False, False, True])
    hidden = MedusaHeads.hidden

    def spoiled(self, states, *rest):
        result = hidden(self, states, *rest)
        return result * torch.inf if torch.is_grad_enabled() and next(spoil) else result

    monkeypatch.setattr(MedusaHeads, "hidden", spoiled)
    with pytest.raises(CheckFailed, match=r"diverged.*Lower train\.lr"):
        train(spec)
    assert not spec.heads_path.exists()
    newest = sorted(spec.path.glob("checkpoints/*"))[-1]
    assert newest.name == "step-00000002.safetensors"
    assert all(
        tensor.isfinite().all()
        for tensor in load_file(newest).values()
        if tensor.is_floating_point()
    )


def test_bf16_products_stay_close_to_fp32_and_weights_stay_fp32(make_spec):
    full, half = make_spec("full"), make_spec("half", precision="bf16")
    expected, found = train(full), train(half)
    assert found["final_loss"] == pytest.approx(expected["final_loss"], rel=0.03)
    assert found["final_loss"] != expected["final_loss"]
    assert {tensor.dtype for tensor in load_file(half.heads_path).values()} == {torch.float32}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_states_in_half_precision_train_fp32_heads(make_spec, half_shards, precision):
    spec = make_spec(shards=half_shards, precision=precision)
    train(spec)
    first, *_, last = [line["loss"] for line in read_metrics(spec.path) if "loss" in line]
    assert last < 0.8 * first
    assert {tensor.dtype for tensor in load_file(spec.heads_path).values()} == {torch.float32}


def test_an_lm_head_of_another_size_than_the_configuration_says_is_refused(make_spec):
    spec = make_spec()
    wrong = TrainSpec(**{**vars(spec), "vocab_size": 41})
    with pytest.raises(ConfigError, match=r"40 x 32.*41 x 32"):
        train(wrong)


def test_rows_without_anything_to_learn_are_refused(make_spec):
    spec = make_spec()
    nothing = TrainSpec(**{**vars(spec), "shards": ()})
    with pytest.raises(DataError, match="No train row"):
        train(nothing)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_missing_gpu_is_an_environment_fault(make_spec):
    with pytest.raises(EnvironmentFault, match="GPU"):
        train(TrainSpec(**{**vars(make_spec()), "device": "cuda"}))


def test_figures_reach_tensorboard(make_spec):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    spec = make_spec()
    summary = train(spec)
    board = EventAccumulator(str(spec.path / "tensorboard")).Reload()
    assert [event.step for event in board.Scalars("loss")] == list(range(1, summary["steps"] + 1))
    last = board.Scalars("held_out/head_1/top1")[-1]
    assert last.value == pytest.approx(summary["held_out"][1]["top1"])
