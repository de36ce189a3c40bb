"""A run directory's own run.yaml means that directory, and the store that its links lead to."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config.load import load_config

SETTINGS = (
    "run: {name: first, root: /elsewhere}\ntarget: {model: owner/target}\nseeds: {sources:"
    " [x.jsonl]}\n"
)


def link(run: Path, store: Path, name: str, goal: str | None = None) -> None:
    """`latest/NAME`, as a run leaves it; or to another `goal`."""
    (run / "latest").mkdir(parents=True, exist_ok=True)
    directory = store / (goal or f"{name}-0123abcd")
    directory.mkdir(parents=True)
    (run / "latest" / name).symlink_to(directory)


def test_the_store_is_where_most_stages_lie(tmp_path):
    run, store = tmp_path / "run", tmp_path / "store"
    link(run, tmp_path / "another", "check")
    for name in ("seeds", "train"):
        link(run, store, name)
    (run / "run.yaml").write_text(SETTINGS)
    assert load_config(run / "run.yaml").run.store == store
    assert load_config(run).run.directory == run


@pytest.mark.parametrize(("name", "own"), [("run.yaml", True), ("trial.yaml", False)])
def test_only_run_yaml_beside_a_run_is_its_own(tmp_path, name, own):
    run = tmp_path / "copied"
    link(run, tmp_path / "store", "seeds")
    (run / name).write_text(SETTINGS)
    config = load_config(run / name)
    if own:
        assert (config.run.directory, config.run.store) == (run, tmp_path / "store")
    else:
        assert (config.run.directory, config.run.store) == (Path("/elsewhere/first"), None)


def test_run_yaml_that_nobody_has_run_is_like_any_other(tmp_path):
    (tmp_path / "run.yaml").write_text(SETTINGS)
    assert load_config(tmp_path / "run.yaml").run.directory == Path("/elsewhere/first")
