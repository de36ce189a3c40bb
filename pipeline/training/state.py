"""How far a training has come, what a checkpoint holds of it, and when it is given up: the same for both methods."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from pipeline.errors import CheckFailed
from pipeline.training.checkpoints import Checkpoints
from pipeline.training.optimizers import load_optimizer, optimizer_tensors
from pipeline.training.task import TrainSpec
from pipeline.training.world import World

LAST_STEPS = 50  # `final_loss` is the mean over so many

Progress = Callable[[int, int, float, float], None]  # (step, total steps, loss, positions per second)


@dataclass
class Course:
    """How far training has come; part of every checkpoint."""

    step: int = 0
    tokens: int = 0  # positions learned from, over all workers
    seconds: float = 0.0  # in steps, waiting for data included; without evaluation and start-up
    losses: list[float] = field(default_factory=list)  # of the last steps
    held_out: list[dict[str, float]] = field(default_factory=list)  # the last evaluation, one entry per head
    drift: dict[str, Any] = field(default_factory=dict)  # the last one; empty where the backbone is frozen

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
            "held_out": self.held_out,
            **({"drift": self.drift} if self.drift else {}),
        }


def require_finite(loss: float, grad_norm: float, lr: float, spec: TrainSpec) -> None:
    """Raise CheckFailed where training has diverged; no later checkpoint is written."""
    if not (math.isfinite(loss) and math.isfinite(grad_norm)):
        what = f"Training diverged: at a learning rate of {lr:.2g} the loss is {loss}, its gradient's norm {grad_norm}."
        fix = "Lower train.lr, raise train.warmup_steps or set train.precision: fp32."
        raise CheckFailed(what, spec.directory, fix)


def trained(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that an optimizer moves, by name."""
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def save(
    checkpoints: Checkpoints, modules: Mapping[str, nn.Module], optimizer: torch.optim.Optimizer, course: Course
) -> None:
    """Hand a copy of everything that a resume needs to the checkpoint writer; modules go by their name there."""
    tensors, numbers = optimizer_tensors(optimizer)
    held = {f"{room}/{name}": tensor for room, module in modules.items() for name, tensor in trained(module).items()}
    state = {"course": asdict(course), "optimizer": numbers}
    checkpoints.save(course.step, held | {f"optimizer/{name}": tensor for name, tensor in tensors.items()}, state)


def resume(
    checkpoints: Checkpoints, modules: Mapping[str, nn.Module], optimizer: torch.optim.Optimizer, world: World
) -> Course:
    """Go back to the newest whole checkpoint, the first worker's choice; a fresh course where there is none."""
    device = next(parameter.device for module in modules.values() for parameter in module.parameters())
    step = int(world.sum(torch.tensor(checkpoints.newest() if world.is_first else 0, device=device)))
    if not step:
        return Course()
    tensors, state = checkpoints.load(step, device)
    rooms: dict[str, dict[str, torch.Tensor]] = {room: {} for room in (*modules, "optimizer")}
    for name, tensor in tensors.items():
        room, _, rest = name.partition("/")
        rooms[room][rest] = tensor
    for room, module in modules.items():
        assert rooms[room].keys() == trained(module).keys(), "a checkpoint has what trains, all of it"
        module.load_state_dict(rooms[room], strict=False)  # what is frozen is not in it
    load_optimizer(optimizer, rooms["optimizer"], state["optimizer"])
    return Course(**state["course"])
