"""How a command ends: its errors are one paragraph on stderr and an exit code, its signals 128 and
their number.

Exit codes: those of `pipeline.errors`, and `UNEXPECTED` for what no code foresaw, whose traceback
is kept in a file.
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
from types import FrameType
from typing import Any, TextIO, cast

import typer
from rich.console import Console

from pipeline.errors import EnvironmentFault, Interrupted, MedusaDistillError
from pipeline.formatting import visible
from pipeline.redact import keep_out_of_logs, redacted
from pipeline.storage.atomic import disk_fault

UNEXPECTED = 70  # EX_SOFTWARE of sysexits.h
STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def ends_well(story: Callable[[], Any]) -> int:
    """Run a command or a flow, print errors as readable paragraphs, and return the exit code."""
    stops: list[Interrupted] = []
    keep_out_of_logs()

    def stop(signum: int, frame: FrameType | None) -> None:
        signal.signal(signum, signal.SIG_DFL)  # a second signal ends the process at once
        stops.append(
            Interrupted(
                signum, "Stopped.", "What was committed is kept; the same command continues."
            )
        )
        raise KeyboardInterrupt  # while Ray waits it lets no other exception through

    for signum in STOPS:
        if (
            signum != signal.SIGHUP or signal.getsignal(signum) is not signal.SIG_IGN
        ):  # which is nohup's wish
            signal.signal(signum, stop)
    try:
        with _output():
            result = story()
    except (Exception, KeyboardInterrupt) as error:
        return _print_error(stops[0] if stops else error)
    if stops:  # also where a caller handled the interrupt
        return _print_error(stops[0])
    return result if isinstance(result, int) else 0


def _print_error(error: BaseException) -> int:
    """Print an error as one paragraph and return its exit code."""
    console = Console(stderr=True, soft_wrap=True, highlight=False, emoji=False)
    if isinstance(error, typer.TyperException):
        said, code = f"{error.format_message().rstrip('.')}. See --help.", error.exit_code
        if not error.format_message():  # no command was given; the help was printed
            return code
    elif isinstance(error, MedusaDistillError):
        said, code = str(error), error.exit_code
    elif fault := disk_fault(error):
        said, code = str(fault), fault.exit_code
    else:
        said, code = _unexpected(error), UNEXPECTED
    if code == 128 + signal.SIGPIPE:  # as with `| head`: whoever stopped reading knows
        return code
    with contextlib.suppress(OSError):  # stderr may be gone as well
        console.print(
            "[yellow]stopped:[/] " if isinstance(error, Interrupted) else "[red]error:[/] ", end=""
        )
        console.print(
            visible(" ".join(redacted(said).split())), markup=False
        )  # one paragraph, whatever it quotes
        if os.environ.get("MEDUSA_DISTILL_TRACEBACK"):
            console.print(visible(_traceback(error)), markup=False)
    return code


def _unexpected(error: BaseException) -> str:
    """What to say of a defect; its traceback goes to a file of its own."""
    where = traceback.extract_tb(error.__traceback__)[-1:]
    at = f" at {os.path.basename(where[0].filename)}:{where[0].lineno}" if where else ""
    kept = "set MEDUSA_DISTILL_TRACEBACK=1 to see its traceback"
    with contextlib.suppress(OSError):
        handle, path = tempfile.mkstemp(prefix="medusa-distill-", suffix=".traceback.txt")
        with os.fdopen(handle, "w", encoding="utf-8", errors="replace") as file:
            file.write(_traceback(error))
        kept = f"its traceback is in {path}"
    what = ": ".join(
        [type(error).__name__, *(line[:300] for line in str(error).strip().splitlines()[:1])]
    )
    return (
        f"{what}{at}. Nothing here foresaw this: it is a defect of medusa-distill, or of a library"
        f" that it uses; {kept}. What was committed is kept; the same command continues."
    )


def _traceback(error: BaseException) -> str:
    return redacted("".join(traceback.format_exception(error)))


@contextlib.contextmanager
def _output() -> Iterator[None]:
    """Standard output in any encoding, whose failures are its own and not those of what is being
    written elsewhere.
    """
    plain = sys.stdout
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(
                errors="replace"
            )  # a mark that the terminal has no character for becomes `?`
    sys.stdout = cast(TextIO, _Output(plain))
    try:
        yield
        sys.stdout.flush()
    finally:
        sys.stdout = plain


class _Output:
    """A stream whose failing writes are errors for a person."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._errors():
            return self._stream.write(text)

    def flush(self) -> None:
        with self._errors():
            self._stream.flush()

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            with contextlib.suppress(
                OSError, ValueError
            ):  # what is still buffered goes nowhere, and fails no more
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
            if isinstance(error, BrokenPipeError):
                raise Interrupted(signal.SIGPIPE, "Nobody reads the output any more.") from None
            fix = (
                "What was committed is kept; send the output elsewhere and run the same command"
                " again."
            )
            what = f"Standard output cannot be written: {error.strerror or error}."
            raise EnvironmentFault(what, "standard output", fix) from error
