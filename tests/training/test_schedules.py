from __future__ import annotations

import pytest
import torch
from transformers import get_cosine_schedule_with_warmup

from pipeline.training.schedules import cosine_with_warmup, heads_weight


@pytest.mark.parametrize(("total", "warmup"), [(50, 10), (50, 0), (10, 10), (5, 20)])
def test_cosine_with_warmup_is_that_of_transformers(total: int, warmup: int):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = get_cosine_schedule_with_warmup(optimizer, warmup, total)
    for step in range(total + 1):
        assert cosine_with_warmup(step, total, warmup) == pytest.approx(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()


def test_rate_stays_at_zero_after_the_last_step():
    assert cosine_with_warmup(61, 50, 10) == pytest.approx(0.0, abs=1e-12)


def test_the_heads_weight_rises_along_a_quarter_sine_a_line_or_not_at_all():
    """At T/3 a quarter sine has half its height, at 2T/3 half the root of 3."""
    total, peak = 300, 0.01
    sine, linear, constant = (
        [heads_weight(step, total, peak, schedule) for step in (0, 100, 200, 300)]
        for schedule in ("sine", "linear", "constant")
    )
    assert sine == pytest.approx([0, peak / 2, peak * 3**0.5 / 2, peak])
    assert linear == pytest.approx([0, peak / 3, peak * 2 / 3, peak])
    assert constant == [peak] * 4
