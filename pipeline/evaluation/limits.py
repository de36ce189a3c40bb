"""Whether checked heads may be published: the measured figures against the limits of the configuration.

Figures do not depend on limits: a changed limit is applied to the stored figures without decoding again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pipeline.config import Config
from pipeline.training.methods import method_of


def failures(measured: Mapping[str, Any], config: Config) -> list[str]:
    """The reasons why these heads must not be published; empty when they may.

    Args:
        measured: The check stage's summary.
        config: The run's. Its limits are `check.min_acceleration_rate` and `train.backbone.max_kl`, where it is tuned.
    """
    least = config.check.min_acceleration_rate
    found = []
    for engine in ("native", "vllm"):
        if engine not in measured:
            continue
        match, rate = measured[engine]["greedy_match"], measured[engine]["acceleration_rate"]
        differing = match["sequences"] - match["identical"] - match["ties"]
        if differing:
            found.append(f"{engine}: {differing} of {match['sequences']} greedy sequences differ from plain decoding")
        if rate < least:
            found.append(f"{engine}: acceleration rate {rate:.2f} is below check.min_acceleration_rate = {least:.2f}")
    if "vllm" in measured and not any(measured["vllm"]["accepted_per_position"]):
        found.append("vllm: no draft token was accepted")
    if method_of(config.train).tunes_backbone:
        kl, most = measured.get("kl", math.nan), config.train.backbone.max_kl
        if not kl <= most:
            found.append(f"the tuned backbone is {kl:.4f} nats from the target, above train.backbone.max_kl = {most:g}")
    return found
