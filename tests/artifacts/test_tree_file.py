from __future__ import annotations

import json
from dataclasses import replace

import pytest

from pipeline.artifacts.seen_answers import NewAnswers
from pipeline.artifacts.tree_file import (
    TREE_FILE,
    Calibration,
    ChainLength,
    read_calibration,
    read_paths,
    read_tree,
)
from pipeline.decoding.dynamic_tree import DynamicTree
from pipeline.errors import DataError

OWN = Calibration(
    choices=((0,), (0, 0)),
    accuracies=[[0.5, 0.1], [0.25, 0.1]],
    expected_acceleration_rate=1.6,
    num_speculative_tokens=1,
    chain=[ChainLength(draft_tokens=1, expected_acceleration_rate=1.5, new=NewAnswers(answers=2))],
)
DYNAMIC = replace(OWN, dynamic=DynamicTree(2, 2, 3))


@pytest.mark.parametrize("calibration", [OWN, DYNAMIC], ids=["static", "dynamic"])
def test_a_tree_comes_back_as_it_was_written(tmp_path, calibration):
    calibration.write(tmp_path)
    assert read_calibration(tmp_path) == calibration
    assert read_paths(tmp_path / TREE_FILE) == calibration.choices
    assert (
        read_tree(tmp_path / TREE_FILE)
        == calibration.tree
        == (calibration.dynamic or calibration.choices)
    )


def test_paths_are_read_from_any_json_list(tmp_path):
    (tmp_path / "choices.json").write_text("[[0], [0, 0]]")
    assert read_paths(tmp_path / "choices.json") == ((0,), (0, 0))


@pytest.mark.parametrize("sizes", [{"num_nodes": 9, "max_depth": 1, "top": 3}, {"num_nodes": 1}])
def test_a_damaged_dynamic_tree_is_named(tmp_path, sizes):
    DYNAMIC.write(tmp_path)
    stored = json.loads((tmp_path / TREE_FILE).read_text())
    (tmp_path / TREE_FILE).write_text(json.dumps(stored | {"dynamic": sizes}))
    for read in (read_calibration, lambda directory: read_tree(directory / TREE_FILE)):
        with pytest.raises(DataError, match="not a tree that calibrate wrote"):
            read(tmp_path)


@pytest.mark.parametrize("text", [None, "[[0], [0", '{"choices": [[0]]}'])
def test_a_damaged_tree_is_named(tmp_path, text):
    if text is not None:
        (tmp_path / TREE_FILE).write_text(text)
    with pytest.raises(
        DataError, match=r"cannot be read|not a list of paths|not a tree that calibrate wrote"
    ) as caught:
        read_calibration(tmp_path)
    assert TREE_FILE in str(caught.value)
