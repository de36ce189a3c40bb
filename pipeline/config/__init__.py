"""Typed configuration of a run: every key with its default and description.

The models are frozen and refuse unknown keys. `load.py` loads them from a YAML file and the command
line. The table in docs/configuration.md is generated from the descriptions; a test compares the
two.
"""

from __future__ import annotations

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
    PushConfig,
    ReportConfig,
)
from pipeline.config.running import (
    DTYPES,
    LimitsConfig,
    PlacementConfig,
    PlacementOf,
    Precision,
    RunConfig,
    Section,
)
from pipeline.config.training import BackboneConfig, MedusaConfig, TrainConfig


class Config(Section):
    """The complete settings of a run; each field is a section of the YAML file."""

    run: RunConfig
    target: TargetConfig
    seeds: SeedsConfig
    generate: GenerateConfig = GenerateConfig()
    features: FeaturesConfig = FeaturesConfig()
    train: TrainConfig = TrainConfig()
    calibrate: CalibrateConfig = CalibrateConfig()
    export: ExportConfig = ExportConfig()
    check: CheckConfig = CheckConfig()
    report: ReportConfig = ReportConfig()
    push: PushConfig = PushConfig()
    placement: PlacementConfig = PlacementConfig()
    limits: LimitsConfig = LimitsConfig()
