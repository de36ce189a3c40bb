"""Whether checked heads may be published: the measured figures against the limits of the configuration.

Figures do not depend on limits: a changed limit is applied to the stored figures without decoding again.
"""

from __future__ import annotations

import math

from pipeline.artifacts.check_result import CheckResult
from pipeline.config import Config
from pipeline.training.methods import method_of


def failures(result: CheckResult, config: Config) -> list[str]:
    """The reasons why these heads must not be published; empty when they may.

    The limits are `check.min_acceleration_rate` and, where the backbone is tuned, `train.backbone.max_kl`.
    """
    least = config.check.min_acceleration_rate
    found = []
    for name, engine in result.engines.items():
        if engine.differing:
            found.append(
                f"{name}: {engine.differing} of {engine.sequences} greedy sequences differ from plain decoding"
            )
        if not engine.acceleration_rate >= least:
            rate = f"acceleration rate {engine.acceleration_rate:.2f}"
            found.append(f"{name}: {rate} is below check.min_acceleration_rate = {least:.2f}")
        if not engine.accepts_drafts:
            found.append(f"{name}: no draft token was accepted")
    if method_of(config.train).tunes_backbone:
        kl, most = math.nan if result.kl is None else result.kl, config.train.backbone.max_kl
        if not kl <= most:
            found.append(f"the tuned backbone is {kl:.4f} nats from the target, above train.backbone.max_kl = {most:g}")
    return found
