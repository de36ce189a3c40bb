from __future__ import annotations

import weakref
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy, kl_div
from transformers import AutoModelForCausalLM

from pipeline.artifacts.trained_heads import read_trained_heads
from pipeline.conversations.spans import IGNORED
from pipeline.errors import CheckFailed, DataError
from pipeline.execution.progress import ProgressReporter
from pipeline.storage.shards import read_rows
from pipeline.targets.lm_head import read_lm_head
from pipeline.training import heads_and_backbone as room
from pipeline.training import phases
from pipeline.training.metrics import read_metrics
from pipeline.training.optimizers import trained
from pipeline.training.phases import count_steps, train
from pipeline.training.task import TrainSpec
from pipeline.training.trainer import Trainer
from tests.training.trainings import trainer_of

CPU = torch.device("cpu")


def disturb(trainer: Trainer) -> None:
    """Give the adapter and the heads something to say."""
    draw, learner = torch.Generator().manual_seed(5), trainer.learner
    for name, weight in [*learner.backbone.named_parameters(), *learner.heads.named_parameters()]:
        if "lora_B" in name or "block" in name:
            weight.data = 0.1 * torch.randn(weight.shape, generator=draw)


def plain_loss(trainer: Trainer, rows: list[dict]) -> torch.Tensor:
    """The total loss by its definition: row after row through peft's own model, full logits,
    positions in a loop.
    """
    settings, learner = trainer.settings, trainer.learner
    backbone: list[torch.Tensor] = []
    heads: list[list[torch.Tensor]] = [[] for _ in range(settings.num_heads)]
    model = learner.backbone.tuned
    for row in rows:
        ids = torch.tensor(row["input_ids"])
        found = model(input_ids=ids[None], output_hidden_states=True, use_cache=False)
        with torch.no_grad(), model.disable_adapter():
            original = model(input_ids=ids[None], use_cache=False).logits[0]
        logits, hidden = found.logits[0], found.hidden_states[-1][0]
        guesses = learner.heads(hidden)
        for span in row["spans"]:
            if span["role"] not in settings.roles:
                continue
            for position in range(span["start"] - 1, span["end"] - 1):
                if settings.backbone.loss == "ce":
                    backbone.append(cross_entropy(logits[position], ids[position + 1]))
                else:
                    p, q = original[position].log_softmax(0), logits[position].log_softmax(0)
                    backbone.append(kl_div(q, p, reduction="sum", log_target=True))
                for k in range(settings.num_heads):
                    if position + 2 + k < span["end"]:
                        hard = cross_entropy(guesses[k, position], ids[position + 2 + k])
                        soft = cross_entropy(
                            guesses[k, position], original[position + 1 + k].softmax(0)
                        )
                        heads[k].append(
                            (1 - settings.soft_labels) * hard + settings.soft_labels * soft
                        )
    means = [torch.stack(losses).mean() for losses in heads]
    assert settings.backbone.schedule == "constant"
    return torch.stack(backbone).mean() + settings.backbone.lambda_0 * sum(
        0.8 ** (k + 1) * mean for k, mean in enumerate(means)
    )


def rows_of(spec: TrainSpec, split: str = "train") -> list[dict]:
    return [row for path in spec.texts for row in read_rows(path) if row["split"] == split]


@pytest.mark.parametrize("loss", ["kl", "ce"])
@pytest.mark.parametrize(
    ("micro_batch", "soft_labels", "lm_head"),
    [(1, 0.0, "untied"), (3, 0.0, "shared"), (3, 0.5, "untied")],
)
def test_one_step_moves_every_weight_by_the_gradient_of_the_paper(
    make_tuning, loss, micro_batch, soft_labels, lm_head
):
    """Against autograd over full logits of unpacked rows, clipped, and torch's own AdamW at two
    learning rates.
    """
    more = {
        "lora_dropout": 0.0,
        "roles": ("assistant", "user"),
        "max_grad_norm": 0.5,
        "warmup_steps": 0,
        "lr": 1e-3,
    }
    sizes = {"micro_batch": micro_batch, "batch_sequences": 100}
    spec = make_tuning(
        backbone_loss=loss, soft_labels=soft_labels, lm_head=lm_head, **sizes, **more
    )
    ours, plain = trainer_of(spec), trainer_of(spec)
    disturb(ours), disturb(plain)
    figures = ours.step(0, next(ours.learner.steps(0)))

    expected = plain_loss(plain, rows_of(spec))
    assert figures["loss"] == pytest.approx(float(expected.detach()), rel=1e-4)
    expected.backward()
    assert float(torch.nn.utils.clip_grad_norm_(plain.parameters, 0.5)) == pytest.approx(
        figures["grad_norm"], rel=1e-3
    )
    rates = [(plain.learner.heads, 1e-3), (plain.learner.backbone, 2.5e-4)]
    groups = [{"params": list(trained(module).values()), "lr": lr} for module, lr in rates]
    torch.optim.AdamW(groups, weight_decay=0.0, foreach=False, fused=False).step()
    for module in ("heads", "backbone"):
        theirs = trained(plain.learner.modules[module])
        for name, weight in trained(ours.learner.modules[module]).items():
            torch.testing.assert_close(weight, theirs[name], rtol=1e-3, atol=2e-5, msg=name)


