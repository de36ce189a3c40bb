"""However a command ends, its exit code is the promised one and what it says is one paragraph on
stderr.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time

import pytest

from pipeline.cli.app import main
from pipeline.cli.ending import ends_well
from pipeline.errors import KEPT, CheckFailed, ConfigError, DataError, EnvironmentFault


def test_a_run_that_is_to_outlive_its_terminal_does(capsys):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert ends_well(lambda: os.kill(os.getpid(), signal.SIGHUP)) == 0


def raising(error: Exception):
    def story() -> None:
        raise error

    return story


@pytest.mark.parametrize(
    ("kind", "code"), [(CheckFailed, 1), (ConfigError, 2), (DataError, 3), (EnvironmentFault, 4)]
)
def test_each_error_has_its_exit_code(kind, code, capsys):
    assert ends_well(lambda: "anything") == 0 and capsys.readouterr() == ("", "")
    assert ends_well(raising(kind("It broke.", "in here", "Mend it."))) == code
    assert capsys.readouterr() == ("", "error: It broke (in here). Mend it.\n")


def test_an_error_is_one_line_and_quotes_as_it_is(capsys, monkeypatch):
    long = "word " * 100
    quoted = ConfigError(f"Bad:\n  [bold]x[/bold] :smile:\n\t{long}", "a[0]/[/]", "Mend\nit.")
    ends_well(raising(quoted))
    expected = f"error: Bad: [bold]x[/bold] :smile: {long.strip()} (a[0]/[/]). Mend it.\n"
    assert capsys.readouterr().err == expected
    monkeypatch.setenv("MEDUSA_DISTILL_TRACEBACK", "1")
    ends_well(raising(quoted))
    assert "Traceback" in capsys.readouterr().err


def test_a_defect_keeps_its_traceback_without_secrets(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("SOME_TOKEN", "s3cr3t-s3cr3t")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert ends_well(raising(ZeroDivisionError("by s3cr3t-s3cr3t\nand more"))) == 70
    out, err = capsys.readouterr()
    (kept,) = tmp_path.iterdir()
    assert out == "" and err.count("\n") == 1 and str(kept) in err and "Traceback" not in err
    assert err.startswith("error: ZeroDivisionError: by *** at test_ends_well.py:")
    assert "Traceback" in kept.read_text() and "s3cr3t" not in kept.read_text() + err
    assert err.endswith(f"traceback is in {kept}. {KEPT}\n")
    ends_well(raising(ZeroDivisionError()), commits=False)
    assert "are kept" not in capsys.readouterr().err


SAYS_A_MARK = (
    "import sys; from pipeline.cli.ending import ends_well; sys.exit(ends_well(lambda:"
    " print('\u2713 done')))"
)


@pytest.mark.parametrize(
    ("encoding", "mark"), [("utf-8", "\u2713"), ("latin-1", "?"), ("ascii", "?")]
)
def test_a_mark_that_the_terminal_lacks_ends_nothing(encoding, mark):
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    ended = subprocess.run(
        [sys.executable, "-c", SAYS_A_MARK], env=environment, capture_output=True
    )
    assert (ended.returncode, ended.stdout.decode(), ended.stderr) == (0, f"{mark} done\n", b"")


def test_unwritable_output_is_an_error_unless_the_reader_is_gone():
    command = [sys.executable, "-c", SAYS_A_MARK]
    with open("/dev/full", "wb") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert ended.returncode == 4 and ended.stderr.startswith("error: The disk is full")
    reader, writer = os.pipe()
    os.close(reader)
    ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (128 + signal.SIGPIPE, "")


@pytest.mark.parametrize(
    ("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
@pytest.mark.parametrize(
    "taken_for", ["what it is", "an error for the user", "a defect", "nothing"]
)
def test_a_signal_stops_even_if_a_library_catches_it(sent, code, taken_for, capsys):
    def story() -> None:
        try:
            with contextlib.suppress(Exception):  # as libraries do around what may fail
                os.kill(os.getpid(), sent)
                time.sleep(10)
        except BaseException as stop:
            if taken_for == "what it is":
                raise
            if taken_for == "an error for the user":
                raise EnvironmentFault("The engine cannot start.") from stop
            if taken_for == "a defect":
                raise ZeroDivisionError from stop

    assert ends_well(story) == code
    assert capsys.readouterr().err == f"Stopped by {sent.name}. {KEPT}\n"
    assert signal.getsignal(sent) is signal.SIG_DFL, "a second one ends it at once"


@pytest.mark.parametrize(("name", "keeps"), [("run", True), ("push", True), ("serve", False)])
def test_only_commands_that_commit_say_that_something_is_kept(name, keeps, capsys, monkeypatch):
    stop = lambda **_: signal.raise_signal(signal.SIGTERM)  # noqa: E731
    monkeypatch.setattr("pipeline.cli.app.app", stop)
    monkeypatch.setattr(sys, "argv", ["medusa-distill", name])
    with pytest.raises(SystemExit, match="143"):
        main()
    said = capsys.readouterr().err
    assert said.startswith("Stopped by SIGTERM.") and (KEPT in said) == keeps
