"""A stage's declarations of the files in its directory."""

from __future__ import annotations

import pytest

from pipeline.flow import STAGES


@pytest.mark.parametrize("stage", STAGES.values(), ids=STAGES.keys())
def test_a_part_of_the_result_is_not_scratch(stage):
    assert not {*stage.files.parts} & {*stage.files.scratch}
