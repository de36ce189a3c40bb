"""What a stage declares of the files in its directory."""

from __future__ import annotations

import pytest

from pipeline.flow import STAGES


@pytest.mark.parametrize("stage", STAGES.values(), ids=STAGES.keys())
def test_links_of_others_and_parts_are_not_scratch_and_result(stage):
    assert {*stage.may_link} <= {*stage.scratch}
    assert not {*stage.parts} & {*stage.scratch}
