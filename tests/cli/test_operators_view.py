"""`plan`, `status` and `verify` on runs that are half done, damaged or changed: what is there, what
is left, why.
"""

from __future__ import annotations

import io
import json
import re
import shutil
from itertools import accumulate, pairwise

import pytest
from rich.console import Console
from rich.text import Text

from pipeline.cli.plan import in_bytes
from pipeline.flow import run_flow
from pipeline.storage.shards import read_rows
from tests.cli.tables import STAGES, line_of, one_paragraph, states
from tests.flows.tiny import last_events, latest, run_again


@pytest.fixture
def half_done(copied_run):
    """Killed in features after three shards of four, one of them before its note was written."""
    features = latest(copied_run, "features")
    (features.path / "DONE.json").unlink()
    features.shard_path(3).unlink()
    for name in ("quarantine/00003.jsonl", "receipts/00003.json", "receipts/00002.json"):
        (features.path / name).unlink()
    for name in STAGES[3:]:
        shutil.rmtree(latest(copied_run, name).path)
        (copied_run.path / "latest" / name).unlink()
    return copied_run


@pytest.fixture
def damaged(copied_run):
    """A shard cut short, and a tree that is gone."""
    shard = latest(copied_run, "generate").shard_path(1)
    shard.write_bytes(shard.read_bytes()[:-9])
    (copied_run.path / "latest/calibrate/tree.json").unlink()
    return copied_run


def test_status_of_a_half_done_run_counts_what_is_there(command, half_done):
    out = command("status", half_done.path).out
    assert states(out) == dict.fromkeys(STAGES[:2], "done") | {
        "features": "partial"
    } | dict.fromkeys(STAGES[3:], "not")
    rows = sum(receipt.num_rows for receipt in latest(half_done, "features").receipts().values())
    assert line_of("features", out).split()[1:5] == ["partial", "3/4", str(rows), "0"]
    assert line_of("features", out).endswith("unfinished ")


def test_verify_of_a_half_done_run_takes_a_shard_without_its_note_for_what_it_is(
    command, half_done
):
    ended = command("verify", half_done.path)
    assert ended.code == 0, ended.err
    lines = ended.out.splitlines()
    assert "3 shards, unfinished" in next(line for line in lines if line.split()[1] == "features")


@pytest.mark.parametrize(
    "damage", ["bit", "truncated", "foreign", "foreign with its note", "quarantine"]
)
def test_verify_of_a_half_done_run_names_the_file_that_is_not_whole(
    command, half_done, make_config, tmp_path, damage
):
    features = latest(half_done, "features")
    bad = features.shard_path(1 if "note" in damage else 2)
    if damage == "quarantine":
        bad = features.quarantine_path(2)
        bad.unlink()
    elif damage.startswith("foreign"):
        changes = {"run__name": "other", "generate__temperature": 1.5}
        other = latest(run_again(make_config(tmp_path, **changes), until="features"), "features")
        shutil.copy2(other.path / "shards" / bad.name, bad)
        if "note" in damage:
            shutil.copy2(other.path / "receipts/00001.json", features.path / "receipts/00001.json")
    else:
        data = bytearray(bad.read_bytes())
        data[100] ^= 1
        bad.write_bytes(data if damage == "bit" else data[:-20])
    ended = command("verify", half_done.path)
    assert ended.code == 1
    assert re.findall(r"\S+\.(?:parquet|jsonl)", one_paragraph(ended.err)) == [str(bad)]


@pytest.mark.slow
def test_verify_names_a_stage_whose_directory_is_gone_and_run_makes_it_again(
    command, copied_run, config_file
):
    gone = latest(copied_run, "check").path
    shutil.rmtree(gone)
    ended = command("verify", copied_run.path)
    assert ended.code == 1 and f"{gone.name} is missing" in one_paragraph(ended.err)
    assert command("run", config_file, "--executor", "inline").code == 0
    assert command("verify", copied_run.path).code == 0


