"""The trainer: one loop, one step and one resume, whatever is learned and from what.

A `Learner` says what trains, which batches a step reads, what they lose and what is written in the end. The trainer
divides each component of the loss by its labels over all micro-batches of all workers, so that neither how a step is
cut up nor how many workers share it changes the curve beyond rounding. Weights are fp32; with bf16, products are. A run
that was interrupted continues from its newest whole checkpoint at the very next step; on a CPU it ends with the same
weights, bit for bit. What is written is the state with the lowest loss on held-out text; training that has stopped
improving there ends.

Letters: C components of the loss.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.artifacts.trained_heads import write_heads
from pipeline.errors import CheckFailed
from pipeline.execution.progress import ProgressReporter
from pipeline.training.checkpoints import Checkpoints
from pipeline.training.gradients import GradientSum, clip_gradients
from pipeline.training.learner import Learner
from pipeline.training.metrics import MetricsLog
from pipeline.training.optimizers import (
    goes_by_row,
    load_optimizer,
    make_optimizer,
    optimizer_tensors,
    owners,
    set_lr,
    trained,
)
from pipeline.training.sharded_heads import RowsOverWorkers
from pipeline.training.train_state import TrainState


class Trainer:
    """A learner, its optimizer, and one step after another."""

    def __init__(self, learner: Learner):
        self.learner, self.settings = learner, learner.spec.settings
        self.optimizer = make_optimizer(learner.modules, learner.peak_lrs, self.settings)
        self.modules = nn.ModuleDict(learner.modules)
        self.trained = trained(self.modules)
        self.parameters = list(self.trained.values())
        self.rows = learner.split_rows
        whole = [weight for name, weight in _as_finished(learner.modules) if name not in self.rows]
        self.gradients = GradientSum(whole, learner.workers)
        self.owners = owners(self.optimizer, self.trained)
        self.best: dict[str, Tensor] = {}  # the best state on held-out text, on the CPU; see `_keeps`

    def step(self, step: int, batches: Sequence[Any]) -> dict[str, Any]:
        """One optimizer step, of which this worker computes a share; returns the figures of the whole."""
        learner, workers = self.learner, self.learner.workers
        counts_C = workers.sum(learner.label_counts(batches)).clamp(min=1)
        weights_C = learner.loss_weights(step) / counts_C  # every worker divides by the labels of the whole step

        self.optimizer.zero_grad(set_to_none=True)
        self.modules.train()
        sums_C = torch.zeros(len(counts_C), device=learner.device)
        for left, batch in zip(reversed(range(len(batches))), batches, strict=True):
            with learner.heads_whole(more=left > 0):
                losses_C = learner.summed_losses(batch, weights_C)
            if not left:
                self.gradients.begin()
            (weights_C * losses_C).sum().backward()
            sums_C += losses_C.detach()
        self.modules.eval()

        self.gradients.finish()
        workers.sum(sums_C)
        norm = self._clip()
        scalars = torch.stack([(weights_C * sums_C).sum(), norm, counts_C[0]])
        loss, grad_norm, positions, *means = torch.cat([scalars, sums_C / counts_C]).tolist()
        share = learner.lr_share(step)
        lr = share * learner.recipe.lr
        self._require_finite(loss, grad_norm, lr)
        set_lr(self.optimizer, share)
        self.optimizer.step()
        figures = {"loss": loss, **learner.figures(step, means), "grad_norm": grad_norm, "lr": lr}
        return figures | {"positions": int(positions)}

    def run(self, progress: ProgressReporter, steps_before: int = 0, steps_after: int = 0) -> dict[str, Any]:
        """Every step that is left, or until held-out text gains nothing; writes the best state, returns the summary.

        `steps_before` and `steps_after` are those of other phases, for the progress.
        """
        learner, spec, total = self.learner, self.learner.spec, self.learner.total_steps
        is_first = learner.workers.is_first
        with ExitStack() as stack:
            parts = learner.workers if self.rows else None
            checkpoints = stack.enter_context(Checkpoints(spec.path / "checkpoints", self.settings, parts))
            state = self.resume(checkpoints)
            log = MetricsLog(spec.watched, state.step, self.settings.report_to) if is_first else None
            stack.enter_context(log or nullcontext())
            progress.begin("", steps_before + total + steps_after, done=steps_before + state.step, unit="steps")
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
                    log.write(state.step, {"epoch": state.step / learner.steps_per_epoch, **figures})
                if self._due(checkpoints, state.step):
                    self.save(checkpoints, state)
                said = f"loss {figures['loss']:.3f}, {state.tokens_per_second:,.0f} positions/s"
                progress.update(steps_before + state.step, said)
                started = time.monotonic()
            summary = state.summary() | {"hyperparameters": learner.recipe.facts()} | learner.facts()
            summary |= log.conclude(summary) if log else {}
        if self.best and state.best_step not in (None, state.step):
            self.modules.load_state_dict(self.best, strict=False)  # what is frozen is not in it
        if is_first:
            learner.write()
        heads = learner.whole_heads()
        if is_first:
            write_heads(spec.heads_path, heads, summary)  # last: where they are, training is finished
        return summary

    def evaluate(self, state: TrainState) -> dict[str, Any]:
        """Figures on held-out text; the weights are kept where they are the best so far."""
        with self.learner.heads_whole():
            figures = self.learner.evaluate()
        if state.record_evaluation(figures, self.learner.held_out_loss(figures)) and self._keeps:
            self.best = {name: weight.detach().to("cpu", copy=True) for name, weight in self.trained.items()}
        return figures

    def save(self, checkpoints: Checkpoints, state: TrainState) -> None:
        """Hand a copy of everything that a resume needs to the checkpoint writer."""
        tensors, numbers = optimizer_tensors(self.optimizer)
        held = {f"optimizer/{name}": tensor for name, tensor in tensors.items()}
        held |= {f"modules/{name}": tensor for name, tensor in self.trained.items()}
        if state.best_step != state.step:
            held |= {f"best/{name}": tensor for name, tensor in self.best.items()}
        split = {name: rows.num_rows for name, tensor in held.items() if (rows := self._rows_of(name, tensor))}
        checkpoints.save(state.step, held, {"train_state": asdict(state), "optimizer": numbers, "rows": split})

    def resume(self, checkpoints: Checkpoints) -> TrainState:
        """Go back to the newest whole checkpoint, the same on every worker; a new state where there is none."""
        workers, device = self.learner.workers, self.learner.device
        if not (saved := checkpoints.newest(workers, device)):
            return TrainState()
        tensors, state = checkpoints.load(saved, self._rows_of)
        found: dict[str, dict[str, Tensor]] = {"modules": {}, "optimizer": {}, "best": {}}
        for name, tensor in tensors.items():
            part, _, rest = name.partition("/")
            found[part][rest] = tensor if part == "best" else tensor.to(device)  # which a GPU need not hold
        assert found["modules"].keys() == self.trained.keys(), "a checkpoint has what trains, all of it"
        self.modules.load_state_dict(found["modules"], strict=False)  # what is frozen is not in it
        load_optimizer(self.optimizer, found["optimizer"], state["optimizer"])
        if self._keeps:
            self.best = {name: tensor.cpu() for name, tensor in (found["best"] or found["modules"]).items()}
        return TrainState(**state["train_state"])

    @property
    def _keeps(self) -> bool:
        """Whether this worker keeps something for the end: the first all, or each its part."""
        return self.learner.workers.is_first or bool(self.rows)

    def _due(self, checkpoints: Checkpoints, step: int) -> bool:
        """Whether this worker saves now; parts are saved by the first worker's clock."""
        if not self.rows:
            return self.learner.workers.is_first and checkpoints.due(step)
        return bool(self.learner.workers.firsts([checkpoints.due(step)], self.learner.device)[0])

    def _rows_of(self, name: str, tensor: Tensor) -> RowsOverWorkers | None:
        """How a checkpoint's tensor is split; None where it is whole."""
        part, _, rest = name.partition("/")
        if part == "optimizer":
            index, _, leaf = rest.partition(".")
            rest = self.owners[int(index)] if goes_by_row(leaf, tensor) else ""
        return self.rows.get(rest)

    def _clip(self) -> Tensor:
        """Clip the gradients, which are all there; returns their norm over all workers."""
        most = self.settings.max_grad_norm
        for weight in self.parameters:  # of a part of which no forward has run
            weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
        if self.learner.workers.world_size == 1:
            return torch.nn.utils.clip_grad_norm_(self.parameters, most)
        rows = self.rows
        return clip_gradients(self.trained, most, lambda name, of: rows[name].all_rows(of) if name in rows else of)

    def _require_finite(self, loss: float, grad_norm: float, lr: float) -> None:
        """Raise CheckFailed where training has diverged; no later checkpoint is written."""
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            what = f"Training diverged: at a learning rate of {lr:.2g} the loss is {loss}, its gradient's norm "
            fix = "Lower train.lr, raise train.warmup_steps or set train.precision: fp32."
            raise CheckFailed(f"{what}{grad_norm}.", self.learner.spec.directory, fix)


def _as_finished(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """What trains, by name, in about the order in which backward finishes it: heads before what they read."""
    for name, module in modules.items():
        yield from ((f"{name}.{of_module}", weight) for of_module, weight in reversed(trained(module).items()))
