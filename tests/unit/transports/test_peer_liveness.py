"""The connections by which the processes of a group notice that one of them has ended."""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from rl_plane.errors import Unavailable
from rl_plane.transports.group import peer_liveness
from rl_plane.transports.group.peer_liveness import PeerLiveness, hello
from rl_plane.transports.group.rank_layout import Place
from tests.support.commanded_process import forked

BOUND_S = 10.0
PLACE = Place("gloo", "g", "127.0.0.1", 1, world_size=2, rank=1)


def is_closed(line: socket.socket) -> bool:
    line.settimeout(BOUND_S)
    return line.recv(1) == b""


def hear(trainer: PeerLiveness, world_size: int = 2) -> None:
    """Lets the trainer accept one connection that is there, and read what it says."""
    looks = itertools.count()
    assert trainer.watch("g", lambda: next(looks) >= 2, world_size=world_size) == ""


@contextlib.contextmanager
def watching(trainer: PeerLiveness, world_size: int = 2) -> Iterator[list[str]]:
    """Watches on a thread. Yields a list that holds the reason, once there is one or the block has ended."""
    done, why = threading.Event(), list[str]()
    thread = threading.Thread(target=lambda: why.append(trainer.watch("g", done.is_set, world_size=world_size)))
    thread.start()
    try:
        yield why
    finally:
        done.set()
        thread.join(BOUND_S)
        assert not thread.is_alive()


@pytest.mark.parametrize("bound", [{"hello_s": 0.0}, {"strangers": 0}])
def test_a_connection_that_does_not_name_its_rank_is_closed(bound: dict[str, Any]) -> None:
    trainer = PeerLiveness.of_trainer("127.0.0.1", **bound)
    with socket.create_connection(("127.0.0.1", trainer.port)) as stranger, watching(trainer) as why:
        assert is_closed(stranger)
    assert why == [""]
    trainer.close()


def test_the_connection_of_a_known_rank_stays_open() -> None:
    trainer = PeerLiveness.of_trainer("127.0.0.1", hello_s=1.0)
    address = ("127.0.0.1", trainer.port)
    with socket.create_connection(address) as rank:
        rank.sendall(hello(trainer.secret, "g", 1))
        hear(trainer, 3)
        with socket.create_connection(address) as stranger, watching(trainer, 3) as why:
            assert is_closed(stranger)
        assert why == [""]
    assert trainer.watch("g", lambda: False) == "rank 1 is gone"
    trainer.close()


def test_a_second_connection_for_a_rank_and_a_wrong_rank_are_closed() -> None:
    trainer = PeerLiveness.of_trainer("127.0.0.1")
    address = ("127.0.0.1", trainer.port)
    with socket.create_connection(address) as rank:
        rank.sendall(hello(trainer.secret, "g", 1))
        hear(trainer, 3)
        with watching(trainer, 3) as why:
            own, other = hello(trainer.secret, "g", 1), hello(trainer.secret, "g", 2)
            for said in (
                own,
                own + b"I give up",
                hello(trainer.secret, "g", 0),
                hello(trainer.secret, "g", 3),
                hello(trainer.secret, "gg", 2),
                hello("0" * 32, "g", 2),
                hello("", "g", 2),
                other.replace(b" 2 ", b" 02 "),
                other[:-2] + b"\n",
                b"g 2\n",
                b"g 2 \n",
                b"2\n",
                b"g x\n",
                "g \u00b2 \u00b2\n".encode(),
                b"\xff" * 3000 + b"\n",
                b"g " + b"9" * 4000 + b"\n",
            ):
                with socket.create_connection(address) as again:
                    again.sendall(said)
                    assert is_closed(again), said
            assert not why
    assert trainer.watch("g", lambda: False) == "rank 1 is gone"
    trainer.close()


def test_a_trainer_whose_ranks_are_all_connected_listens_no_more_and_closes_strangers() -> None:
    trainer = PeerLiveness.of_trainer("127.0.0.1")
    address = ("127.0.0.1", trainer.port)
    with socket.create_connection(address) as stranger, socket.create_connection(address) as rank:
        rank.sendall(hello(trainer.secret, "g", 1))
        with watching(trainer):
            assert is_closed(stranger)
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(address)
    assert trainer.watch("g", lambda: False) == "rank 1 is gone"
    trainer.close()


def test_a_secret_is_made_for_each_group_and_is_not_shown() -> None:
    one, other = PeerLiveness.of_trainer("127.0.0.1"), PeerLiveness.of_trainer("127.0.0.1")
    assert one.secret != other.secret
    assert one.secret not in repr(replace(PLACE, secret=one.secret))
    one.close()
    other.close()


@pytest.mark.parametrize("ends", ["its trainer", "rank 1"])
def test_a_lifeline_ends_with_its_process_and_not_with_a_child_of_it(ends: str) -> None:
    trainer = PeerLiveness.of_trainer("127.0.0.1")
    rank = PeerLiveness.of_rank(replace(PLACE, lifeline_port=trainer.port, secret=trainer.secret))
    assert rank is not None
    hear(trainer)
    child = forked()
    try:
        ending, staying = (rank, trainer) if ends == "rank 1" else (trainer, rank)
        ending.close()  # as the kernel does, for this process
        until = time.monotonic() + BOUND_S
        assert staying.watch("g", lambda: time.monotonic() > until) == f"{ends} is gone"
        staying.close()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_an_accept_that_fails_is_tried_again_after_a_pause() -> None:
    looked_at: list[float] = []
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    def no_descriptors_at_first() -> bool:
        looked_at.append(time.monotonic())
        resource.setrlimit(resource.RLIMIT_NOFILE, (0 if len(looked_at) == 1 else soft, hard))
        return False

    trainer = PeerLiveness.of_trainer("127.0.0.1")
    with socket.create_connection(("127.0.0.1", trainer.port)) as rank:
        rank.sendall(hello(trainer.secret, "g", 1) + b"I give up")
        try:
            assert trainer.watch("g", no_descriptors_at_first) == "I give up"
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert looked_at[1] - looked_at[0] >= peer_liveness.ACCEPT_AGAIN_S
    trainer.close()


def test_a_lifeline_that_breaks_at_once_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = threading.Event()

    def sendall(data: bytes) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    line = SimpleNamespace(sendall=sendall, close=closed.set)
    monkeypatch.setattr(socket, "create_connection", lambda *args: line)
    with pytest.raises(Unavailable, match="lifeline broke"):
        PeerLiveness.of_rank(replace(PLACE, lifeline_port=1))
    assert closed.is_set()
