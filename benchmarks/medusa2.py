"""Benchmark of a Medusa-2 training step with chunked losses over a step with full logits.

Claim: the chunked step takes at most half of the memory and is about as fast.

Measured: `Trainer.step` (forward of the tuned and of the original model, KL, heads, backward,
AdamW). Against: the same step written plainly, with the logits of both models at every position and
of every head held at once and gradients left to autograd. Packed sequences, adapter, optimizer and,
as `largest_loss_difference` shows, losses are the same. A step's memory is its peak beyond the
memory that the trainer holds before the step. With a GPU, a model of 7B shape is measured too, in
bf16, as a share of the peak.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch.nn.functional import kl_div

from benchmarks import rows, targets
from benchmarks.arithmetic import (
    Peak,
    backbone_flops,
    peak_memory_gb,
    reset_peak_memory,
    synchronize,
    training_flops,
)
from benchmarks.claims import Claim, Result, in_turns, rates, ratio, speed_ratio
from pipeline.config import BackboneConfig, TrainConfig
from pipeline.conversations.spans import IGNORED
from pipeline.storage.shards import ShardTask
from pipeline.targets.spec import TargetSpec
from pipeline.training.heads_and_backbone import BackboneLearner, MicroBatch
from pipeline.training.task import TrainSpec, Workers
from pipeline.training.trainer import Trainer
from tests.heads.plain_loss import plain_summed_cross_entropy

SPEED_AIM, MEMORY_AIM, PEAK_AIM = 0.95, 0.5, 40.0
WIDE = targets.BACKBONE | {"vocab_size": 32_000, "num_hidden_layers": 4}
LLAMA_7B = WIDE | {
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
CPU, PAGE_GB = torch.device("cpu"), 4096 / 1e9


@dataclass(frozen=True)
class Case:
    """A Medusa-2 training of a random target, with `batch_sequences` sequences per step."""

    what: str
    shape: dict[str, int]
    dtype: str
    device: torch.device
    sequence_length: int
    batch_sequences: int
    num_heads: int
    rounds: int
    against_plain: bool = True


def measure(*, tiny: bool = False) -> Result:
    """Measure a small model with a relatively large vocabulary and, on a GPU, one of 7B shape."""
    small = Case("tiny", targets.TINY, "float32", CPU, 64, 2, 2, 1)
    cases = (
        [small]
        if tiny
        else [Case("4 layers of 512, 32k words", WIDE, "float32", CPU, 512, 1, 3, 3)]
    )
    if torch.cuda.is_available() and not tiny:
        cases.append(
            Case("7B shape, bf16", LLAMA_7B, "bfloat16", torch.device("cuda"), 2048, 8, 5, 3, False)
        )
    claims: list[Claim] = []
    facts = []
    for case in cases:
        with tempfile.TemporaryDirectory() as directory:
            found, fact = _measured(case, Path(directory))
        claims += found
        facts.append(fact)
    return Result(claims, {"written_share": rows.WRITTEN_SHARE, "cases": facts})


def _measured(case: Case, directory: Path) -> tuple[list[Claim], dict[str, Any]]:
    target = targets.random_target(directory / "target", case.shape, case.dtype)
    made = rows.equal_rows(
        4 * case.batch_sequences, 2, case.sequence_length // 4, case.shape["vocab_size"]
    )
    spec = _spec(case, target, rows.features_tasks(directory, [made]), directory)
    ours = Steps(BackboneLearner(spec, Workers(), case.device), case.device)
    work = ours.num_positions
    facts: dict[str, Any] = {
        "case": case.what,
        "positions_per_step": work,
        "sequence_length": case.sequence_length,
    }
    if case.against_plain:
        plain = Steps(PlainLearner(spec, Workers(), case.device), case.device)
        seconds = in_turns({"chunked": ours.run, "full logits": plain.run}, case.rounds)
        pairs = zip(ours.losses, plain.losses, strict=True)
        facts["largest_loss_difference"] = max(abs(one - other) for one, other in pairs)
        sides = {"chunked, GB": median(ours.memory_gb), "full logits, GB": median(plain.memory_gb)}
        less_memory = sides["chunked, GB"] / sides["full logits, GB"]
        what = f"memory of a step, chunked over full logits, {case.what}"
        less = Claim(what, less_memory, aim=MEMORY_AIM, at_most=True, sides=sides)
        fast = speed_ratio(
            f"chunked over full logits, {case.what}", seconds, work, "positions", SPEED_AIM
        )
        return [fast, less], facts
    peak = Peak(case.device, getattr(torch, case.dtype), 8192)
    seconds = in_turns({"peak": peak.run, "step": ours.run}, case.rounds)
    needed = ours.flops()
    sides = {
        "positions/s": work / median(seconds["step"]),
        "peak GPU memory, GB": peak_memory_gb(case.device),
    }
    done, peaks = rates(needed, seconds["step"]), rates(peak.flops, seconds["peak"])
    return [
        ratio(f"share of the peak, {case.what}", done, peaks, sides, unit="%", aim=PEAK_AIM)
    ], facts


class Steps:
    """Timed Medusa-2 steps of a trainer, with the peak memory of a step."""

    def __init__(self, learner: BackboneLearner, device: torch.device):
        self.learner, self._device = learner, device
        self._trainer = Trainer(learner)
        self._batches = [batch.texts for batch in learner.batches(0)]
        self.num_positions = sum(len(batch.next_N) for batch in self._batches)
        self.losses: list[float] = []
        self.memory_gb: list[float] = []
        self._step = count()

    def run(self) -> float:
        held = reset_peak_memory(self._device)
        started = perf_counter()
        step = next(self._step)
        self.losses.append(self._trainer.step(step, list(self.learner.batches(step))).loss)
        synchronize(self._device)
        seconds = perf_counter() - started
        self.memory_gb.append(max(PAGE_GB, peak_memory_gb(self._device) - held))
        return seconds

    def flops(self) -> float:
        """Return a step's FLOPs: backbone and lm_head twice forward, once backward, and heads."""
        backbone: Any = self.learner.backbone.tuned
        config = self.learner.heads.shape
        labels = sum(int((batch.labels_KN != IGNORED).sum()) for batch in self._batches)
        lengths = [batch.ids_BT.shape[1] for batch in self._batches]
        layers = 3 * backbone_flops(backbone.get_base_model(), lengths)
        lm_head = 6 * config.vocab_size * config.hidden_size * self.num_positions
        return layers + lm_head + training_flops(config, self.num_positions, labels)


