"""Runs an agent in the process of one rank: its threads receive weights while the engine generates."""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import select
import signal
import socket
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rl_plane._util.framing import read_frame, send_frame
from rl_plane._util.peer_credentials import same_user
from rl_plane._util.tasks import Cancelled
from rl_plane.errors import EngineFailed, InvalidRequest, PlaneError
from rl_plane.protocol.update_requests import ReceiveRequest
from worker.receive.rank_agents.agent_messages import socket_of
from worker.receive.weight_receiver import Receiver

log = logging.getLogger("worker.receive.rank_agents")

PR_SET_PDEATHSIG = 1
FIRST_FRAME_S = 10.0
"""An agent waits this long for a request. A caller sends it as soon as it has connected."""

Method = Callable[[Mapping[str, Any], Cancelled], Any]
"""Takes the call's body, and whether the caller has cancelled. Arguments and answers are plain values."""


def belong_to_worker() -> None:
    """Ties a process that an engine has started to its parent: it ends with the parent."""
    die_with_parent()
    os.setpgid(0, 0)  # Ctrl-C goes to the worker alone, which lets requests end first
    os.dup2(2, 1)  # the worker's standard output belongs to its own caller


def die_with_parent() -> None:
    """Makes the kernel end this process when the thread that started it ends. Ends it now if that has happened.

    Works on Linux only; elsewhere nothing happens."""
    try:
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    except (OSError, AttributeError):
        log.warning("this process will outlive a worker that is killed: this system has no prctl")
    parent = multiprocessing.parent_process()
    if parent is not None and os.getppid() != parent.pid:
        os._exit(1)


def receiver_methods(receiver: Receiver, rank: int) -> dict[str, Method]:
    """Returns the methods that every agent has."""

    def describe(_: Mapping[str, Any], __: Cancelled) -> dict[str, Any]:
        spec = receiver.holder.weight_spec()
        return {
            "transports": list(receiver.backends),
            "tensors": {name: [tensor.dtype, list(tensor.shape)] for name, tensor in spec.items()},
            "tied": dict(receiver.holder.tied_tensors()),
        }

    def init_transport(body: Mapping[str, Any], _: Cancelled) -> None:
        offset = body.get("rank_offset")  # for a group: the offset of this worker's first rank
        receiver.init_transport({**body, "rank_offset": offset + rank} if isinstance(offset, int) else body)

    return {
        "describe": describe,
        # Each rank has the whole version.
        "offer": lambda body, cancelled: receiver.offer() if rank == 0 else None,
        "relay_address": lambda body, cancelled: receiver.relay_address(),
        "open": lambda body, cancelled: receiver.open(
            body["staging"], ReceiveRequest.model_validate(body["request"]), body["limits"]
        ),
        "receive": lambda body, cancelled: receiver.receive(body["staging"], cancelled),
        "receive_part": lambda body, cancelled: receiver.receive_part(body["staging"], body["part"], cancelled),
        "discard": lambda body, cancelled: receiver.discard(body["staging"]),
        "cached_digest": lambda body, cancelled: receiver.cached_digest,
        "init_transport": init_transport,
        "destroy_transport": lambda body, cancelled: receiver.destroy_transport(body["backend"], body["group"]),
    }


class AgentServer:
    """Serves `methods` on a socket in `directory`, to processes of its own user.

    Its threads are daemons, so the process can exit at any time.
    """

    def __init__(self, directory: Path, rank: int, methods: Mapping[str, Method]) -> None:
        self._path = socket_of(directory, rank)
        self._methods = methods
        self._listener = socket.socket(socket.AF_UNIX)

    def start(self) -> None:
        self._listener.bind(str(self._path))
        self._listener.listen()
        threading.Thread(target=self._serve, name="agent", daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # closing alone does not wake the thread
        self._listener.close()
        self._path.unlink(missing_ok=True)

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed
            if not same_user(connection):
                log.warning("a process of another user called the agent")
                connection.close()
                continue
            threading.Thread(target=self._answer, args=(connection,), name="agent call", daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection:
            try:
                request = read_frame(connection, within_s=FIRST_FRAME_S)
                connection.settimeout(None)
                send_frame(connection, self._outcome(request, connection))
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
