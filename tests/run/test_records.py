"""The figures of a run are those of the stages that its check has read, each by the next one's record."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest

from pipeline.errors import DataError
from pipeline.run.records import require_records
from tests.flows.tiny import latest


def test_every_stage_must_be_the_one_that_was_read(copied_run):
    require_records(copied_run)
    for reader, stage in copied_run.stages().items():
        done = stage.done
        for name in done.upstream:
            replace(done, upstream=done.upstream | {name: "0" * 64}).write(stage.path)
            with pytest.raises(DataError) as refused:
                require_records(copied_run)
            assert refused.value.where.endswith(f"latest/{name}"), reader
        done.write(stage.path)
    require_records(copied_run)


@pytest.mark.parametrize(("name", "missed"), [("features", False), ("generate", True), ("train", True)])
def test_only_a_deleted_cache_is_not_missed(copied_run, name, missed):
    shutil.rmtree(latest(copied_run, name).path)
    if missed:
        with pytest.raises(DataError, match=name):
            require_records(copied_run)
    else:
        require_records(copied_run)
