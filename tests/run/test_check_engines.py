"""What an engine of the check has found is kept until the check is done."""

from __future__ import annotations

from pipeline.run.check_engines import NATIVE, VLLM, forget_parts, kept_part
from pipeline.storage.stage_directory import StageDirectory


def test_a_part_is_made_once_until_it_is_forgotten(tmp_path):
    stage, made = StageDirectory(tmp_path, "check", "f" * 64), []

    def make() -> dict[str, int]:
        made.append(len(made))
        return {"times": len(made)}

    stage.create({})
    assert kept_part(stage, NATIVE, make) == kept_part(stage, NATIVE, make) == {"times": 1}
    assert kept_part(stage, VLLM, make) == {"times": 2}
    forget_parts(stage)
    assert kept_part(stage, NATIVE, make) == {"times": 3}
