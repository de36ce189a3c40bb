from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy, kl_div
from transformers import AutoModelForCausalLM

from pipeline.artifacts.trained_heads import read_trained_heads
from pipeline.errors import DataError
from pipeline.storage.shards import read_rows
from pipeline.targets.lm_head import read_lm_head
from pipeline.training import heads_and_backbone as room
from pipeline.training.metrics import read_metrics
from pipeline.training.optimizers import trainable_parameters
from pipeline.training.task import TrainSpec
from pipeline.training.trainer import Trainer, train
from tests.training.trainings import trainer_of


def disturb(trainer: Trainer) -> None:
    """Give the adapter and the heads weights that matter."""
    draw, learner = torch.Generator().manual_seed(5), trainer.learner
    for name, weight in [*learner.backbone.named_parameters(), *learner.heads.named_parameters()]:
        if "lora_B" in name or "block" in name:
            weight.data = 0.1 * torch.randn(weight.shape, generator=draw)


def plain_losses(trainer: Trainer, rows: list[dict]) -> tuple[torch.Tensor, torch.Tensor]:
    """The losses of backbone and heads by their definitions: row after row through peft's own
    model, full logits, positions in a loop.
    """
    settings, learner = trainer.settings, trainer.learner
    soft_labels, model = settings.soft_labels, learner.backbone.tuned
    backbone: list[torch.Tensor] = []
    heads: list[list[torch.Tensor]] = [[] for _ in range(settings.num_heads)]
    for row in rows:
        ids = torch.tensor(row["input_ids"])
        found = model(input_ids=ids[None], output_hidden_states=True, use_cache=False)
        with torch.no_grad(), model.disable_adapter():
            original = model(input_ids=ids[None], use_cache=False).logits[0]
        logits, guesses = found.logits[0], learner.heads(found.hidden_states[-1][0])
        for span in row["spans"]:
            if span["role"] not in settings.roles:
                continue
            for position in range(span["start"] - 1, span["end"] - 1):
                if settings.backbone.loss == "ce":
                    backbone.append(cross_entropy(logits[position], ids[position + 1]))
                else:
                    p, q = original[position].log_softmax(0), logits[position].log_softmax(0)
                    backbone.append(kl_div(q, p, reduction="sum", log_target=True))
                for k in range(min(settings.num_heads, span["end"] - position - 2)):
                    guess, teacher = guesses[k, position], original[position + 1 + k].softmax(0)
                    hard = cross_entropy(guess, ids[position + 2 + k])
                    soft = cross_entropy(guess, teacher)
                    heads[k].append((1 - soft_labels) * hard + soft_labels * soft)
    of_heads = [0.8 ** (k + 1) * torch.stack(each).mean() for k, each in enumerate(heads)]
    return torch.stack(backbone).mean(), torch.stack(of_heads).sum()


def rows_of(spec: TrainSpec, split: str = "train") -> list[dict]:
    return [row for path in spec.texts for row in read_rows(path) if row["split"] == split]


def adapter_of(spec: TrainSpec) -> dict[str, torch.Tensor]:
    return load_file(spec.adapter_path / "adapter_model.safetensors")


@pytest.mark.parametrize("loss", ["kl", "ce"])
@pytest.mark.parametrize(
    ("micro_batch", "soft_labels", "lm_head"),
    [(1, 0.0, "untied"), (3, 0.0, "shared"), (3, 0.5, "untied")],
)
def test_one_step_follows_the_gradients_of_both_losses(
    make_tuning, loss, micro_batch, soft_labels, lm_head
):
    """Against autograd over full logits of unpacked rows, clipped, and torch's own AdamW at two
    learning rates. The heads learn from the whole of their loss, the backbone from a fifth of it.
    """
    spec = make_tuning(
        backbone_loss=loss,
        soft_labels=soft_labels,
        lm_head=lm_head,
        micro_batch=micro_batch,
        batch_sequences=100,
        lora_dropout=0.0,
        roles=("assistant", "user"),
        max_grad_norm=0.5,
        warmup_steps=0,
        lr=1e-3,
        backbone_lr=2.5e-4,
    )
    assert spec.settings.backbone.schedule == "constant"
    ours, plain = trainer_of(spec), trainer_of(spec)
    disturb(ours), disturb(plain)
    metrics = ours.step(0, next(ours.learner.steps(0))).metrics

    of_backbone, of_heads = plain_losses(plain, rows_of(spec))
    expected = float((of_backbone + of_heads).detach())
    assert metrics["loss"] == pytest.approx(expected, rel=1e-4)
    groups, norms = [], []
    for module, loss_of, lr in (
        (plain.learner.heads, of_heads, 1e-3),
        (plain.learner.backbone, of_backbone + 0.2 * of_heads, 2.5e-4),
    ):
        parameters = list(trainable_parameters(module).values())
        gradients = torch.autograd.grad(loss_of, parameters, retain_graph=True)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        norms.append(torch.nn.utils.clip_grad_norm_(parameters, 0.5))
        groups.append({"params": parameters, "lr": lr})
    assert metrics["grad_norm"] == pytest.approx(float(torch.stack(norms).norm()), rel=1e-3)
    torch.optim.AdamW(groups, weight_decay=0.0, foreach=False, fused=False).step()
    for name, weight in ours.trained.items():
        expected = plain.trained[name]
        torch.testing.assert_close(weight.grad, expected.grad, rtol=1e-3, atol=1e-5, msg=name)
        torch.testing.assert_close(weight, expected, rtol=1e-3, atol=2e-5, msg=name)


