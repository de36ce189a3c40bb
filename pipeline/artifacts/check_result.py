"""What the check found: the summary in its DONE.json, and the native answers in `answers/`, in
Spec-Bench's schema.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from pipeline.storage.atomic import write_text

ENGINES = ("native", "vllm")


@dataclass(frozen=True)
class EngineResult:
    """One engine's figures.

    `sequences` greedy ones were compared with plain decoding: `identical` are the same, `ties` part
    at a tie of the target's own logits, `differing` are neither.
    """

    acceleration_rate: float
    speedup: float
    sequences: int
    identical: int
    ties: int
    accepts_drafts: (
        bool  # whether any draft token was accepted; True where the engine does not count them
    )
    figures: Mapping[str, Any]  # all of them, as report.json shows them

    @classmethod
    def of(cls, figures: Mapping[str, Any]) -> EngineResult:
        match, accepted = figures["greedy_match"], figures.get("accepted_per_position")
        return cls(
            figures["acceleration_rate"],
            figures.get("speedup", 1.0),
            match["sequences"],
            match["identical"],
            match["ties"],
            accepted is None or any(accepted),
            figures,
        )

    @property
    def differing(self) -> int:
        return self.sequences - self.identical - self.ties


@dataclass(frozen=True)
class CheckResult:
    """A check's result; empty where there was none."""

    engines: Mapping[str, EngineResult]  # by name, in the order of `ENGINES`
    kl: float | None = None  # nats of a tuned backbone from the target
    head_0: Mapping[str, float] | None = None  # its accuracies top1 to top5 on held-out text
    frequency: Mapping[str, float] | None = None  # those of guessing the most frequent tokens there
    served_model: Mapping[str, Any] | None = (
        None  # the engines' figures on the copy that will be served
    )
    target_text: Mapping[str, float] | None = None
    samples: Iterable[Mapping[str, Any]] = ()
    drift: Mapping[str, Any] | None = (
        None  # of a tuned backbone's published weights from the original
    )
    exact_match: Sequence[Mapping[str, Any]] = ()  # by category, where questions have references
    contaminated_rows: int | None = None  # training rows that hold one of the file's questions
    hardware: Mapping[str, Any] | None = None  # of the machine that decoded
    versions: Mapping[str, str] | None = None  # of its packages
    target_revision: str | None = None  # the commit of a target from the Hub

    @classmethod
    def of(cls, summary: Mapping[str, Any]) -> CheckResult:
        """The result in a check stage's summary."""
        engines = {name: EngineResult.of(summary[name]) for name in ENGINES if name in summary}
        others = {
            field.name: summary[field.name] for field in fields(cls)[1:] if field.name in summary
        }
        return cls(engines, **others)


def write_answers(directory: Path, answers: Mapping[str, Iterable[Mapping[str, Any]]]) -> None:
    """Write each method's answers, one line per question, to `answers/METHOD.jsonl`."""
    for method, lines in answers.items():
        write_text(directory / "answers" / f"{method}.jsonl", _as_jsonl(lines))


def write_model_answers(
    directory: Path, answers: Mapping[str, Sequence[Mapping[str, Any]]]
) -> None:
    """Write each method's answers, in FastChat's schema, to `model_answer/MODEL.jsonl`, as its
    judge looks for them.
    """
    for lines in answers.values():
        if lines:
            write_text(
                directory / "model_answer" / f"{lines[0]['model_id']}.jsonl", _as_jsonl(lines)
            )


def _as_jsonl(lines: Iterable[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)


def read_answers(directory: Path) -> dict[str, list[dict[str, Any]]]:
    """All answers that a check has left, by method, those of plain decoding first."""
    files = sorted(
        (directory / "answers").glob("*.jsonl"), key=lambda path: (path.stem != "plain", path.stem)
    )
    originals = sorted((directory / "model_answer").glob("*-original.jsonl"))
    named = [(path.stem, path) for path in files] + [("original", path) for path in originals]
    return {
        name: [json.loads(line) for line in path.read_text("utf-8").splitlines()]
        for name, path in named
    }
