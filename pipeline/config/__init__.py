"""Typed configuration of a run: every key with its default and description.

The models are frozen and refuse unknown keys. `load.py` loads them from a YAML file and the command
line. The table in docs/configuration.md is generated from the descriptions; a test compares the
two.
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
    """The complete settings of a run; each field is a section of the YAML file."""

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