def test_the_saved_adapter_and_heads_have_the_reported_figures(make_tuning):
    from peft import PeftModel  # slow to import

    spec = make_tuning()
    result = train(spec)
    target = AutoModelForCausalLM.from_pretrained(spec.target.model)
    model = PeftModel.from_pretrained(target, spec.adapter_path).eval()
    original = AutoModelForCausalLM.from_pretrained(spec.target.model).eval()
    heads, hits, labels, kl, positions = read_trained_heads(spec.heads_path), 0, 0, 0.0, 0
    with torch.no_grad():
        for row in rows_of(spec, "calibrate"):
            ids = torch.tensor(row["input_ids"])
            found = model(input_ids=ids[None], output_hidden_states=True)
            log_p = original(input_ids=ids[None]).logits[0].log_softmax(1)
            log_q = found.logits[0].log_softmax(1)
            guesses = heads(found.hidden_states[-1][0])[0].argmax(1)
            for span in row["spans"]:
                if span["role"] == "assistant":
                    start, end = span["start"], span["end"]
                    at = slice(start - 1, end - 1)
                    kl += float((log_p[at].exp() * (log_p[at] - log_q[at])).sum())
                    positions += end - start
                    hits += int((guesses[start - 1 : end - 2] == ids[start + 1 : end]).sum())
                    labels += end - start - 1
    assert result.drift.kl == pytest.approx(kl / positions, rel=1e-3)
    assert result.drift.positions == positions
    assert result.held_out[0]["top1"] == pytest.approx(hits / labels)
    spans = [span for row in rows_of(spec) for span in row["spans"] if span["role"] == "assistant"]
    written = sum(span["end"] - span["start"] for span in spans)
    assert result.tokens == spec.settings.epochs * written


def test_tied_heads_keep_the_lm_head_beside_its_adapter(make_tuning):
    spec = make_tuning(lm_head="tied", epochs=2)
    train(spec)
    heads = read_trained_heads(spec.heads_path)
    assert heads.shape.lm_head == "tied" and torch.equal(heads.lm_head, read_lm_head(spec.target))
    assert adapter_of(spec)["base_model.model.lm_head.lora_B.weight"].any()


def test_heads_weight_and_learning_rates_follow_their_schedules(make_tuning):
    spec = make_tuning(schedule="linear", lambda_0=0.1, warmup_steps=2, lr=4e-3, backbone_lr=2e-3)
    total = train(spec).steps
    lines = [line for line in read_metrics(spec.path) if "loss" in line]
    weights = [0.1 * step / total for step in range(total)]
    assert [line["heads_weight"] for line in lines] == pytest.approx(weights)
    assert [line["lr"] for line in lines[:3]] == pytest.approx([0, 2e-3, 4e-3])
    assert all(line["backbone_lr"] == pytest.approx(line["lr"] / 2) for line in lines)


@pytest.mark.slow
def test_two_stages_are_medusa1_and_then_both_together(make_tuning):
    spec = make_tuning(recipe="two-stage")
    result = train(spec)
    begun = next(read_metrics(spec.path))["held_out"]
    untrained = next(read_metrics(spec.path / "heads-first"))["held_out"]
    for ours, theirs in zip(begun, untrained, strict=True):
        assert ours["loss"] < 0.9 * theirs["loss"]
    assert train(spec) == result and result.to_json()["heads_first"]["steps"] > 0


@pytest.mark.slow
def test_a_half_precision_target_trains_an_fp32_adapter(make_tuning):
    spec = make_tuning(precision="bf16", lora_dropout=0.0)
    spec = replace(spec, target=replace(spec.target, dtype="bfloat16"))
    result = train(spec)
    assert next(read_metrics(spec.path))["drift"]["kl"] == 0 < result.drift.kl < 0.1
    tensors = [*load_file(spec.heads_path).values(), *adapter_of(spec).values()]
    assert {tensor.dtype for tensor in tensors} == {torch.float32}


def test_training_needs_text_to_learn_and_to_hold_out(make_tuning, monkeypatch):
    spec = make_tuning(epochs=1)
    with pytest.raises(DataError, match=r"train\.roles"):
        train(replace(spec, texts=()))
    monkeypatch.setattr(room, "SPLIT", "nothing")
    with pytest.raises(DataError, match=r"sequence_length"):
        train(spec)
    assert not spec.heads_path.exists()
