"""How far a training has come, and how good its heads were on held-out text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

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

    def record_evaluation(self, evaluation: dict[str, Any], loss: float | None) -> bool:
        """Take note of an evaluation; whether this is the best state so far."""
        if loss is not None and self.best_loss is not None and not loss < self.best_loss:
            self.stale += 1
            return False
        self.evaluation, self.stale = evaluation, 0
        if loss is not None:
            self.best_loss, self.best_step = loss, self.step
        return loss is not None

    def advance(self, loss: float, positions: int, seconds: float) -> None:
        self.step, self.tokens, self.seconds = (
            self.step + 1,
            self.tokens + positions,
            self.seconds + seconds,
        )
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
