"""Typed configuration: every key, its meaning, its default.

`load.py` reads it from YAML and the command line.

Settings are data: frozen, strict (an unknown key is an error), and each key is read somewhere. The
descriptions here are the reference; the table in docs/configuration.md is made from them, and a
test compares the two.
"""

from __future__ import annotations

from pydantic import Field

from pipeline.config.data import (
    FeaturesConfig,
    GenerateConfig,
    SeedsConfig,
    SeedSource,
    TargetConfig,
)
from pipeline.config.outcome import (
    BaselineName,
    CalibrateConfig,
    CheckConfig,
    ExportConfig,
    LatencyLimits,
    PushConfig,
    StudyName,
)
from pipeline.config.running import (
    DTYPES,
    Dtype,
    LimitsConfig,
    PlacementConfig,
    PlacementOf,
    Precision,
    RunConfig,
    Section,
)
from pipeline.config.training import BackboneConfig, MedusaConfig, TrainConfig

__all__ = [
    "DTYPES",
    "BackboneConfig",
    "BaselineName",
    "CalibrateConfig",
    "CheckConfig",
    "Config",
    "Dtype",
    "ExportConfig",
    "FeaturesConfig",
    "GenerateConfig",
    "LatencyLimits",
    "LimitsConfig",
    "MedusaConfig",
    "PlacementConfig",
    "PlacementOf",
    "Precision",
    "PushConfig",
    "RunConfig",
    "Section",
    "SeedSource",
    "SeedsConfig",
    "StudyName",
    "TargetConfig",
    "TrainConfig",
]


class Config(Section):
    """Settings of a run, one section for each part of the pipeline."""

    run: RunConfig
    target: TargetConfig
    seeds: SeedsConfig
    generate: GenerateConfig = Field(default_factory=GenerateConfig)
    features: FeaturesConfig = Field(default_factory=FeaturesConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    calibrate: CalibrateConfig = Field(default_factory=CalibrateConfig)
    export: ExportConfig = Field(default_factory=ExportConfig)
    check: CheckConfig = Field(default_factory=CheckConfig)
    push: PushConfig = Field(default_factory=PushConfig)
    placement: PlacementConfig = Field(default_factory=PlacementConfig)
    limits: LimitsConfig = Field(default_factory=LimitsConfig)
