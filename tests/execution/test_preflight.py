"""What a later stage could not carry out is refused before anything is started."""

from __future__ import annotations

import pytest

from pipeline.errors import ConfigError
from pipeline.execution.preflight import SUBMITTED_JOB, check_config

HUB = {"target__model": "owner/model"}


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"train__num_heads": 129}, "train.num_heads"),
        ({"calibrate__depth": 4}, "calibrate.depth"),
        ({"export__formats": ["shared"]}, "export.formats"),
        ({"calibrate__choices": "/absent.json"}, "calibrate.choices"),
        ({"check__prompts": "/absent.jsonl"}, "check.prompts"),
        ({"push__repo_id": "me/heads"}, "push.base_model"),
        ({"push__repo_id": "heads", **HUB}, "push.repo_id"),
        ({"push__repo_id": "me/heads", "push__base_model": "not an id"}, "push.base_model"),
    ],
)
def test_it_is_refused_and_the_key_is_named(make_config, tmp_path, changes, key):
    with pytest.raises(ConfigError, match=key) as caught:
        check_config(make_config(tmp_path, **changes))
    assert "\n" not in str(caught.value) and caught.value.exit_code == 2


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"train__num_heads": 128},
        {"calibrate__depth": 3},
        {"export__formats": ["shared"], "train__lm_head": "tied"},
        {"push__repo_id": "me/heads", **HUB},
        {"push__repo_id": "me/heads", "push__base_model": "owner/model"},
    ],
)
def test_it_is_allowed(make_config, tmp_path, changes):
    check_config(make_config(tmp_path, **changes))


def test_a_submitted_job_keeps_nothing_in_its_uploaded_copy(make_config, tmp_path, monkeypatch):
    (tmp_path / "copy").mkdir()
    monkeypatch.chdir(tmp_path / "copy")
    inside, outside = tmp_path / "copy" / "runs", tmp_path / "runs"
    check_config(make_config(inside))
    monkeypatch.setenv(SUBMITTED_JOB, "{}")
    check_config(make_config(outside))
    with pytest.raises(ConfigError, match=r"run\.root"):
        check_config(make_config(inside))
    with pytest.raises(ConfigError, match=r"run\.store"):
        check_config(make_config(outside, run__store=str(inside)))
