"""The end of a command: errors become one paragraph on stderr and an exit code.

The exit code comes from the error's class in `pipeline.errors`, 128 plus the signal's number after
a signal, or `UNEXPECTED` for an unexpected exception, whose traceback is written to a file.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, TextIO, cast

import typer
from rich.console import Console

from pipeline.errors import KEPT, STOPS, Interrupted, MedusaDistillError
from pipeline.formatting import visible
from pipeline.redact import keep_out_of_logs, redacted
from pipeline.storage.atomic import disk_fault

UNEXPECTED = 70  # EX_SOFTWARE of sysexits.h


def ends_well(story: Callable[[], Any], *, commits: bool = True) -> int:
    """Run a command or flow, print its error if it fails, and return the exit code.

    The error or signal that ended `story` determines the exit code. Otherwise the code is the
    result if it is an int, else 0. From now on known secrets are redacted in log records, and
    SIGTERM, SIGINT and SIGHUP are handled: the first signal stops the command cleanly, the same one
    again ends the process. Under nohup, SIGHUP stays ignored.

    Args:
        commits: Whether `story` commits results, and can continue after it was ended.
    """
    stops = []
    keep_out_of_logs()

    def stop(signum: int, frame: FrameType | None) -> None:
        """Store the signal, and interrupt the command."""
        signal.signal(signum, signal.SIG_DFL)  # a second signal ends the process at once
        stops.append(Interrupted(signum, KEPT if commits else None))
        raise KeyboardInterrupt  # while Ray waits it lets no other exception through

    for signum in STOPS:
        is_nohup = signum == signal.SIGHUP and signal.getsignal(signum) is signal.SIG_IGN
        if not is_nohup:
            signal.signal(signum, stop)
    try:
        with _output():
            result = story()
    except (Exception, KeyboardInterrupt) as error:
        return _print_error(stops[0] if stops else error, commits)
    if stops:  # also where a caller handled the interrupt
        return _print_error(stops[0], commits)
    return result if isinstance(result, int) else 0


def _print_error(error: BaseException, commits: bool) -> int:
    """Print a command's error as one paragraph and return the command's exit code.

    Nothing is printed if the reader of the output has gone, or if the help was already printed. The
    message of an unexpected error states that results are kept if the command commits any.
    """
    fault = disk_fault(error)
    if isinstance(error, typer.TyperException):
        text, code = f"{error.format_message().rstrip('.')} (see --help).", error.exit_code
        if not error.format_message():  # no command was given; the help was printed
            return code
    elif isinstance(error, MedusaDistillError):
        text, code = str(error), error.exit_code
    elif fault:
        text, code = str(fault), fault.exit_code
    else:
        text, code = _defect_message(error), UNEXPECTED
        if commits:
            text += f" {KEPT}"
    if code == 128 + signal.SIGPIPE:  # as with `| head`: the reader has gone
        return code
    console = Console(stderr=True, soft_wrap=True, highlight=False, emoji=False)
    with contextlib.suppress(OSError):  # stderr may be gone too
        if not isinstance(error, Interrupted):
            console.print("[red]error:[/]", end=" ")
        console.print(visible(" ".join(redacted(text).split())), markup=False)
        if os.environ.get("MEDUSA_DISTILL_TRACEBACK"):
            console.print(visible(_traceback(error)), markup=False)
    return code


def _defect_message(error: BaseException) -> str:
    """Describe an unexpected error of a command, and write its traceback to a temporary file."""
    message = str(error).strip().split("\n")[0][:300]
    last = traceback.extract_tb(error.__traceback__)[-1]
    what = f"{type(error).__name__}: {message} at {Path(last.filename).name}:{last.lineno}"
    kept = "set MEDUSA_DISTILL_TRACEBACK=1 to see its traceback"
    with contextlib.suppress(OSError):
        with tempfile.NamedTemporaryFile(
            "w", prefix="medusa-distill-", suffix=".txt", delete=False, errors="replace"
        ) as file:
            file.write(_traceback(error))
        kept = f"its traceback is in {file.name}"
    return f"{what}. This is a defect of medusa-distill, or of a library that it uses; {kept}."


def _traceback(error: BaseException) -> str:
    """Return the traceback of a command's error, with known secrets redacted."""
    return redacted("".join(traceback.format_exception(error)))


@contextlib.contextmanager
def _output() -> Iterator[None]:
    """Context manager that makes a command's standard streams safe to read and write.

    Characters that a standard stream cannot encode or decode are replaced. A write to standard
    output raises Interrupted if its reader has gone.
    """
    plain = sys.stdout
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # an unknown character becomes `?`
    sys.stdout = cast(TextIO, _Output(plain))
    try:
        yield
        sys.stdout.flush()
    finally:
        sys.stdout = plain


class _Output:
    """A wrapper of standard output that raises Interrupted if the reader has gone."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write to a command's standard output; return the number of characters."""
        with self._errors():
            return self._stream.write(text)

    def flush(self) -> None:
        """Flush a command's standard output."""
        with self._errors():
            self._stream.flush()

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Context manager that drops the rest of the output after an error; see the class."""
        try:
            yield
        except OSError as error:
            with contextlib.suppress(OSError, ValueError):  # drop the rest of the buffer
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
            if isinstance(error, BrokenPipeError):
                raise Interrupted(signal.SIGPIPE) from None
            raise
