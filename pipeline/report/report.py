"""Dataclasses of a report: the content of report.json.

Field names are the keys of report.json. The part of a stage that has not run is None, and None is
left out of report.json.
"""

from __future__ import annotations

from dataclasses import field

from pipeline.artifacts.check_result import (
    CheckFigures,
    NativeFigures,
    ServedModel,
    Studies,
    TunedDrift,
    VllmFigures,
)
from pipeline.artifacts.json_form import result
from pipeline.artifacts.tree_file import Accuracy, TreeFigures
from pipeline.conversations.sources import FileCount

STAGES = ("seeds", "generate", "features", "train", "calibrate", "export", "check", "push")


@result
class RunFacts:
    """Name, date and stage fingerprints of the run, in report.json."""

    name: str
    date: str
    fingerprints: dict[str, str]  # by stage, the first eight digits


@result
class SourceFiles:
    """The files of one seed source in report.json."""

    source: str
    read: list[FileCount]


@result
class StageFigures:
    """A stage's figures in report.json; a figure that the stage does not have is None."""

    rows: int | None = None
    quarantined: int | None = None
    train_rows: int | None = None
    samples: int | None = None  # answers to each training prompt
    sources: list[SourceFiles] | None = None
    tool_rows: int | None = None
    tokens: int | None = None
    positions: int | None = None
    tokens_per_second: float | None = None
    bytes_per_position: float | None = None
    cut_at_tools: int | None = None
    unlearned_answers: int | None = None
    warnings: list[str] | None = None


@result
class TrainFigures(StageFigures):
    """The train stage's figures in report.json; the last two fields are Medusa-2's."""

    steps: int | None = None
    best_step: int | None = None
    final_loss: float | None = None
    hyperparameters: dict[str, object] | None = None
    draft_coverage: float | None = None  # share of held-out text in the draft vocabulary
    recipe: str | None = None
    drift: TunedDrift | None = None


@result
class ExportFigures:
    """The export stage's figures in report.json."""

    vllm: bool  # whether vLLM serves these heads


@result
class Report:
    """A run's report: the content of report.json."""

    run: RunFacts | None = None
    target: str | None = None
    method: str | None = None
    num_heads: int | None = None
    drafter: str | None = None
    seeds: StageFigures | None = None
    generate: StageFigures | None = None
    features: StageFigures | None = None
    train: TrainFigures | None = None
    heads: list[Accuracy] = field(default_factory=list)
    tree: TreeFigures | None = None
    check: CheckFigures | None = None
    quarantine: dict[str, dict[str, int]] | None = None  # rows by stage and reason
    hardware: dict[str, object] | None = None
    versions: dict[str, str] | None = None
    seconds_by_stage: dict[str, float] = field(default_factory=dict)
    export: ExportFigures | None = None
    served_model: ServedModel | None = None
    skipped: dict[str, str] | None = None  # stages that the method does not need, and why
    target_revision: str | None = None

    @property
    def native(self) -> NativeFigures | None:
        """The check's figures of native decoding; None if it was not checked."""
        return self.check.native if self.check else None

    @property
    def vllm(self) -> VllmFigures | None:
        """The check's figures of vLLM; None if it was not checked."""
        return self.check.vllm if self.check else None

    @property
    def studies(self) -> Studies:
        """The check's studies; their rows are None if they were not run."""
        if self.vllm and self.vllm.studies:
            return self.vllm.studies
        return Studies()
