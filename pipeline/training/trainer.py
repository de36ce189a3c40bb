"""The trainer: one loop, one step and one resume, whatever is learned and from what.

A `Learner` says what trains, which batches a step reads, what they lose and what is written in the end. The trainer
divides each component of the loss by its labels over all micro-batches of all workers, so that neither how a step is
cut up nor how many workers share it changes the curve beyond rounding. Weights are fp32; with bf16, products are. A run
that was interrupted continues from its newest whole checkpoint at the very next step; on a CPU it ends with the same
weights, bit for bit. What is written is the state with the lowest loss on held-out text; training that has stopped
improving there ends.

A method may train in several phases, each a training of its own that resumes for itself: all but the last in a
directory of their own within the last one's, each starting from the heads of the one before.

Letters: C components of the loss.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.artifacts.trained_heads import read_summary, write_heads
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
from pipeline.training.recipe import Recipe
from pipeline.training.sharded_heads import RowsOverWorkers
from pipeline.training.task import TrainSpec, Workers, choose_device, memory_errors

LAST_STEPS = 50  # `final_loss` is the mean over so many


@dataclass
class TrainState:
    """How far training has come; part of every checkpoint."""

    step: int = 0
    tokens: int = 0  # positions learned from, over all workers
    seconds: float = 0.0  # in steps, waiting for data included; without evaluation and start-up
    losses: list[float] = field(default_factory=list)  # of the last steps
    evaluation: dict[str, Any] = field(default_factory=dict)  # of the best state, else the last one
    best_step: int | None = None  # None where nothing is held out
    best_loss: float | None = None  # held out; see `Learner.held_out_loss`
    stale: int = 0  # evaluations since then

    def judge(self, evaluation: dict[str, Any], loss: float | None) -> bool:
        """Take note of an evaluation; whether this is the best state so far."""
        if loss is not None and self.best_loss is not None and not loss < self.best_loss:
            self.stale += 1
            return False
        self.evaluation, self.stale = evaluation, 0
        if loss is not None:
            self.best_loss, self.best_step = loss, self.step
        return loss is not None

    def advance(self, loss: float, positions: int, seconds: float) -> None:
        self.step, self.tokens, self.seconds = self.step + 1, self.tokens + positions, self.seconds + seconds
        self.losses = [*self.losses, loss][-LAST_STEPS:]

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / max(self.seconds, 1e-9)

    def summary(self) -> dict[str, Any]:
        return {
            "steps": self.step,
            "tokens": self.tokens,
            "seconds": round(self.seconds, 3),
            "tokens_per_second": round(self.tokens_per_second, 1),
            "final_loss": sum(self.losses) / len(self.losses),
            **({} if self.best_step is None else {"best_step": self.best_step}),
            **self.evaluation,
        }


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
        if state.judge(figures, self.learner.held_out_loss(figures)) and self._keeps:
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


def train(spec: TrainSpec, workers: Workers | None = None, progress: ProgressReporter | None = None) -> dict[str, Any]:
    """Train by the method of the spec; returns {steps, tokens, seconds, tokens_per_second, final_loss, held_out, …}.

    Leaves `heads.safetensors`, `summary.jsonl`, `metrics.jsonl`, `tensorboard/`, `checkpoints/` and what the learner
    writes. A run that is finished already only returns its summary. The summary of an earlier phase stands in it under
    that phase's name.

    Raises:
        CheckFailed: The loss or its gradient is no longer finite.
        ConfigError: The target cannot be trained on: see the method's learners.
        DataError: A shard is damaged or of another run or target, there is nothing to learn, or heads of another shape
            lie where these are to be.
        EnvironmentFault: The GPU or bitsandbytes is missing, memory is too small, or the disk is full.
    """
    if summary := finished(spec):
        return summary
    workers, progress = workers or Workers(), progress or ProgressReporter()
    phases = phases_of(spec)
    later = [learner.recipe_of(of_phase).total_steps for _, of_phase, learner in phases[1:]]
    done, heads_from, summaries = 0, None, {}
    for number, (name, of_phase, learner) in enumerate(phases):
        of_phase.path.mkdir(exist_ok=True)
        if (summary := read_summary(of_phase.heads_path, of_phase.heads_shape)) is None:
            device = choose_device(spec)
            generators = [device] if device.type == "cuda" else []
            with memory_errors(spec, learner.memory_fix), torch.random.fork_rng(generators):
                torch.manual_seed(spec.seed)  # every worker draws the same
                trainer = Trainer(learner(of_phase, workers, device, heads_from))
                summary = trainer.run(progress, done, sum(later[number:]))
            workers.wait()  # for the first to write the heads
        done, heads_from = done + summary["steps"], of_phase.heads_path
        summaries[name] = summary
    return summaries.pop("") | summaries


def phases_of(spec: TrainSpec) -> list[tuple[str, TrainSpec, type[Learner]]]:
    """Each phase's name, its spec with its own directory, and its learner; the last one's name is empty."""
    phases = spec.method.phases(spec.settings)
    return [
        (name.replace("-", "_"), replace(spec, directory=str(spec.path / name), phase=name), learner)
        for name, learner in phases
    ]


def finished(spec: TrainSpec) -> dict[str, Any] | None:
    """The summary of a training that is over; None of one that is not.

    Raises:
        DataError: Heads of another shape lie where these are to be.
    """
    summaries = {name: read_summary(each.heads_path, each.heads_shape) for name, each, _ in phases_of(spec)}
    last = summaries.pop("")
    return None if last is None else last | summaries


def recipes_of(spec: TrainSpec) -> list[Recipe]:
    """The recipe of each phase; reads what they train from, and refuses what is bad of it."""
    return [learner.recipe_of(of_phase) for _, of_phase, learner in phases_of(spec)]


def count_steps(spec: TrainSpec) -> int:
    """Optimizer steps of all phases, if none ends early; reads as `recipes_of` does."""
    return sum(recipe.total_steps for recipe in recipes_of(spec))
