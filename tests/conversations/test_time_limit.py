"""Code that does not end is ended, in any thread; code that ends in time is left alone."""

from __future__ import annotations

import threading

import pytest

from pipeline.conversations.template import time_limit

LONG = 3600.0  # seconds: no test waits for it


def run_forever(ended: list[threading.Thread]) -> None:
    try:
        with time_limit(0.05):
            while True:
                pass
    except TimeoutError:
        ended.append(threading.current_thread())


@pytest.mark.timeout(120)
def test_endless_code_is_ended_in_its_own_thread_alone():
    ended: list[threading.Thread] = []
    thread = threading.Thread(target=run_forever, args=(ended,))
    with time_limit(LONG):  # which goes on
        thread.start()
        thread.join()
        run_forever(ended)
    assert ended == [thread, threading.current_thread()]


def test_code_within_the_limit_leaves_no_timer_and_its_error():
    with pytest.raises(ZeroDivisionError), time_limit(LONG):
        _ = 1 // 0
    timers = [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
    assert all(timer.finished.is_set() for timer in timers if timer.interval == LONG)
