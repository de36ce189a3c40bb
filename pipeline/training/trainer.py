"""The training loop: steps, evaluation, checkpoints and resume, the same for every learner.

The trainer divides each loss component by its number of labels over all micro-batches of all
workers. So, up to rounding, losses depend neither on the micro-batch size nor on the number of
workers. Weights are fp32; matrix products may be bf16. An interrupted training continues after its
newest undamaged checkpoint; on a CPU it ends with the same weights, bit for bit. The weights with
the lowest held-out loss are written; training ends early once that loss stops falling.

A training has one or more phases. Each phase has its own directory and checkpoints, and starts from
the heads of the previous phase.

Letters: C components of the loss.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.artifacts.json_form import from_json, to_json
from pipeline.artifacts.trained_heads import read_summary, write_heads
from pipeline.errors import CheckFailed, StoppedAtCheckpoint
from pipeline.execution.progress import SILENT, ProgressReporter
from pipeline.training.checkpoints import (
    Checkpoint,
    Checkpoints,
    load_optimizer,
    optimizer_state,
)
from pipeline.training.held_out_accuracy import Evaluation
from pipeline.training.metrics import MetricsLog
from pipeline.training.optimizers import make_optimizer, set_lr, trainable_parameters
from pipeline.training.recipe import Recipe
from pipeline.training.task import (
    ALONE,
    Learner,
    StepMetrics,
    TrainResult,
    TrainSpec,
    Workers,
    choose_device,
    gpu_errors,
)

LAST_STEPS = 50  # `final_loss` is their mean


def train(
    spec: TrainSpec, workers: Workers = ALONE, progress: ProgressReporter = SILENT
) -> TrainResult:
    """Train all phases and return the result; read the result of a finished phase from disk.

    The last phase's result is returned, with the earlier ones in `earlier`. The first worker
    writes heads, summary, metrics, checkpoints and the learner's other outputs to the directory of
    each phase, and logs to the trackers.

    Raises:
        CheckFailed: The loss or its gradient is no longer finite.
        ConfigError: The target cannot be trained on; see the learners.
        DataError: Training data is damaged, belongs to another run, or is empty, or Medusa-2 has no
            held-out text.
        EnvironmentFault: A GPU or bitsandbytes is missing, memory is too small, or the disk is
            full.
        StoppedAtCheckpoint: `progress` asked the training to stop.
    """
    results = {}
    heads_from = None
    for name, learner in spec.phases:
        phase = spec.of_phase(name, heads_from)
        summary = read_summary(phase.heads_path, phase.heads_shape)
        if summary is None:
            result = _train_phase(name, learner, phase, workers, progress)
            gc.collect()  # the next phase needs the memory of weights and moments
            workers.wait()  # for the first worker to write the heads
        else:
            result = from_json(TrainResult, summary)
        results[name.replace("-", "_")] = result
        heads_from = phase.heads_path
    last = results.pop("")
    return replace(last, earlier=results)


def _train_phase(
    name: str,
    learner: type[Learner],
    spec: TrainSpec,
    workers: Workers,
    progress: ProgressReporter,
) -> TrainResult:
    """Train one phase with its learner, from its seed, on this worker's device.

    Creates the phase's directory; torch's generators are restored afterwards.
    """
    spec.path.mkdir(exist_ok=True)
    device = choose_device(spec)
    devices = [device] if device.type == "cuda" else []
    with gpu_errors(spec, learner.saves_memory), torch.random.fork_rng(devices):
        torch.manual_seed(spec.seed)  # equal on every worker
        trainer = Trainer(learner(spec, workers, device))
        return trainer.run(progress, name)


@dataclass
class TrainState:
    """Progress of a training, saved in every checkpoint."""

    step: int = 0
    tokens: int = 0  # positions learned from, over all workers
    seconds: float = 0.0  # in steps, waiting for data included; without evaluation and start-up
    losses: list[float] = field(default_factory=list)  # of the last steps
    evaluation: Evaluation | None = None  # of the best state; of the last if nothing is held out
    best_step: int | None = None  # None if nothing is held out
    best_loss: float | None = None  # on held-out text
    stale: int = 0  # evaluations since the best one

    def record(self, evaluation: Evaluation, loss: float | None) -> bool:
        """Record an evaluation at this step; return whether its loss is the lowest so far.

        If nothing is held out, `loss` is None and the result is False.
        """
        if loss is not None and self.best_loss is not None and not loss < self.best_loss:
            self.stale += 1
            return False
        self.evaluation = evaluation
        self.stale = 0
        if loss is None:
            return False
        self.best_loss = loss
        self.best_step = self.step
        return True

    def advance(self, loss: float, positions: int, seconds: float) -> None:
        """Count a training step, and record its loss, positions and seconds."""
        self.step += 1
        self.tokens += positions
        self.seconds += seconds
        self.losses = [*self.losses, loss][-LAST_STEPS:]

    @property
    def tokens_per_second(self) -> float:
        """The training's positions per second, over all workers."""
        return self.tokens / self.seconds

    def result(self, recipe: Recipe) -> TrainResult:
        """Return the result of the training, with the evaluation of the best state."""
        assert self.evaluation is not None, "training starts with an evaluation"
        return TrainResult(
            **vars(self.evaluation),
            steps=self.step,
            tokens=self.tokens,
            seconds=round(self.seconds, 3),
            tokens_per_second=round(self.tokens_per_second, 1),
            final_loss=sum(self.losses) / len(self.losses),
            best_step=self.best_step,
            hyperparameters=recipe,
        )


