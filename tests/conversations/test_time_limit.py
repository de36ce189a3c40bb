"""Code that does not end is ended, in whichever thread it runs; code that ends in time notices
nothing.
"""

from __future__ import annotations

import threading

import pytest

from pipeline.conversations.template import time_limit

LONG = 3600.0  # seconds: no test waits for it


def forever() -> None:
    while True:
        pass


def timers() -> set[threading.Timer]:
    return {thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)}


@pytest.mark.timeout(120)
def test_what_does_not_end_is_ended():
    with pytest.raises(TimeoutError), time_limit(0.05):
        forever()


@pytest.mark.timeout(120)
def test_it_is_ended_in_a_thread_that_is_not_the_first_and_the_others_go_on():
    ended: list[type[BaseException]] = []

    def work() -> None:
        try:
            with time_limit(0.05):
                forever()
        except TimeoutError as error:
            ended.append(type(error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert ended == [TimeoutError]


def test_what_ends_in_time_leaves_no_timer_and_its_own_error_is_kept():
    before = timers()
    with time_limit(LONG):
        pass
    with pytest.raises(ZeroDivisionError), time_limit(LONG):
        _ = 1 // 0
    assert all(timer.finished.is_set() for timer in timers() - before)


@pytest.mark.timeout(120)
def test_a_limit_within_a_limit_ends_only_what_is_inside():
    with time_limit(LONG):
        with pytest.raises(TimeoutError), time_limit(0.05):
            forever()
        went_on = True
    assert went_on
