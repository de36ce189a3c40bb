"""The trainer: one loop, one step and one resume, whatever is learned and from what.

A `Learner` says what trains, which batches a step reads, what they lose and what is written in the
end. The trainer divides each component of the loss by its labels over all micro-batches of all
workers, so that neither how a step is cut up nor how many workers share it changes the curve beyond
rounding. Weights are fp32; with bf16, products are. A run that was interrupted continues from its
newest whole checkpoint at the very next step; on a CPU it ends with the same weights, bit for bit.
What is written is the state with the lowest loss on held-out text; training that has stopped
improving there ends.

Letters: C components of the loss.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.artifacts.trained_heads import write_heads
from pipeline.errors import CheckFailed
from pipeline.execution.progress import ProgressReporter
from pipeline.training.checkpoints import Checkpoints
from pipeline.training.learner import Learner
from pipeline.training.metrics import MetricsLog
from pipeline.training.optimizers import (
    load_optimizer,
    make_optimizer,
    optimizer_tensors,
    set_lr,
    trained,
)
from pipeline.training.train_state import TrainState


class Trainer:
    """A learner, its optimizer, and one step after another."""

    def __init__(self, learner: Learner):
        self.learner, self.settings = learner, learner.spec.settings
        self.optimizer = make_optimizer(learner.modules, learner.peak_lrs, self.settings)
        self.modules = nn.ModuleDict(learner.modules)
        self.trained = trained(self.modules)
        self.parameters = list(self.trained.values())
        self.best: dict[
            str, Tensor
        ] = {}  # the best state on held-out text, on the first worker's CPU

    def step(self, step: int, batches: Sequence[Any]) -> dict[str, Any]:
        """One optimizer step, of which this worker computes a share; returns the figures of the
        whole.
        """
        learner, workers = self.learner, self.learner.workers
        counts_C = workers.sum(learner.label_counts(batches)).clamp(min=1)
        weights_C = (
            learner.loss_weights(step) / counts_C
        )  # every worker divides by the labels of the whole step

        self.optimizer.zero_grad(set_to_none=True)
        self.modules.train()
        sums_C = torch.zeros(len(counts_C), device=learner.device)
        for batch in batches:
            losses_C = learner.summed_losses(batch, weights_C)
            (weights_C * losses_C).sum().backward()
            sums_C += losses_C.detach()
        self.modules.eval()

        workers.sum(sums_C)
        workers.sum_all(self._gradients())
        norm = nn.utils.clip_grad_norm_(self.parameters, self.settings.max_grad_norm)
        scalars = torch.stack([(weights_C * sums_C).sum(), norm, counts_C[0]])
        loss, grad_norm, positions, *means = torch.cat([scalars, sums_C / counts_C]).tolist()
        share = learner.lr_share(step)
        lr = share * learner.recipe.lr
        self._require_finite(loss, grad_norm, lr)
        set_lr(self.optimizer, share)
        self.optimizer.step()
        figures = {"loss": loss, **learner.figures(step, means), "grad_norm": grad_norm, "lr": lr}
        return figures | {"positions": int(positions)}

    def run(
        self, progress: ProgressReporter, steps_before: int = 0, steps_after: int = 0
    ) -> dict[str, Any]:
        """Every step that is left, or until held-out text gains nothing; writes the best state,
        returns the summary.

        `steps_before` and `steps_after` are those of other phases, for the progress.
        """
        learner, spec, total = self.learner, self.learner.spec, self.learner.total_steps
        is_first = learner.workers.is_first
        with ExitStack() as stack:
            checkpoints = stack.enter_context(Checkpoints(spec.path / "checkpoints", self.settings))
            state = self.resume(checkpoints)
            log = (
                MetricsLog(spec.watched, state.step, self.settings.report_to) if is_first else None
            )
            stack.enter_context(log or nullcontext())
            progress.begin(
                "", steps_before + total + steps_after, done=steps_before + state.step, unit="steps"
            )
            if state.step == 0:
                figures = self.evaluate(state)
                if log:
                    log.write(0, figures)
            started = time.monotonic()
            for batches in learner.steps(state.step):
                if state.stale >= self.settings.patience:
                    break
                figures = self.step(state.step, batches)
                state.advance(figures["loss"], figures.pop("positions"), time.monotonic() - started)
                figures |= {"tokens": state.tokens, "tokens_per_second": state.tokens_per_second}
                if learner.evaluates_after(state.step):
                    figures |= self.evaluate(state)
                if log:
                    log.write(
                        state.step, {"epoch": state.step / learner.steps_per_epoch, **figures}
                    )
                if is_first and checkpoints.due(state.step):
                    self.save(checkpoints, state)
                said = f"loss {figures['loss']:.3f}, {state.tokens_per_second:,.0f} positions/s"
                progress.update(steps_before + state.step, said)
                started = time.monotonic()
            summary = (
                state.summary() | {"hyperparameters": learner.recipe.facts()} | learner.facts()
            )
            summary |= log.conclude(summary) if log else {}
        if self.best and state.best_step not in (None, state.step):
            self.modules.load_state_dict(self.best, strict=False)  # what is frozen is not in it
        if is_first:
            learner.write()
            write_heads(
                spec.heads_path, learner.heads, summary
            )  # last: where they are, training is finished
        return summary

    def evaluate(self, state: TrainState) -> dict[str, Any]:
        """Figures on held-out text; the weights are kept where they are the best so far."""
        figures = self.learner.evaluate()
        is_best = state.record_evaluation(figures, self.learner.held_out_loss(figures))
        if is_best and self.learner.workers.is_first:
            self.best = {
                name: weight.detach().to("cpu", copy=True) for name, weight in self.trained.items()
            }
        return figures

    def save(self, checkpoints: Checkpoints, state: TrainState) -> None:
        """Hand a copy of everything that a resume needs to the checkpoint writer."""
        tensors, numbers = optimizer_tensors(self.optimizer)
        held = {f"optimizer/{name}": tensor for name, tensor in tensors.items()}
        held |= {f"modules/{name}": tensor for name, tensor in self.trained.items()}
        if state.best_step != state.step:
            held |= {f"best/{name}": tensor for name, tensor in self.best.items()}
        checkpoints.save(state.step, held, {"train_state": asdict(state), "optimizer": numbers})

    def resume(self, checkpoints: Checkpoints) -> TrainState:
        """Go back to the newest whole checkpoint, the same on every worker; a new state where there
        is none.
        """
        workers, device = self.learner.workers, self.learner.device
        step = checkpoints.newest(workers, device)
        if step is None:
            return TrainState()
        tensors, state = checkpoints.load(step)
        found: dict[str, dict[str, Tensor]] = {"modules": {}, "optimizer": {}, "best": {}}
        for name, tensor in tensors.items():
            part, _, rest = name.partition("/")
            found[part][rest] = (
                tensor if part == "best" else tensor.to(device)
            )  # which a GPU need not hold
        assert found["modules"].keys() == self.trained.keys(), (
            "a checkpoint has what trains, all of it"
        )
        self.modules.load_state_dict(found["modules"], strict=False)  # what is frozen is not in it
        load_optimizer(self.optimizer, found["optimizer"], state["optimizer"])
        if workers.is_first:
            self.best = {
                name: tensor.cpu() for name, tensor in (found["best"] or found["modules"]).items()
            }
        return TrainState(**state["train_state"])

    def _gradients(self) -> list[Tensor]:
        """The gradient of every parameter; zero where no forward has run, so that all workers sum
        the same ones.
        """
        gradients = []
        for weight in self.parameters:
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            gradients.append(weight.grad)
        return gradients

    def _require_finite(self, loss: float, grad_norm: float, lr: float) -> None:
        """Raise CheckFailed where training has diverged; no later checkpoint is written."""
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            what = (
                f"Training diverged: at a learning rate of {lr:.2g} the loss is {loss}, its"
                " gradient's norm "
            )
            fix = "Lower train.lr, raise train.warmup_steps or set train.precision: fp32."
            raise CheckFailed(f"{what}{grad_norm}.", self.learner.spec.directory, fix)
