"""What the tampering benchmark would find: each problem of an end that is wrong, none of one that is right."""

from __future__ import annotations

import random
import shutil

import pytest

from benchmarks.endings import (
    Ended,
    by_its_name,
    changes,
    digest,
    ending_problems,
    output_problems,
    result_problems,
    tree_of,
    whole_shards,
)
from benchmarks.mutations import MUTATIONS, link
from benchmarks.outlets import (
    checked_problems,
    compared_problems,
    copied_problems,
    half_restored_problems,
    published_problems,
)
from tests.flows.tiny import latest


def ended(code: int | None, *, name: str = "run", out: str = "", err: str = "") -> Ended:
    return Ended([name], code, out, err)


@pytest.mark.parametrize(
    ("end", "found"),
    [
        (ended(0), []),
        (ended(3, err="error: damaged.\n"), []),
        (ended(1, name="verify", err="error: Damaged.\n"), []),
        (ended(None), ["does not end"]),
        (ended(70, err="error: defect\n"), ["ends with 70"]),
        (ended(-9), ["ends with -9"]),
        (ended(3), ["ends with 3 and 0 paragraphs"]),
        (ended(0, err="error: but 0\n"), ["ends with 0 and 1 paragraphs"]),
        (ended(1, err="error: x\n"), ["ends with 1, which does not fit"]),
        (ended(2, err="error: x\n"), ["ends with 2, which does not fit"]),
        (ended(0, out="Traceback (most recent call last)"), ["shows a traceback"]),
        (ended(0, out="\x1b[2J"), ["writes control characters"]),
    ],
)
def test_an_end_is_judged(end, found):
    assert ending_problems(end, is_config=False) == found


def test_what_is_said_is_held_against_what_was_said_before():
    before = ended(0, name="status", out="train  done  4  77  why\ncheck  done  1  2  why\n")
    lie = ended(0, out="train  done  4  78  why\ncheck  partial  1\n")
    assert output_problems("status", lie, before, "bytes", damaged=True) == ["status of train is not true"]
    assert output_problems("status", before, before, "bytes", damaged=True) == []
    assert output_problems("verify", ended(0), ended(0), "bytes", damaged=True)
    assert output_problems("chat", ended(0, out="b"), ended(0, out="a"), "bytes", damaged=False)
    assert output_problems("plan", ended(4), ended(0), "times", damaged=False)
    assert output_problems("chat", ended(3), ended(0, out="a"), "bytes", damaged=True) == []


def test_a_result_is_held_against_the_untampered_run_s(finished_run, copied_run):
    run, reference = copied_run.path, finished_run.path
    whole = whole_shards(run, reference)
    assert result_problems(ended(0), run, reference, "x", whole=whole, unread=False) == []
    heads = latest(copied_run, "train").path / "heads.safetensors"
    heads.write_bytes(heads.read_bytes()[:-1] + b"?")
    (run / "report.json").write_text("{}")
    files, figures = result_problems(ended(0), run, reference, "x", whole=whole, unread=False)
    assert "heads.safetensors" in files and "check.passed" in figures
    shard = latest(copied_run, "seeds").shard_path(0)
    shard.unlink()
    lost = result_problems(ended(3), run, reference, "x", whole=whole, unread=False)
    assert lost[0].startswith("refuses, and 1 whole shards") and str(shard.relative_to(run)) in lost[0]


def test_a_shard_that_was_not_whole_before_a_command_is_not_its_loss_and_each_other_one_is(finished_run, copied_run):
    run, reference = copied_run.path, finished_run.path
    stage = latest(copied_run, "seeds").path
    (stage / "shards").rename(stage / "swapped")
    moved = [str(path.relative_to(reference)) for path in latest(finished_run, "seeds").shards()]
    whole = whole_shards(run, reference)
    assert moved and whole and not set(moved) & set(whole)
    assert result_problems(ended(4), run, reference, "x", whole=whole, unread=False) == []
    (run / whole[0]).unlink()
    assert result_problems(
        ended(4), run, reference, whole[0], whole=whole, unread=False
    )  # also where it was tampered with


