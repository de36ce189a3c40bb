from __future__ import annotations

import pytest

from pipeline.training.metrics import FILE, MetricsLog, read_curves, read_metrics
from pipeline.training.trackers import Watched


def write(directory, step: int, *steps: int) -> None:
    with MetricsLog(Watched("run", directory), step) as log:
        for number in steps:
            log.write(number, {"loss": float(number), "head_losses": [1.0, 2.0]})


def test_a_resume_drops_what_it_will_write_again(tmp_path):
    write(tmp_path, 0, 0, 1, 2, 3, 4)
    write(tmp_path, 2, 3, 4, 5)
    assert [line["step"] for line in read_metrics(tmp_path)] == [0, 1, 2, 3, 4, 5]
    write(tmp_path, 0, 0, 1)
    assert [line["step"] for line in read_metrics(tmp_path)] == [0, 1]


def test_a_worker_that_outlived_its_driver_cannot_write_into_the_new_log(tmp_path):
    with MetricsLog(Watched("run", tmp_path), 0) as orphan:
        orphan.write(1, {"loss": 1.0})
        with MetricsLog(Watched("run", tmp_path), 1) as log:
            orphan.write(2, {"loss": 9.0})
            log.write(2, {"loss": 2.0})
            orphan.write(3, {"loss": 9.0})
    assert [line["loss"] for line in read_metrics(tmp_path)] == [1.0, 2.0]


def test_a_line_that_a_kill_cut_short_is_left_out(tmp_path):
    write(tmp_path, 0, 1, 2)
    with (tmp_path / FILE).open("a") as file:
        file.write('{"step": 3, "lo')
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2]


def test_the_reports_curves_are_losses_and_accuracies_per_head_by_step(tmp_path):
    with MetricsLog(Watched("run", tmp_path), 0) as log:
        log.write(0, {"held_out": [{"loss": 3.0, "top1": 0.1}, {"loss": 4.0, "top1": 0.2}]})
        log.write(1, {"loss": 2.0, "head_losses": [1.0, 2.0]})
        evaluated = {
            "held_out": [{"loss": 1.0}, {"loss": 2.0}],
            "drift": {"kl": 0.01, "positions": 9},
        }
        log.write(2, {"loss": 1.0, "head_losses": [0.5, 1.0], **evaluated})
    trained, held_out = read_curves(tmp_path)
    assert [(line["step"], line["head_losses"]) for line in trained] == [
        (1, [1.0, 2.0]),
        (2, [0.5, 1.0]),
    ]
    assert held_out == [
        {"step": 0, "head_losses": [3.0, 4.0], "head_top1": [0.1, 0.2]},
        {"step": 2, "head_losses": [1.0, 2.0], "head_top1": [None, None], "kl": 0.01},
    ]


def test_a_figure_that_is_no_number_is_never_written(tmp_path):
    with pytest.raises(ValueError), MetricsLog(Watched("run", tmp_path), 0) as log:
        log.write(1, {"loss": float("nan")})
