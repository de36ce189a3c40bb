"""A method that only the tests know: heads alone, at a fixed learning rate."""

from __future__ import annotations

from pipeline.training.heads_only import HeadsLearner
from pipeline.training.methods import HeadsOnly


class FixedRateLearner(HeadsLearner):
    def lr_share(self, step: int) -> float:
        return 1.0


class FixedRate(HeadsOnly):
    name = "fixed-rate"

    def phases(self, train):
        return (("", FixedRateLearner),)
