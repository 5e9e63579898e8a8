"""Tests an agent and its client."""

from __future__ import annotations

import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import worker.receive.rank_agents.agent_messages as wire
from rl_plane._util.framing import MAX_FRAME_BYTES, send_frame
from rl_plane._util.tasks import Cancelled
from rl_plane.errors import EngineFailed, InvalidWeights, PlaneError
from tests.support.failed_accept import fail_an_accept
from tests.support.other_user import as_another_user
from worker.receive.rank_agents.agent_client import AgentClient
from worker.receive.rank_agents.agent_server import AgentServer, Method

BOUND_S = 60.0
MANY_DESCRIPTORS = 1100
"""More than `select` can name."""

Serve = Callable[[int, Mapping[str, Method]], AgentClient]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "sockets"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture
def serve(directory: Path) -> Iterator[Serve]:
    servers: list[AgentServer] = []

    def start(rank: int, methods: Mapping[str, Method]) -> AgentClient:
        servers.append(AgentServer.of_rank(directory, rank, methods))
        servers[-1].start()
        return AgentClient.of_ranks(directory, len(servers))

    yield start
    for server in servers:
        server.close()


def test_a_process_with_many_descriptors_calls_and_answers(serve: Serve) -> None:
    """Strangers may have connected to other sockets of the process, or the engine has opened many files."""
    client = serve(0, {"cancelled": lambda body, cancelled: cancelled()})
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2 * MANY_DESCRIPTORS:
        pytest.skip(f"this system allows {hard} descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * MANY_DESCRIPTORS), hard))
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(MANY_DESCRIPTORS)]
    try:
        assert client.ask("cancelled") == [False]
    finally:
        for descriptor in opened:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_an_agent_still_answers_after_it_had_no_descriptors_left(
    serve: Serve, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    client = serve(0, {"ping": lambda body, cancelled: "here"})
    fail_an_accept(socket.AF_UNIX, str(wire.socket_of(directory, 0)), caplog)
    assert client.ask("ping") == ["here"]


def test_a_process_of_another_user_is_not_answered(serve: Serve) -> None:
    client = serve(0, {"secret": lambda body, cancelled: "told"})
    assert client.ask("secret") == ["told"]
    with as_another_user(), pytest.raises(EngineFailed, match=r"broke off|can't be reached"):
        client.ask("secret")


def test_a_cancelled_call_is_cancelled_in_the_agent_too(serve: Serve) -> None:
    begun, seen = threading.Event(), threading.Event()

    def wait(_: Mapping[str, Any], cancelled: Cancelled) -> None:
        begun.set()
        while not cancelled():
            time.sleep(0.001)
        seen.set()
        raise EngineFailed("staging was cancelled")

    client = serve(0, {"wait": wait})
    with pytest.raises(EngineFailed, match="cancelled"):
        client.ask("wait", cancelled=begun.is_set)
    assert seen.wait(BOUND_S)


def test_a_caller_that_is_gone_cancels(serve: Serve, directory: Path) -> None:
    seen = threading.Event()

    def wait(_: Mapping[str, Any], cancelled: Cancelled) -> None:
        while not cancelled():
            time.sleep(0.001)
        seen.set()

    serve(0, {"wait": wait})
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(wire.socket_of(directory, 0)))
        send_frame(connection, {"op": "wait"})
    assert seen.wait(BOUND_S)


def test_the_first_error_cancels_the_other_ranks(serve: Serve) -> None:
    seen = threading.Event()

    def fail(_: Mapping[str, Any], __: Cancelled) -> None:
        raise InvalidWeights("wrong", field="transport")

    def wait(_: Mapping[str, Any], cancelled: Cancelled) -> None:
        while not cancelled():
            time.sleep(0.001)
        seen.set()

    serve(0, {"x": wait})
    client = serve(1, {"x": fail})
    with pytest.raises(InvalidWeights, match="wrong"):
        client.ask("x")
    assert seen.is_set()