def test_the_first_loss_is_that_of_the_target_s_own_prediction(make_tuning):
    spec = make_tuning(epochs=1, batch_sequences=100, warmup_steps=0)
    train(spec)
    trainer, rows = trainer_of(spec), rows_of(spec)
    with torch.no_grad():
        expected = float(plain_loss(trainer, rows))
    first = next(line for line in read_metrics(spec.path) if line["step"] == 1)
    assert first["loss"] == pytest.approx(expected, rel=1e-4) and first["backbone_loss"] == 0
    assert first["heads_weight"] == 0.2 and len(first["head_losses"]) == 3


@pytest.mark.slow
def test_heads_learn_and_the_backbone_stays_near_itself_by_kl_and_leaves_by_hard_labels(
    make_tuning,
):
    kept, left = (
        make_tuning(loss, backbone_loss=loss, epochs=8, lambda_0=0.05) for loss in ("kl", "ce")
    )
    summaries = [train(spec) for spec in (kept, left)]
    before = next(read_metrics(kept.path))["held_out"]
    for summary in summaries:
        assert all(
            end["loss"] < start["loss"]
            for start, end in zip(before, summary["held_out"], strict=True)
        )
    near, far = (summary["drift"] for summary in summaries)
    assert 0 < near["kl"] < 0.3 * far["kl"] and near["greedy_agreement"] > far["greedy_agreement"]
    change = far["perplexity"]["tuned"] / far["perplexity"]["original"] - 1
    assert far["perplexity_change"] == pytest.approx(change) and change < -0.1


def test_the_saved_adapter_and_heads_are_what_was_trained(make_tuning):
    from peft import PeftModel  # slow to import

    spec = make_tuning()
    summary = train(spec)
    model = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(spec.target.model), spec.adapter_path
    ).eval()
    original = AutoModelForCausalLM.from_pretrained(spec.target.model).eval()
    heads, hits, labels, kl, positions = read_trained_heads(spec.heads_path), 0, 0, 0.0, 0
    with torch.no_grad():
        for row in rows_of(spec, "calibrate"):
            ids = torch.tensor(row["input_ids"])
            found = model(input_ids=ids[None], output_hidden_states=True)
            before = original(input_ids=ids[None]).logits[0].log_softmax(1)
            guesses = heads(found.hidden_states[-1][0])[0].argmax(1)
            for span in row["spans"]:
                if span["role"] != "assistant":
                    continue
                at = slice(span["start"] - 1, span["end"] - 1)
                kl += float(
                    (before[at].exp() * (before[at] - found.logits[0, at].log_softmax(1))).sum()
                )
                positions += span["end"] - span["start"]
                reach = slice(span["start"] - 1, span["end"] - 2)
                hits += int((guesses[reach] == ids[span["start"] + 1 : span["end"]]).sum())
                labels += span["end"] - span["start"] - 1
    assert summary["drift"]["kl"] == pytest.approx(kl / positions, rel=1e-3)
    assert summary["drift"]["positions"] == positions
    assert summary["held_out"][0]["top1"] == pytest.approx(hits / labels)


def test_tied_heads_never_train_the_lm_head_and_the_adapter_still_adapts_it(make_tuning):
    spec = make_tuning(lm_head="tied", epochs=2)
    train(spec)
    heads = read_trained_heads(spec.heads_path)
    assert heads.shape.lm_head == "tied" and torch.equal(heads.lm_head, read_lm_head(spec.target))
    adapter = load_file(spec.adapter_path / "adapter_model.safetensors")
    assert adapter["base_model.model.lm_head.lora_B.weight"].any()


def test_every_target_written_token_is_learned_once_per_epoch(make_tuning):
    spec = make_tuning(epochs=2)
    spans = [span for row in rows_of(spec) for span in row["spans"] if span["role"] == "assistant"]
    summary = train(spec)
    assert summary["tokens"] == 2 * sum(span["end"] - span["start"] for span in spans)
    assert summary["tokens_beyond_sequence"] == 0 and summary["steps"] == count_steps(spec)


def test_what_is_cut_off_is_told(make_tuning):
    assert train(make_tuning(sequence_length=10, epochs=1))["tokens_beyond_sequence"] > 0