def test_plan_of_a_half_done_run_says_what_is_pending_and_what_is_on_the_disk(
    command, half_done, config_file
):
    out = command("plan", config_file).out
    assert states(out) == dict.fromkeys(STAGES[:2], "kept") | dict.fromkeys(STAGES[2:], "run")
    assert "3 done, 1 pending" in line_of("features", out) and "4 done " in line_of("generate", out)
    features = latest(half_done, "features")
    cached, free = sum(path.stat().st_size for path in features.shards()), r"[\d,.]+ [GM]B are free"
    assert re.search(rf"of which {re.escape(in_bytes(cached))} are on the disk; {free}", out)


@pytest.mark.slow
def test_plan_and_status_of_a_damaged_run_name_the_file_and_only_what_it_costs(
    command, damaged, config_file
):
    out = command("plan", config_file).out
    assert states(out) == dict.fromkeys(STAGES, "kept") | dict.fromkeys(
        ("generate", "calibrate"), "run"
    )
    assert "3 done, 1 pending" in line_of("generate", out)
    for table in (out, command("status", damaged.path).out):
        assert "damaged: shards/00001.parquet" in line_of("generate", table)
        assert "damaged: tree.json" in line_of("calibrate", table)
    assert states(command("status", damaged.path).out)["generate"] == "partial"
    made = run_again_of(command, config_file, damaged)
    assert made == ["generate", "calibrate"], "plan and run agree"


def run_again_of(command, config_file, run) -> list[str]:
    assert command("run", config_file, "--executor", "inline").code == 0
    return [event["stage"] for event in last_events(run) if event["event"] == "stage-started"]


def test_plan_of_a_changed_setting_counts_no_shard_that_was_made_with_the_old_one(
    command, copied_run, config_file
):
    out = command("plan", config_file, "generate.temperature=1.5").out
    assert " 4 pending" in line_of("generate", out) and "changed: temperature" in line_of(
        "generate", out
    )
    assert " 4 pending" in line_of("features", out) and "what comes before it changed" in line_of(
        "features", out
    )
    assert "done" not in line_of("features", out) and "on the disk" not in out


def test_plan_of_nothing_yet_knows_no_shards(command, config_file):
    out = command("plan", config_file).out
    assert "pending" not in out and "never run" in line_of("features", out)


def test_plan_says_when_the_states_do_not_fit_and_counts_those_that_are_there(
    command, half_done, config_file, monkeypatch
):
    free = type("Usage", (), {"free": 100_000})
    monkeypatch.setattr("pipeline.cli.plan.shutil.disk_usage", lambda _: free)
    assert "does not fit" not in command("plan", config_file).out, "three quarters are there"
    assert "does not fit" in command("plan", config_file, "generate.temperature=1.5").out


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (328_000, "328 kB"),
        (1_540_000, "1.5 MB"),
        (655_360_000_000, "655 GB"),
    ],
)
def test_a_size_is_said_in_its_own_unit(number, words):
    assert in_bytes(number) == words


def test_events_have_one_line_for_every_shard_and_every_attempt(
    copied_run, make_config, tmp_path, monkeypatch
):
    from pipeline.stages import generate

    class Unsteady(generate.Worker):
        failed = False

        def __call__(self, task):
            if task.index == 2 and not Unsteady.failed:
                Unsteady.failed = True
                raise RuntimeError("not this time\nnor in one line")
            return super().__call__(task)

    monkeypatch.setattr(generate, "Worker", Unsteady)
    run = run_again(make_config(tmp_path, generate__temperature=1.5), until="generate")
    said = [(event["event"], event["shard"]) for event in last_events(run) if "shard" in event]
    assert sorted(said) == [
        ("shard", 0),
        ("shard", 1),
        ("shard", 2),
        ("shard", 3),
        ("shard-failed", 2),
    ]
    for line in (run.path / "events.jsonl").read_text().splitlines():
        assert json.loads(line)["time"] > 0


REFUSES_SOME = {
    "generate__max_new_tokens": 48,
    "generate__on_truncated": "quarantine",
    "limits__max_quarantine_fraction": 1,
}


