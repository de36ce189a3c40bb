"""The status of an unfinished stage counts the shards that a run would keep."""

from __future__ import annotations

from dataclasses import replace

from pipeline.flow import statuses_of
from tests.flows.tiny import latest


def test_a_shard_of_other_input_is_not_counted(copied_run, make_config, tmp_path):
    config, seeds = make_config(tmp_path), latest(copied_run, "seeds")
    (latest(copied_run, "generate").path / "DONE.json").unlink()
    found = statuses_of(copied_run, config)["generate"]
    assert (found.status, found.made, found.expected) == ("partial", 4, 4)
    first, *others = seeds.done.shards
    replace(seeds.done, shards=[replace(first, content_sha256="0" * 64), *others]).write(seeds.path)
    found = statuses_of(copied_run, config)["generate"]
    assert (found.status, found.made, found.expected) == ("partial", 3, 4)
