"""An address that answers nobody, and a cluster that dies, are told in one paragraph within seconds."""

from __future__ import annotations

import socket
import threading

import pytest

from pipeline.errors import EnvironmentFault
from pipeline.execution import cluster_watch
from pipeline.execution.cluster_watch import ClusterWatch, require_answer
from pipeline.execution.executor import make_executor

SETTINGS = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"  # the first frame of every HTTP/2 server, RFC 9113 section 6.5


@pytest.fixture
def server():
    """Starts a server that answers every connection with the same bytes, or not at all; returns its address."""
    opened = []

    def serve(answer: bytes | None) -> str:
        listening = socket.create_server(("127.0.0.1", 0))
        opened.append(listening)

        def run() -> None:
            while True:
                try:
                    line, _ = listening.accept()
                except OSError:
                    return
                opened.append(line)
                if answer is not None:
                    line.sendall(answer)

        threading.Thread(target=run, daemon=True).start()
        return f"127.0.0.1:{listening.getsockname()[1]}"

    yield serve
    for one in opened:
        one.close()


def closed_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as once:
        return f"127.0.0.1:{once.getsockname()[1]}"


@pytest.fixture
def quickly(monkeypatch):
    monkeypatch.setattr(cluster_watch, "SECONDS_TO_ANSWER", 0.2)


@pytest.mark.parametrize(
    ("answer", "reason"), [(None, "no answer in"), (b"HTTP/1.1 400 Bad Request\r\n\r\n", "no Ray cluster")]
)
def test_an_address_where_something_else_listens_is_refused(server, quickly, answer, reason):
    address = server(answer)
    with pytest.raises(EnvironmentFault, match=reason) as caught:
        require_answer(address, address)
    assert caught.value.where == address and "unset it" in caught.value.fix


def test_a_grpc_server_answers_and_one_behind_ray_client_or_tls_is_taken_at_its_word(server, quickly, monkeypatch):
    grpc, silent = server(SETTINGS), server(None)
    require_answer(grpc, grpc)
    require_answer(f"ray://{silent}", silent)
    monkeypatch.setenv("RAY_USE_TLS", "1")
    require_answer(silent, silent)


@pytest.mark.parametrize("address", ["{closed}", "ray://{closed}", "no-such-host.invalid:6379", "127.0.0.1:port"])
def test_ray_address_that_answers_nobody_is_told_before_ray_is_asked(monkeypatch, address):
    """Ray's own ways to connect are not patched: they would take minutes."""
    address = address.format(closed=closed_port())
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(EnvironmentFault, match="No Ray cluster answers at RAY_ADDRESS") as caught:
        make_executor("ray")
    assert caught.value.exit_code == 4 and caught.value.where == address and "\n" not in str(caught.value)


def test_ray_address_auto_without_a_cluster_says_that_none_runs_here(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    monkeypatch.setattr("ray._private.services.find_bootstrap_address", lambda temp_dir: None)
    monkeypatch.setattr("ray._private.services.find_gcs_addresses", set)
    with pytest.raises(EnvironmentFault, match="none runs on this machine"):
        make_executor("ray")


@pytest.mark.parametrize("name", ["TMPDIR", "RAY_TMPDIR"])
def test_a_path_that_is_too_long_for_ray_s_sockets_is_named(monkeypatch, tmp_path, name):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    long = tmp_path / ("x" * 70)
    long.mkdir()
    monkeypatch.setenv(name, str(long))
    with pytest.raises(EnvironmentFault, match="too long a path") as caught:
        make_executor("ray")
    assert caught.value.where == f"{name}={long}" and f"Set {name} " in caught.value.fix


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch) -> Clock:
    monkeypatch.setattr(cluster_watch, "time", made := Clock())
    return made


def looks_until_it_is_said(watch: ClusterWatch, clock: Clock) -> float:
    """The seconds until the watch says that the cluster has died."""
    started = clock.now
    while clock.now < started + 100:
        clock.sleep(0.1)
        try:
            watch.check()
        except EnvironmentFault:
            return clock.now - started
    raise AssertionError("it says nothing")


@pytest.mark.parametrize(("own", "patience"), [(True, 1.0), (False, 20.0)])
def test_a_head_of_our_own_is_given_a_second_and_another_s_time_to_be_restarted(clock, own, patience):
    watch = ClusterWatch(closed_port(), None, own=own)
    taken = looks_until_it_is_said(watch, clock)
    assert patience <= taken <= patience + 2 * cluster_watch.SECONDS_BETWEEN_LOOKS + 0.2
    assert "its head" in watch.gone


def test_a_head_that_comes_back_in_time_is_not_missed(clock, server):
    watch = ClusterWatch(closed_port(), None, own=True)
    watch.check()
    watch.gcs_address = server(None)
    watch.settle()
    watch.gcs_address = closed_port()
    assert looks_until_it_is_said(watch, clock) >= 1.0, "its second begins anew"


def test_this_machine_s_scheduler_is_watched_by_its_socket(clock, server, tmp_path):
    path = str(tmp_path / "raylet")
    with socket.socket(socket.AF_UNIX) as raylet:
        raylet.bind(path)
        raylet.listen()
        watch = ClusterWatch(server(None), path, own=True)
        watch.settle()
    looks_until_it_is_said(watch, clock)
    assert "the raylet" in watch.gone


def test_a_failure_that_the_cluster_s_death_explains_is_not_blamed_on_a_worker(clock):
    watch = ClusterWatch(closed_port(), None, own=True)
    with pytest.raises(EnvironmentFault, match="The Ray cluster has died"):
        watch.settle()
