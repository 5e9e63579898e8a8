"""Asks several agents at the same time, those of all ranks or the host agent, and waits for all of them."""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from rl_plane._util.framing import read_frame, send_frame
from rl_plane._util.tasks import Cancelled, never
from rl_plane.errors import DeadlineExceeded, EngineFailed, PlaneError, error_from_wire
from worker.receive.rank_agents.agent_messages import socket_of

ASK_TIMEOUT_S = 60.0
"""Bounds a call that receives nothing. Opening a checkpoint of thousands of files on a slow disk takes seconds."""

CONNECT_TIMEOUT_S = 5.0
"""An agent accepts on a thread of its own, so only a stopped process does not accept in time."""

CANCEL_WAIT_S = 25.0
"""The time that the ranks may take to end a cancelled call: they check between two tensors."""

POLL_S = 0.05
"""The interval at which the client checks whether the caller has cancelled."""


class AgentClient:
    """Calls some agents of one engine. `ask` blocks, so it runs on a thread."""

    def __init__(self, agents: Mapping[str, Path], *, cancel_wait_s: float = CANCEL_WAIT_S) -> None:
        """`agents`: the name of each agent in messages, and its socket. `cancel_wait_s`: the time that they may take to
        end a cancelled call."""
        self._agents = dict(agents)
        self._cancel_wait_s = cancel_wait_s

    @classmethod
    def of_ranks(
        cls, directory: Path, ranks: int, *, first: int = 0, cancel_wait_s: float = CANCEL_WAIT_S
    ) -> Self:
        """The agents of `ranks` ranks, from the rank `first` on."""
        numbers = range(first, first + ranks)
        agents = {f"rank {rank}": socket_of(directory, rank) for rank in numbers}
        return cls(agents, cancel_wait_s=cancel_wait_s)

    @property
    def count(self) -> int:
        """The number of agents."""
        return len(self._agents)

    def ask(
        self,
        op: str,
        body: Mapping[str, Any] | None = None,
        *,
        cancelled: Cancelled = never,
        timeout_s: float = ASK_TIMEOUT_S,
    ) -> list[Any]:
        """Returns the answer of each agent, in order. If one raises, cancels the others, waits until all ended, and
        raises the first error. EngineFailed: an agent can't be reached."""
        call = _Call(op, time.monotonic() + timeout_s, self._cancel_wait_s)
        with contextlib.ExitStack() as stack:
            for name, path in self._agents.items():
                try:
                    connection = stack.enter_context(socket.socket(socket.AF_UNIX))
                    connection.settimeout(CONNECT_TIMEOUT_S)
                    connection.connect(str(path))
                    send_frame(connection, {"op": op, "body": dict(body or {})})
                except OSError as error:
                    call.failed(EngineFailed(f"{name} can't be reached: {error.strerror or error}"))
                    break
                call.waiting[connection] = name
            while call.waiting:
                call.poll(cancelled())
        if call.error is not None:
            raise call.error
        return [call.values[name] for name in self._agents]

    def silent(self, within_s: float) -> list[str]:
        """Returns the agents that don't answer a ping within this time. It leaves out agents to which it can't
        connect."""
        call = _Call("ping", time.monotonic() + within_s, self._cancel_wait_s)
        with contextlib.ExitStack() as stack:
            for name, path in self._agents.items():
                with contextlib.suppress(OSError):
                    connection = stack.enter_context(socket.socket(socket.AF_UNIX))
                    connection.settimeout(within_s)
                    connection.connect(str(path))
                    send_frame(connection, {"op": "ping"})
                    call.waiting[connection] = name
            asked = list(call.waiting.values())
            while call.waiting:
                call.poll(cancelled=False)
        return [name for name in asked if name not in call.values]


class _Call:
    """One call, under way on several agents."""

    def __init__(self, op: str, deadline: float, cancel_wait_s: float) -> None:
        self.waiting: dict[socket.socket, str] = {}
        self.values: dict[str, Any] = {}
        self.error: PlaneError | None = None
        self._op = op
        self._deadline = deadline
        self._cancel_wait_s = cancel_wait_s
        self._ended = False

    def failed(self, error: PlaneError) -> None:
        self.error = self.error or error
        self._end()

    def _end(self) -> None:
        """Cancels the call on the agents that have not answered."""
        if self._ended:
            return
        self._ended = True
        self._deadline = min(self._deadline, time.monotonic() + self._cancel_wait_s)
        for connection in self.waiting:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_WR)

    def _ready(self) -> list[socket.socket]:
        """The connections with an answer, after POLL_S at most."""
        with selectors.DefaultSelector() as selector:
            found = {selector.register(one, selectors.EVENT_READ).fd: one for one in self.waiting}
            return [found[key.fd] for key, _ in selector.select(POLL_S)]

    def poll(self, cancelled: bool) -> None:
        if cancelled:
            self.failed(EngineFailed("staging was cancelled"))
        if time.monotonic() > self._deadline:
            names = ", ".join(self.waiting.values())
            self.failed(DeadlineExceeded(f"{self._op} did not end in time: {names}"))
            self.waiting.clear()
            return
        for connection in self._ready():
            name = self.waiting.pop(connection)
            try:
                answer = read_frame(connection)
            except (OSError, EOFError, ValueError) as error:
                self.failed(EngineFailed(f"{name} broke off {self._op}: {error}"))
                continue
            if "error" in answer:
                self.failed(error_from_wire(answer["error"]))
            else:
                self.values[name] = answer["value"]