def test_heads_weight_and_learning_rates_follow_their_schedules(make_tuning):
    spec = make_tuning(schedule="linear", lambda_0=0.1, warmup_steps=2, lr=4e-3)
    total = train(spec)["steps"]
    lines = [line for line in read_metrics(spec.path) if "loss" in line]
    assert [line["heads_weight"] for line in lines] == pytest.approx(
        [0.1 * step / total for step in range(total)]
    )
    assert [line["lr"] for line in lines[:3]] == pytest.approx([0, 2e-3, 4e-3])
    assert all(line["backbone_lr"] == pytest.approx(line["lr"] / 4) for line in lines)
    other = make_tuning("other", backbone_lr=1e-5, warmup_steps=0, epochs=1)
    train(other)
    assert (
        next(line for line in read_metrics(other.path) if line["step"] == 1)["backbone_lr"] == 1e-5
    )


@pytest.mark.slow
def test_two_stages_are_medusa1_and_then_both_together(make_tuning, monkeypatch):
    spec = make_tuning(recipe="two-stage")
    shown, weights, alive = [], [], []

    class Watched(Trainer):
        def __init__(self, learner):
            super().__init__(learner)
            weights.extend(map(weakref.ref, self.parameters))

    def chosen(of):
        alive.append(sum(weight() is not None for weight in weights))
        return choose(of)

    choose = phases.choose_device
    monkeypatch.setattr(phases, "Trainer", Watched)
    monkeypatch.setattr(phases, "choose_device", chosen)
    summary = train(
        spec, progress=ProgressReporter(show=lambda now: shown.append((now.done, now.total)))
    )
    first = summary["heads_first"]
    assert alive == [0, 0] and weights, (
        "when the second begins, its memory is free of the first's weights and moments"
    )
    assert shown == sorted(shown) and set(shown) == {
        (step, count_steps(spec)) for step in range(summary["steps"] + first["steps"] + 1)
    }
    begun = next(read_metrics(spec.path))["held_out"]
    untaught = next(read_metrics(spec.path / "heads-first"))["held_out"]
    assert all(
        ours["loss"] < 0.9 * theirs["loss"] for ours, theirs in zip(begun, untaught, strict=True)
    )
    assert train(spec) == summary  # what is finished is not begun again


@pytest.mark.slow
def test_bf16_products_stay_close_to_fp32_and_what_is_trained_stays_fp32(make_tuning):
    full, half = (make_tuning(name, precision=name) for name in ("fp32", "bf16"))
    expected, found = train(full), train(half)
    assert found["final_loss"] == pytest.approx(expected["final_loss"], rel=0.05)
    assert found["final_loss"] != expected["final_loss"]
    for file in (half.heads_path, half.adapter_path / "adapter_model.safetensors"):
        assert {tensor.dtype for tensor in load_file(file).values()} == {torch.float32}


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_target_in_half_precision_trains_an_fp32_adapter_from_no_drift(make_tuning, precision):
    spec = make_tuning(precision=precision, lora_dropout=0.0)
    spec = replace(spec, target=replace(spec.target, dtype="bfloat16"))
    summary = train(spec)
    lines = list(read_metrics(spec.path))
    assert lines[0]["drift"]["kl"] == 0 and 0 < summary["drift"]["kl"] < 0.1
    assert lines[-1]["head_losses"][0] < lines[1]["head_losses"][0]
    assert {
        tensor.dtype
        for tensor in load_file(spec.adapter_path / "adapter_model.safetensors").values()
    } == {torch.float32}


def test_rows_without_anything_to_learn_are_refused(make_tuning):
    with pytest.raises(DataError, match="No train row"):
        train(replace(make_tuning(), texts=()))


def test_a_loss_that_is_not_finite_stops_with_a_readable_error(make_tuning, monkeypatch):
    spec = make_tuning()
    monkeypatch.setattr(room, "summed_divergence", lambda hidden, *_: hidden.sum() * torch.inf)
    with pytest.raises(CheckFailed, match=r"diverged.*Lower train\.lr"):
        train(spec)
    assert not spec.heads_path.exists() and not spec.adapter_path.exists()


def test_training_leaves_the_caller_s_random_numbers_alone(make_tuning):
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    train(make_tuning(epochs=1))
    assert torch.equal(torch.rand(3), expected)


def test_labels_of_heads_and_backbone_are_counted_apart(make_tuning):
    spec = make_tuning(batch_sequences=100)
    batches = [batch.texts for batch in trainer_of(spec).learner.batches(0)]
    assert sum(len(batch.next_N) for batch in batches) > sum(
        int((b.labels_KN[0] != IGNORED).sum()) for b in batches
    )