@dataclass(frozen=True)
class StepResult:
    """Result of one training step over all workers."""

    loss: float
    positions: int  # learned from
    metrics: StepMetrics  # for metrics.jsonl


class Trainer:
    """Training loop of one phase: its learner, its optimizer and its best weights."""

    def __init__(self, learner: Learner):
        self.learner = learner
        self.settings = learner.spec.settings
        self.optimizer = make_optimizer(learner.modules, learner.peak_lrs, self.settings)
        self.modules = nn.ModuleDict(learner.modules)
        self.trained = trainable_parameters(self.modules)
        self.parameters = list(self.trained.values())
        # Copies of the best weights on the CPU; only on the first worker, which writes them.
        self.best: dict[str, Tensor] = {}

    def step(self, step: int, batches: Sequence[Any]) -> StepResult:
        """Take one training step together with the other workers, on this worker's micro-batches.

        Raises:
            CheckFailed: The loss or its gradient is not finite.
        """
        learner = self.learner
        # Every worker divides by the labels of the whole step.
        counts_C = learner.label_counts(batches)
        learner.workers.sum_in_place(counts_C)
        counts_C = counts_C.clamp(min=1)
        weights_C = learner.loss_weights(step) / counts_C

        self.modules.zero_grad(set_to_none=True)
        self.modules.train()
        sums_C = torch.zeros(len(counts_C), device=learner.device)
        for batch in batches:
            loss, batch_sums_C = learner.loss(batch, weights_C)
            loss.backward()
            sums_C += batch_sums_C
        self.modules.eval()

        learner.workers.sum_in_place(sums_C)
        for parameter in self.parameters:
            if parameter.grad is None:  # this worker had no backward
                parameter.grad = torch.zeros_like(parameter)
            learner.workers.sum_in_place(parameter.grad)
        norm = self.clip_gradients()
        positions = counts_C[0]  # the first component has a label at every position
        figures = torch.stack([(weights_C * sums_C).sum(), norm, positions])
        # One transfer from the GPU.
        mean_loss, grad_norm, num_positions, *means = torch.cat(
            [figures, sums_C / counts_C]
        ).tolist()

        lr_share = learner.lr_share(step)
        lr = lr_share * learner.recipe.lr
        if not (math.isfinite(mean_loss) and math.isfinite(grad_norm)):
            raise CheckFailed(
                f"Training diverged: at a learning rate of {lr:.2g} the loss is {mean_loss}, its"
                f" gradient's norm {grad_norm}.",
                learner.spec.directory,
                "Lower train.lr, raise train.warmup_steps or set train.precision: fp32.",
            )
        set_lr(self.optimizer, lr_share)
        self.optimizer.step()
        metrics = {"loss": mean_loss}
        metrics.update(learner.metrics(step, means), grad_norm=grad_norm, lr=lr)
        return StepResult(mean_loss, int(num_positions), metrics)

    def clip_gradients(self) -> Tensor:
        """Clip each module's gradient to `train.max_grad_norm`; return their norm before it."""
        most = self.settings.max_grad_norm
        norms = []
        for module in self.learner.modules.values():
            trained = trainable_parameters(module).values()
            norms.append(nn.utils.clip_grad_norm_(trained, most))
        return torch.stack(norms).norm()

    def run(self, progress: ProgressReporter, phase: str = "") -> TrainResult:
        """Train to the last step or early stopping, write the best heads and return the result.

        Continues from the newest undamaged checkpoint, if there is one.
        """
        learner = self.learner
        spec = learner.spec
        recipe = learner.recipe
        checkpoints = Checkpoints(spec.path / "checkpoints", self.settings)
        state = self.resume(checkpoints)
        log = MetricsLog(spec, state.step) if learner.workers.is_first else None
        progress.begin(phase, recipe.total_steps, done=state.step, unit="steps")
        with checkpoints, log or nullcontext():
            if state.step == 0:
                evaluation = self.evaluate(state)
                if log:
                    log.write(0, to_json(evaluation))
            started = time.monotonic()
            for batches in learner.steps(state.step):
                if state.stale >= self.settings.patience:
                    break  # early stopping; a resumed training may already be there
                self.stop_if_asked(progress, checkpoints, state)
                step = self.step(state.step, batches)
                state.advance(step.loss, step.positions, time.monotonic() - started)
                metrics = dict(step.metrics)
                metrics["epoch"] = state.step / recipe.steps_per_epoch
                metrics["tokens"] = state.tokens
                metrics["tokens_per_second"] = state.tokens_per_second
                if recipe.evaluates_after(state.step, learner.held_out_share):
                    metrics.update(to_json(self.evaluate(state)))
                if log:
                    log.write(state.step, metrics)
                    if checkpoints.is_due(state.step):
                        self.save(checkpoints, state)
                note = f"loss {step.loss:.3f}, {state.tokens_per_second:,.0f} positions/s"
                progress.update(state.step, note=note)
                started = time.monotonic()
            result = state.result(recipe)
            if log:
                result = replace(result, warnings=log.finish(result.to_json()))
        if learner.workers.is_first:
            self.write_best(result)
        return result

    def stop_if_asked(
        self, progress: ProgressReporter, checkpoints: Checkpoints, state: TrainState
    ) -> None:
        """Stop if the first worker's `progress` asks for it; all workers must call this together.

        The first worker writes a checkpoint of the last step, and every worker raises
        StoppedAtCheckpoint.
        """
        workers = self.learner.workers
        if not workers.from_first(progress.asked_to_stop, self.learner.device):
            return
        if not state.step:
            raise StoppedAtCheckpoint("Training stopped before its first step.")
        if workers.is_first:
            self.save(checkpoints, state)
            checkpoints.wait()
        raise StoppedAtCheckpoint(
            f"Training stopped after step {state.step} of {self.learner.recipe.total_steps}, and"
            " has a checkpoint of it."
        )

    def write_best(self, result: TrainResult) -> None:
        """Restore the best weights; write the learner's outputs, then the heads with the result.

        If nothing was held out, the last weights are written.
        """
        if self.best:
            self.modules.load_state_dict(self.best, strict=False)  # frozen weights stay
        self.learner.write()
        write_heads(self.learner.spec.heads_path, self.learner.heads, result.to_json())

    def evaluate(self, state: TrainState) -> Evaluation:
        """Evaluate the modules on held-out text, and record the evaluation in `state`.

        If it is the best so far, the first worker keeps a copy of the weights.
        """
        evaluation = self.learner.evaluate()
        is_best = state.record(evaluation, evaluation.loss(self.settings.decay))
        if is_best and self.learner.workers.is_first:
            for name, weight in self.trained.items():
                self.best[name] = weight.detach().to("cpu", copy=True)
        return evaluation

    def save(self, checkpoints: Checkpoints, state: TrainState) -> None:
        """Save weights, best weights, optimizer state and training state as a checkpoint.

        They are copied now and written in the background.
        """
        moments, numbers = optimizer_state(self.optimizer)
        tensors = {f"optimizer/{name}": tensor for name, tensor in moments.items()}
        for name, weight in self.trained.items():
            tensors[f"modules/{name}"] = weight
        for name, tensor in self.best.items():
            tensors[f"best/{name}"] = tensor
        state_json = {"train_state": to_json(state), "optimizer": numbers}
        checkpoints.save(state.step, Checkpoint(tensors, state_json))

    def resume(self, checkpoints: Checkpoints) -> TrainState:
        """Restore the newest undamaged checkpoint on every worker and return its training state.

        Without one, return the state of a new training.
        """
        learner = self.learner
        saved = checkpoints.read_newest(learner.workers, learner.device)
        if saved is None:
            return TrainState()
        parts: dict[str, dict[str, Tensor]] = {"modules": {}, "optimizer": {}, "best": {}}
        for name, tensor in saved.tensors.items():
            part, _, rest = name.partition("/")
            parts[part][rest] = tensor
        self.modules.load_state_dict(parts["modules"], strict=False)  # without frozen weights
        moments = {name: tensor.to(learner.device) for name, tensor in parts["optimizer"].items()}
        load_optimizer(self.optimizer, moments, saved.state["optimizer"])
        if learner.workers.is_first:
            self.best = parts["best"]
        return from_json(TrainState, saved.state["train_state"])
