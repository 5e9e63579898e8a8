"""Runs an agent: its threads answer calls, in the process of one rank or in the host agent."""

from __future__ import annotations

import logging
import multiprocessing
import os
import select
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

from rl_plane._util.accepting import Acceptor
from rl_plane._util.framing import read_frame, send_frame
from rl_plane._util.peer_credentials import same_user
from rl_plane._util.processes import die_with_parent
from rl_plane._util.tasks import Cancelled
from rl_plane.errors import EngineFailed, InvalidRequest, PlaneError
from worker.receive.rank_agents.agent_messages import WithDescriptor, socket_of

log = logging.getLogger("worker.receive.rank_agents")

FIRST_FRAME_S = 10.0
"""An agent waits this long for a request. A caller sends it as soon as it has connected."""

Method = Callable[[Mapping[str, Any], Cancelled], Any]
"""Takes the call's body, and whether the caller has cancelled. Arguments and answers are plain values."""


def belong_to_worker(parent: int | None = None) -> None:
    """Ties a process that an engine has started to its parent: it ends when the thread that started it ends, or now if
    that has happened. `parent`: the process that has started this one. None: the process that multiprocessing names."""
    die_with_parent()()
    started_by = multiprocessing.parent_process()
    if parent is None and started_by is not None:
        parent = started_by.pid
    if parent is not None and os.getppid() != parent:
        os._exit(1)
    os.setpgid(0, 0)  # Ctrl-C goes to the worker alone, which lets requests end first
    os.dup2(2, 1)  # the worker's standard output belongs to its own caller


def listen_at(path: Path) -> socket.socket:
    """Listens at a Unix socket of this path."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    return listener


class AgentServer:
    """Serves `methods` on a listening socket, to processes of its own user.

    Its threads are daemons, so the process can exit at any time.
    """

    def __init__(self, listener: socket.socket, methods: Mapping[str, Method]) -> None:
        self._acceptor = Acceptor(listener, self._answer, "agent")
        self._methods = methods

    @classmethod
    def of_rank(cls, directory: Path, rank: int, methods: Mapping[str, Method]) -> Self:
        return cls(listen_at(socket_of(directory, rank)), methods)

    def start(self) -> None:
        self._acceptor.start()

    def close(self) -> None:
        self._acceptor.close()

    def _answer(self, connection: socket.socket) -> None:
        with connection:
            if not same_user(connection):
                log.warning("a process of another user called the agent")
                return
            try:
                request = read_frame(connection, within_s=FIRST_FRAME_S)
                self._acceptor.take(connection)
                connection.settimeout(None)
                outcome = self._outcome(request, connection)
                passed = outcome.get("value")
                if isinstance(passed, WithDescriptor):
                    _send_with(connection, passed)
                else:
                    send_frame(connection, outcome)
            except (OSError, EOFError, ValueError) as error:
                log.info("a call ended early: %s", error)

    def _outcome(self, request: Mapping[str, Any], connection: socket.socket) -> dict[str, Any]:
        def cancelled() -> bool:
            poll = select.poll()  # of its own: several threads may ask. select would fail beyond 1024 descriptors
            poll.register(connection, select.POLLIN)
            return bool(poll.poll(0))  # the frame was read, so more input is the end

        try:
            method = self._methods.get(str(request.get("op")))
            if method is None:
                raise InvalidRequest(f"an agent has no {request.get('op')!r}", field="op", fix="update both sides")
            return {"value": method(request.get("body") or {}, cancelled)}
        except PlaneError as error:
            return {"error": error.to_wire()}
        except Exception as error:
            log.exception("%s", request.get("op"))
            return {"error": EngineFailed(f"{type(error).__name__}: {error}").to_wire()}


def _send_with(connection: socket.socket, passed: WithDescriptor) -> None:
    try:
        send_frame(connection, {"value": {**passed.value, "descriptor": True}})
        socket.send_fds(connection, [b"d"], [passed.descriptor])
    finally:
        os.close(passed.descriptor)