def test_a_link_may_be_called_by_its_goal_s_name_and_by_no_other(tmp_path):
    before, told = ended(0, out="seeds:0  seeds-1\nuser: why"), "seeds:0  linked-seeds-1\nuser: why"
    (tmp_path / "seeds-1").mkdir()
    (tmp_path / "outside").mkdir()
    goal = link(tmp_path / "seeds-1", tmp_path / "outside", random.Random(0))
    assert (
        output_problems("inspect seeds", by_its_name(ended(0, out=told), goal, "seeds-1"), before, "", damaged=False)
        == []
    )
    for false in (told.replace("linked", "foreign"), told.replace("why", "no")):
        said = by_its_name(ended(0, out=false), goal, "seeds-1")
        assert output_problems("inspect seeds", said, before, "", damaged=False)


def test_every_mutation_changes_the_run_or_a_time_and_is_noticed_in_the_tree(finished_run, tmp_path):
    rng = random.Random(0)
    for way in MUTATIONS:
        run, outside = tmp_path / "run", tmp_path / "outside"
        for place in (run, outside):
            shutil.rmtree(place, ignore_errors=True)
        outside.mkdir()
        shutil.copytree(finished_run.path, run, symlinks=True)
        before = tree_of(tmp_path)
        path = rng.choice([path for path in sorted(run.rglob("*")) if way.fits(path)])
        way.tamper(path, outside, rng)
        unseen = way.name in ("flip_unnoticed", "retime")
        assert changes(before, tree_of(tmp_path), "") or unseen or path.stat().st_size == 0, (way.name, path)


def test_what_a_push_leaves_on_the_hub_is_held_against_the_untampered_run_s():
    wanted = {"me/heads": {"README.md": b"card", "config.json": b"{}"}}
    other = {"me/heads": {"README.md": b"other", "config.json": b"{}"}}
    assert published_problems(ended(0), wanted, wanted) == published_problems(ended(3), {}, wanted) == []
    assert published_problems(ended(0), {}, wanted) and published_problems(
        ended(0), wanted | {"me/more": {"x": b""}}, wanted
    )
    assert published_problems(ended(3), wanted, wanted) == ["refuses, and this is visible: me/heads"]
    assert published_problems(ended(0), other, wanted) and not published_problems(
        ended(0), other, wanted, but={"README.md"}
    )


def test_a_check_of_tampered_heads_may_find_other_rates_and_no_other_text():
    wanted = {"native": {"acceleration_rate": 2.0}, "answers": {"plain": [["so."]]}}
    slower, other = wanted | {"native": {"acceleration_rate": 1.5}}, wanted | {"answers": {"plain": [["no."]]}}
    assert checked_problems(ended(0), wanted, wanted, damaged=False) == []
    assert checked_problems(ended(0), slower, wanted, damaged=True) == []
    assert checked_problems(ended(0), slower, wanted, damaged=False)
    assert checked_problems(ended(0), other, wanted, damaged=True) and checked_problems(
        ended(0), {}, wanted, damaged=True
    )
    assert checked_problems(ended(1), {}, wanted, damaged=False) and not checked_problems(
        ended(1), {}, wanted, damaged=True
    )


def test_a_comparison_may_know_less_of_a_run_where_it_says_why():
    before = ended(0, out="          run      whole\ncheck     passed   passed\nheads     0.4 MB   0.4 MB\n")
    less = before.stdout.replace("passed   passed", "-        passed")
    assert compared_problems(before, before) == []
    assert compared_problems(ended(0, out=less), before) == ["knows less of a run, and does not say why"]
    assert compared_problems(ended(0, out=less + "! run is unfinished: check.\n"), before) == []
    assert compared_problems(ended(0, out=before.stdout.replace("0.4 MB   ", "0.5 MB   ")), before)
    assert compared_problems(ended(0, out="          run      whole\ncheck     passed   passed\n"), before)


def test_what_was_restored_is_held_against_the_run_and_half_of_it_is_none(tmp_path):
    run, restored = tmp_path / "run", tmp_path / "restored"
    for place in (run, restored):
        place.mkdir()
        (place / "heads").write_text("heads")
    counted = {"heads": digest(run / "heads")}
    assert copied_problems(run, restored, counted, some=False) == half_restored_problems(run, restored) == []
    (run / "heads").write_text("damaged")
    assert copied_problems(run, restored, counted, some=False) == [], "as it was made"
    (restored / "heads").write_text("other")
    assert copied_problems(run, restored, counted, some=False) and half_restored_problems(run, restored)
    (run / "heads").write_text("heads")
    (restored / "heads").unlink()
    assert copied_problems(run, restored, counted, some=False) and not copied_problems(
        run, restored, counted, some=True
    )
    (restored / "run.yaml").write_text("run")
    assert half_restored_problems(run, restored) == ["refuses, and what it leaves is a run"]
