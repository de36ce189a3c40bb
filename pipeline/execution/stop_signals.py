"""Stop a training at a checkpoint when a signal arrives."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

from pipeline.errors import KEPT, STOPS, Interrupted, StoppedAtCheckpoint
from pipeline.execution.progress import ProgressReporter


@contextlib.contextmanager
def stops_at_checkpoint(progress: ProgressReporter) -> Iterator[None]:
    """Context manager: at a signal of `STOPS`, ask a training to stop, and wait for it.

    A signal before the training reports progress is left to the earlier handler, and a second
    signal ends the process at once. Outside of the main thread, signals are left alone.

    Raises:
        Interrupted: The training has stopped, or has ended after the signal.
    """
    received: list[int] = []

    def ask(signum: int, frame: FrameType | None) -> None:
        """Ask the training to stop at its next checkpoint."""
        if not progress.has_begun:
            signal.signal(signum, earlier[signum])
            signal.raise_signal(signum)
            return
        received.append(signum)
        progress.ask_to_stop()
        for each in earlier:
            signal.signal(each, signal.SIG_DFL)

    earlier: dict[int, Any] = {}  # handlers
    if threading.current_thread() is threading.main_thread():
        for stop in STOPS:
            if signal.getsignal(stop) is not signal.SIG_IGN:  # as under nohup
                earlier[stop] = signal.signal(stop, ask)
    kept = KEPT
    try:
        yield
    except StoppedAtCheckpoint as stopped:
        kept = f"{stopped} The same command continues from there."
    finally:
        for signum, handler in earlier.items():
            signal.signal(signum, handler)
    if received:
        raise Interrupted(received[0], kept)