class PlainLearner(BackboneLearner):
    """The Medusa-2 learner with losses computed by their definition, from full logits."""

    def loss(
        self, micro_batch: MicroBatch, weights_C: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        batch = micro_batch.texts.to(self.device)
        model: Any = self.backbone.tuned
        inputs = {"input_ids": batch.ids_BT, "position_ids": batch.positions_BT, "use_cache": False}
        with self.autocast():
            found = model(**inputs, output_hidden_states=True)
            with torch.no_grad(), model.disable_adapter():
                original = model(**inputs).logits
            hidden_ND = found.hidden_states[-1].flatten(0, 1)[batch.learned_N]
            hidden_KND = self.heads.hidden(hidden_ND)
        log_p, log_q = (
            logits.float().log_softmax(-1).flatten(0, 1)[batch.learned_N]
            for logits in (original, found.logits)
        )
        divergence = kl_div(log_q, log_p, reduction="sum", log_target=True)
        head_losses_K = plain_summed_cross_entropy(hidden_KND, self.heads.lm_head, batch.labels_KN)
        losses_C = torch.cat([divergence[None], head_losses_K])
        return (weights_C * losses_C).sum(), losses_C.detach()


def _spec(case: Case, target: TargetSpec, tasks: Sequence[ShardTask], directory: Path) -> TrainSpec:
    settings = TrainConfig(
        heads="medusa",
        method="medusa-2",
        num_heads=case.num_heads,
        epochs=100,
        warmup_steps=0,
        lr=1e-3,
        soft_labels=0.0,
        backbone=BackboneConfig(
            schedule="constant",
            lora_rank=16,
            sequence_length=case.sequence_length,
            batch_sequences=case.batch_sequences,
            gradient_checkpointing=case.device.type == "cuda",
        ),
    )
    return rows.train_spec(target, settings, directory, tasks, case.device)
