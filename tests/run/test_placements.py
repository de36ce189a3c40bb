"""Which stages still need workers."""

from __future__ import annotations

from pipeline.run.placements import unfinished

WITH_WORKERS = ["generate", "features", "train", "calibrate", "check"]


def test_finished_stages_need_no_workers_unless_made_afresh(finished_run, make_config, tmp_path):
    assert unfinished(make_config(tmp_path)) == WITH_WORKERS
    finished = make_config(finished_run.path.parent)
    assert unfinished(finished) == []
    assert unfinished(finished, fresh="train") == ["train"]
    assert unfinished(finished, ["train", "check"], fresh="generate") == []
