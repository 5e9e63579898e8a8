"""Asks the host agent, from the worker."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from rl_plane._util.framing import frame_of
from rl_plane._util.tasks import Cancelled
from rl_plane.errors import EngineFailed, PlaneError
from rl_plane.protocol.relay import summed
from rl_plane.protocol.update_requests import CanaryLimits, PreparedReply, ReceiveRequest
from rl_plane.transports.base import TransportContext
from worker.receive.lacking_transports import LACKING
from worker.receive.rank_agents.agent_client import AgentClient
from worker.receive.rank_agents.agent_messages import host_socket
from worker.receive.rank_agents.model_description import ModelDescription
from worker.receive.rank_agents.ranks import Agents
from worker.receive.received_bytes import ByteCount, ReceivedBytes

RECEIVE_TIMEOUT_S = 86_400.0
"""A day. The caller of a receive cancels it much earlier. This bound only ensures that the wait of a thread ends."""

PART_MARGIN_S = 15.0
"""The time that the host agent may take to report that a part's own time is over."""

INIT_TIMEOUT_S = 300.0
"""The op's own bound: a group of many ranks takes long to form."""

PING_S = 4.0
"""The host agent answers at once. This is less than a worker's bound of a round trip, so that the error names it."""


class HostAgentClient:
    """Calls the host agent of one engine. Call `begin` first. The methods block, so they run on a thread."""

    def __init__(self, directory: Path, pid: int) -> None:
        self._directory = directory
        self._path = host_socket(directory)
        self._name = f"the host agent (pid {pid})"
        self.agent = AgentClient({self._name: self._path})
        """The agent of this host."""
        self._agents: Agents = self.agent
        self.transports: tuple[str, ...] = ()
        self._received: ReceivedBytes | None = None

    def received(self) -> ByteCount | None:
        """The bytes that this host's agent has received of an update. Never blocks. None: it has not begun yet."""
        self._received = self._received or ReceivedBytes.watched(self._directory)
        return None if self._received is None else self._received.now()

    def span(self, agents: Agents, transports: tuple[str, ...]) -> None:
        """Asks the agents of several hosts from now on. Weights are prepared on all of them, or on none.
        `transports`: those of all hosts."""
        self._agents, self.transports = agents, transports

    def _ask_all(self, op: str, body: Mapping[str, Any] | None = None, **how: Any) -> list[Any]:
        return self._agents.ask(op, body, **how)

    def _ask(self, op: str, body: Mapping[str, Any] | None = None, **how: Any) -> Any:
        """Returns the answer of this host's agent."""
        return self._ask_all(op, body, **how)[0]

    def begin(self, model: ModelDescription, places: TransportContext) -> None:
        """Tells the agent for which model it receives. `places`: what its transports may use."""
        begun = self._ask("begin", {"model": model.to_wire(), "places": places.to_wire()})
        self.transports = tuple(begun["transports"])
        LACKING.update(begun.get("lacking") or {})

    async def ping(self) -> None:
        """TimeoutError: the agent hangs. EngineFailed: it is gone."""
        try:
            async with asyncio.timeout(PING_S):
                reader, writer = await asyncio.open_unix_connection(self._path)
                try:
                    writer.write(frame_of({"op": "ping"}))
                    await reader.readexactly(1)
                finally:
                    writer.close()
                    with contextlib.suppress(OSError):
                        await writer.wait_closed()
        except TimeoutError as error:
            raise TimeoutError(f"{self._name} does not answer") from error
        except (OSError, EOFError) as error:
            raise EngineFailed(f"{self._name} can't be reached: {error}") from error

    def open(self, staging: str, request: ReceiveRequest, limits: CanaryLimits | None = None) -> None:
        try:
            self._ask("open", {"staging": staging, "request": request.model_dump(), "limits": limits})
        except PlaneError:
            self.forget(staging)
            raise

    def receive(self, staging: str, cancelled: Cancelled) -> PreparedReply:
        try:
            replies: list[PreparedReply] = self._ask_all(
                "receive", {"staging": staging}, cancelled=cancelled, timeout_s=RECEIVE_TIMEOUT_S
            )
            if any(reply["digest"] != replies[0]["digest"] for reply in replies):
                raise EngineFailed("the hosts received different weights")
        except PlaneError:
            self.forget(staging)
            raise
        sources = summed(one for reply in replies for one in reply.get("sources", ()))
        return replies[0] if not sources else {**replies[0], "sources": sources}

    def receive_part(self, staging: str, part: Mapping[str, Any], cancelled: Cancelled) -> int:
        bound_s = part["timeout_s"] + PART_MARGIN_S
        body = {"staging": staging, "part": dict(part)}
        missing: list[int] = self._ask_all("receive_part", body, cancelled=cancelled, timeout_s=bound_s)
        return max(missing)

    def take(self, staging: str) -> None:
        """Gives what is staged to the ranks, which have mapped it. The agent keeps it only as the version's copy."""
        self._ask("take", {"staging": staging})

    def loaded(self, staging: str) -> None:
        """Tells the agent that every rank has loaded the taken weights. Without this call the agent never uses their
        memory again."""
        with contextlib.suppress(PlaneError):  # the swap is done
            self._ask("loaded", {"staging": staging})

    def discard(self, staging: str) -> None:
        self._ask("discard", {"staging": staging})

    def forget(self, staging: str) -> None:
        """Discards after an error, which explains the failure."""
        with contextlib.suppress(PlaneError):
            self.discard(staging)

    def cached_digest(self) -> str | None:
        digests: set[str | None] = set(self._ask_all("cached_digest"))
        return digests.pop() if len(digests) == 1 else None

    def relay_addresses(self) -> list[tuple[str, int]]:
        """The address and port at which each host serves its peers. Empty: one of them can't."""
        found = self._ask_all("relay_addresses")
        return [] if [] in found else [(address, port) for ((address, port),) in found]

    def offer(self, adapters: Collection[str] = ()) -> list[dict[str, Any]]:
        places: list[dict[str, Any]] = self._ask("offer", {"adapters": list(adapters)})
        return places

    def init_transport(self, config: Mapping[str, Any]) -> None:
        self._ask("init_transport", config, timeout_s=INIT_TIMEOUT_S)

    def destroy_transport(self, backend: str, group: str | None = None) -> None:
        self._ask("destroy_transport", {"backend": backend, "group": group})
