"""Tests a rank's agent and its client, with the fake engine's holder."""

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
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import worker.receive.rank_agents.agent_messages as wire
from rl_plane._util.framing import MAX_FRAME_BYTES, send_frame
from rl_plane._util.tasks import Cancelled, never
from rl_plane.errors import EngineFailed, InvalidRequest, InvalidWeights, PlaneError
from rl_plane.transports.base import TransportContext
from tests.support.receive_requests import NamedRequest, files_request
from worker.engines.base import EngineOptions
from worker.engines.fake.adapter import FakeEngine, make_fake_model
from worker.receive.rank_agents.agent_client import AgentClient
from worker.receive.rank_agents.agent_server import AgentServer, Method, receiver_methods
from worker.receive.rank_agents.ranks import Ranks
from worker.receive.staging import DigestingStream, model_digest

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
        servers.append(AgentServer(directory, rank, methods))
        servers[-1].start()
        return AgentClient(directory, len(servers))

    yield start
    for server in servers:
        server.close()


@pytest.fixture
async def engines(tmp_path: Path) -> list[FakeEngine]:
    """Two ranks, each with the whole model."""
    base = make_fake_model(tmp_path / "base", 0)
    found = [FakeEngine(EngineOptions(base, weight_roots=(tmp_path,))) for _ in range(2)]
    for engine in found:
        await engine.start()
    return found


@pytest.fixture
def ranks(serve: Serve, engines: list[FakeEngine]) -> Ranks:
    for rank, engine in enumerate(engines):
        client = serve(rank, receiver_methods(engine.receiver, rank))
    found = Ranks(client)
    found.start()
    return found


def reception(path: Path, name: str = "s", **more: Any) -> NamedRequest:
    return files_request(name, path, **more)


def holds(engine: FakeEngine, name: str) -> bool:
    """Returns whether something is open or staged under this name, and takes it away."""
    for takes in (partial(engine.receiver.take, name), partial(engine.receiver.receive, name, never)):
        with suppress(EngineFailed):
            takes()
            return True
    return False


def test_every_rank_receives(ranks: Ranks, engines: list[FakeEngine], tmp_path: Path) -> None:
    new = make_fake_model(tmp_path / "new", 1)
    assert ranks.weight_spec() == engines[0].weight_spec()
    assert "filesystem" in ranks.transports
    ranks.open(*reception(new, digest=model_digest(new)))
    reply = ranks.receive("s", never)
    told = {"digest": model_digest(new), "tensors": 4, "bytes": 4096}
    assert reply == {**told, "refetchable": True, "ranks": [{"rank": 0, **told}, {"rank": 1, **told}]}
    assert all(holds(engine, "s") for engine in engines)
    for name, is_received in (("opened", False), ("staged", True)):
        ranks.open(*reception(new, name))
        if is_received:
            ranks.receive(name, never)
        ranks.discard(name)
        ranks.discard(name)
        assert not any(holds(engine, name) for engine in engines)


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


def test_a_process_of_another_user_is_not_answered(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    client = serve(0, {"secret": lambda body, cancelled: "told"})
    assert client.ask("secret") == ["told"]
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    with pytest.raises(EngineFailed, match=r"broke off|can't be reached"):
        client.ask("secret")


@pytest.mark.engines("nixl")
def test_the_copy_of_the_first_rank_is_offered_to_others(
    ranks: Ranks, engines: list[FakeEngine], tmp_path: Path
) -> None:
    from rl_plane.transports.nixl.receiver import NixlTransport

    new = make_fake_model(tmp_path / "new", 1)
    ranks.open(*reception(new, digest=model_digest(new), keep=True))
    ranks.receive("s", never)
    assert ranks.offer() is None, "it is not swapped in"
    for engine in engines:
        engine.receiver.take("s")
    place = ranks.offer()
    assert place is not None
    assert place == ranks.offer()
    assert receiver_methods(engines[1].receiver, 1)["offer"]({}, never) is None
    assert place["digest"] == model_digest(new)
    transport = NixlTransport(TransportContext())
    delivery = transport.open(place["transport"], "base")
    stream = DigestingStream(delivery, expected_digest=model_digest(new))
    assert len(list(stream)) == 4
    delivery.close()
    ranks.open(*reception(new, "t"))
    ranks.receive("t", never)
    assert ranks.offer() is None
    with pytest.raises(InvalidRequest, match="source_gone"):
        transport.open(place["transport"], "base")


def test_a_staging_that_is_not_open_is_not_received(
    ranks: Ranks, engines: list[FakeEngine], tmp_path: Path
) -> None:
    with pytest.raises(EngineFailed, match="nothing is open"):
        ranks.receive("s", never)
    ranks.open(*reception(make_fake_model(tmp_path / "new", 1)))
    ranks.discard("s")
    with pytest.raises(EngineFailed, match="nothing is open"):
        ranks.receive("s", never)


def test_an_error_keeps_its_type_and_facts(ranks: Ranks, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ranks.open(*reception(tmp_path / "absent"))
    assert caught.value.facts["field"] == "transport.path"
    other = make_fake_model(tmp_path / "other", 1, tensors=5)
    with pytest.raises(InvalidWeights) as weights:
        ranks.open(*reception(other))
    assert weights.value.facts["unexpected"]["count"] == 1


def test_weights_that_one_rank_refuses_are_staged_in_none(
    ranks: Ranks, engines: list[FakeEngine], tmp_path: Path
) -> None:
    engines[1].config.fail_stage = True
    ranks.open(*reception(make_fake_model(tmp_path / "new", 1)))
    with pytest.raises(EngineFailed, match="fail_stage"):
        ranks.receive("s", never)
    assert not any(holds(engine, "s") for engine in engines)


def test_ranks_that_received_different_weights(serve: Serve, engines: list[FakeEngine], tmp_path: Path) -> None:
    new, other = make_fake_model(tmp_path / "new", 1), make_fake_model(tmp_path / "other", 2)

    def open_other(body: Mapping[str, Any], cancelled: Cancelled) -> None:
        engines[1].receiver.open(*reception(other))

    serve(0, receiver_methods(engines[0].receiver, 0))
    ranks = Ranks(serve(1, receiver_methods(engines[1].receiver, 1) | {"open": open_other}))
    ranks.start()
    ranks.open(*reception(new))
    with pytest.raises(EngineFailed, match="different weights"):
        ranks.receive("s", never)
    assert not any(holds(engine, "s") for engine in engines)


def test_cancelling(serve: Serve) -> None:
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


def test_an_agent_that_breaks_off_or_is_not_there(serve: Serve, directory: Path) -> None:
    client = serve(0, {"big": lambda *_: "x" * 100, "bug": lambda *_: 1 / 0})
    with pytest.raises(EngineFailed, match="ZeroDivisionError"):
        client.ask("bug")
    with pytest.raises(PlaneError, match="has no 'other'"):
        client.ask("other")
    with pytest.raises(EngineFailed, match="rank 1 can't be reached"):
        AgentClient(directory, 2).ask("big")
    assert client.ask("big") == ["x" * 100]


def test_waits_are_bounded(serve: Serve, directory: Path) -> None:
    ended = threading.Event()
    serve(0, {"hang": lambda *_: ended.wait(BOUND_S)})
    client = AgentClient(directory, 1, cancel_wait_s=0.1)
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
        "from worker.receive.rank_agents.agent_server import die_with_parent; "
        "die_with_parent(); print('up', flush=True); input()"
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
    if late:  # whoever started it is gone by the time it looks
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