def test_a_call_fails_if_its_agent_breaks_off_or_is_absent(serve: Serve, directory: Path) -> None:
    client = serve(0, {"big": lambda *_: "x" * 100, "bug": lambda *_: 1 / 0})
    with pytest.raises(EngineFailed, match="ZeroDivisionError"):
        client.ask("bug")
    with pytest.raises(PlaneError, match="has no 'other'"):
        client.ask("other")
    with pytest.raises(EngineFailed, match="rank 1 can't be reached"):
        AgentClient.of_ranks(directory, 2).ask("big")
    assert client.ask("big") == ["x" * 100]


def test_waits_are_bounded(serve: Serve, directory: Path) -> None:
    ended = threading.Event()
    serve(0, {"hang": lambda *_: ended.wait(BOUND_S)})
    client = AgentClient.of_ranks(directory, 1, cancel_wait_s=0.1)
    with pytest.raises(PlaneError, match="did not end in time"):
        client.ask("hang", timeout_s=0.1)
    with pytest.raises(EngineFailed, match="cancelled"):
        client.ask("hang", cancelled=lambda: True)
    ended.set()


def test_frames_are_bounded(serve: Serve, directory: Path) -> None:
    client = serve(0, {"ok": lambda *_: {}, "big": lambda *_: bytes(MAX_FRAME_BYTES)})
    with pytest.raises(EngineFailed, match="broke off"):
        client.ask("big")
    for sent in (b"\xff\xff\xff\xff", b"\x00\x00\x00\x01\x01", b"\x00"):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(wire.socket_of(directory, 0)))
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(1) == b""  # it hangs up
    assert client.ask("ok") == [{}]


def test_a_child_dies_with_its_parent() -> None:
    """The parent is killed with SIGKILL."""
    child = (
        "import time; from rl_plane._util.processes import die_with_parent; "
        "die_with_parent()(); print('up', flush=True); time.sleep(60)"
    )
    parent = (
        "import subprocess, sys; "
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}], stdin=subprocess.PIPE, stdout=subprocess.PIPE); "
        "child.stdout.readline(); print(child.pid, flush=True); child.wait()"
    )
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        watched = os.pidfd_open(int(process.stdout.readline()))
        process.kill()
    try:
        import select

        assert select.select([watched], [], [], BOUND_S)[0], "the child lives on"
    finally:
        if not select.select([watched], [], [], 0)[0]:
            signal.pidfd_send_signal(watched, signal.SIGKILL)
        os.close(watched)


_STARTER = """
import multiprocessing, os, signal, sys, time

def child(late, told):
    if late:  # its parent is gone by the time it looks
        os.kill(os.getppid(), signal.SIGKILL)
        while os.getppid() == multiprocessing.parent_process().pid:
            time.sleep(0.01)
    from worker.receive.rank_agents.agent_server import belong_to_worker
    belong_to_worker()
    os.write(told, b"alive")
    time.sleep(60)

if __name__ == "__main__":
    told = int(sys.argv[2])
    os.set_inheritable(told, True)
    context = multiprocessing.get_context("fork")
    context.Process(target=child, args=(sys.argv[1] == "late", told)).start()
    os.close(told)
    time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="relies on PR_SET_PDEATHSIG")
@pytest.mark.parametrize("when", ["late", "running"])
def test_an_engines_process_ends_with_who_started_it(tmp_path: Path, when: str) -> None:
    (tmp_path / "starter.py").write_text(_STARTER)
    read, write = os.pipe()
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    starter = subprocess.Popen(
        [sys.executable, str(tmp_path / "starter.py"), when, str(write)], pass_fds=[write], env=environment
    )
    os.close(write)
    with os.fdopen(read, "rb", buffering=0) as told, starter:
        try:
            if when == "running":
                assert told.read(5) == b"alive"
                starter.kill()
            assert select.select([told], [], [], BOUND_S)[0]  # it has ended, and its end of the pipe with it
            assert told.read(5) == b""
        finally:
            starter.kill()


def test_several_threads_of_a_call_ask_whether_it_was_cancelled(serve: Serve) -> None:
    def ask_often(_: Mapping[str, Any], cancelled: Cancelled) -> list[bool]:
        with ThreadPoolExecutor(4) as pool:
            return list(pool.map(lambda _: any(cancelled() for _ in range(2000)), range(4)))

    assert serve(0, {"ask": ask_often}).ask("ask") == [[False] * 4]
