"""What a stage declares of the files in its directory."""

from __future__ import annotations

import pytest

from pipeline.flow import STAGES


@pytest.mark.parametrize("stage", STAGES.values(), ids=STAGES.keys())
def test_what_is_for_an_unfinished_stage_alone_and_what_others_link_to_does_not_count_once_it_is_done(stage):
    """Or a resume would look for what an archive of the finished stage leaves out, and a link for a file of ours."""
    assert {*stage.to_resume, *stage.may_link} <= {*stage.scratch}
    assert not {*stage.parts} & {*stage.scratch}