def progress_of(run_config, monkeypatch, **terminal) -> tuple[str, list[int]]:
    """What a run says while generate has work, and how many rows have been refused after each
    shard.
    """
    monkeypatch.setattr("pipeline.execution.progress.SECONDS_BETWEEN_LINES", 0)
    said = io.StringIO()
    console = Console(file=said, width=120, **terminal)
    run = run_flow(run_config, until="generate", executor="inline", console=console)
    receipts = [receipt for _, receipt in sorted(latest(run, "generate").receipts().items())]
    return said.getvalue(), list(accumulate(receipt.num_quarantined for receipt in receipts))


def test_progress_is_plain_lines_with_rate_refusals_and_time_left_where_there_is_no_terminal(
    make_config, tmp_path, monkeypatch
):
    said, committed = progress_of(
        make_config(tmp_path, **REFUSES_SOME), monkeypatch, force_terminal=False
    )
    assert "\x1b" not in said and "\r" not in said
    lines = [line for line in said.splitlines() if line.startswith("generate: ")]
    pattern = (
        r"generate: (\d+) of 40 conversations, (?:time left unknown|[\w. ]+ left)"
        r"(?:, [\d,]+ tokens, [\d,]+ tokens/s)?, (\d) of 4 shards(?:, (\d+) quarantined)?"
    )
    found = [re.fullmatch(pattern, line) for line in lines]
    assert all(found), lines
    counts = [(int(match[1]), int(match[2]), int(match[3] or 0)) for match in found]
    assert all(
        before <= after
        for one, two in pairwise(counts)
        for before, after in zip(one, two, strict=True)
    )
    assert any(0 < conversations < 10 for conversations, _, _ in counts), (
        "only whole shards are told"
    )
    assert [
        max(refused for _, shards, refused in counts if shards == number) for number in (1, 2, 3, 4)
    ] == committed
    assert counts[-1] == (40, 4, committed[-1]) and committed[-1]


def test_progress_is_a_bar_on_a_terminal(make_config, tmp_path, monkeypatch):
    said, committed = progress_of(
        make_config(tmp_path, **REFUSES_SOME), monkeypatch, force_terminal=True
    )
    shown = Text.from_ansi(said).plain
    assert "\x1b[" in said
    end = rf"tokens/s, 4 of 4 shards, {committed[-1]} quarantined \d:\d\d:\d\d"
    assert re.search(rf"generate .*40/40.* {end}", shown)
    assert not re.search(r"generate: \d+ of 4", shown)


def test_a_row_that_holds_terminal_commands_is_shown_and_not_obeyed(command, make_config, tmp_path):
    evil = "\x1b[2J\x1b]0;mine\x07 and \x9b31m, then \x08\x08"
    rows = [{"prompt": f"{number} {evil}"} for number in range(30)]
    (tmp_path / "evil.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = make_config(tmp_path, seeds__sources=[{"path": str(tmp_path / "evil.jsonl")}])
    run = run_again(config, until="seeds")
    out = command("inspect", run.path, "seeds", "evil:7").out
    assert "7 ␛[2J␛]0;mine␇ and" in out and not set(out) & set("\x1b\x07\x08\x9b")
    assert [row["messages"][0]["content"] for row in read_rows(latest(run, "seeds").shards()[0])][
        7
    ] == f"7 {evil}"

    (tmp_path / "evil.json").write_text(json.dumps([{evil: 1}]))
    config_words = (
        "run",
        tmp_path / "run/run.yaml",
        f"seeds.sources={tmp_path / 'evil.json'}",
        "--executor",
        "inline",
    )
    ended = command(*config_words)
    assert ended.code == 3 and "␛[2J" in ended.err and not set(ended.err) & set("\x1b\x07\x08\x9b")


def test_an_event_after_one_that_a_full_disk_cut_off_is_a_line_of_its_own(copied_run):
    events = copied_run.path / "events.jsonl"
    whole = events.read_bytes()
    events.write_bytes(whole + b'{"time": 1.0, "eve')
    for number in range(2):
        copied_run.event("shard", shard=number, error="\ud800 ünïcode")
    *before, torn, first, second = events.read_bytes().splitlines()
    assert b"\n".join([*before, b""]) == whole and torn == b'{"time": 1.0, "eve'
    assert [json.loads(line)["shard"] for line in (first, second)] == [0, 1]
