"""The result of an engine of the check is kept until the check is done."""

from __future__ import annotations

from pipeline.artifacts.check_result import CheckResult
from pipeline.run.check_engines import NATIVE, VLLM, forget_parts, kept_part
from pipeline.storage.stage_directory import StageDirectory


def test_a_part_is_made_once_until_it_is_forgotten(tmp_path):
    stage, made = StageDirectory(tmp_path, "check", "f" * 64), []

    def part(name: str) -> int:
        return kept_part(stage, name, CheckResult, make).skipped_prompts

    def make() -> CheckResult:
        made.append(len(made))
        return CheckResult(skipped_prompts=len(made))

    stage.create({})
    assert part(NATIVE) == part(NATIVE) == 1
    assert part(VLLM) == 2
    forget_parts(stage)
    assert part(NATIVE) == 3
