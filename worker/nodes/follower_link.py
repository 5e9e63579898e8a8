"""The link of a node that is not the head: it joins the head, and asks this host's agents on the head's behalf."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from rl_plane.bus.connection import SERVICE_CONNECT_S
from rl_plane.errors import (
    BusUnreachable,
    DeadlineExceeded,
    EngineFailed,
    PlaneError,
    Unavailable,
    WorkerLost,
    error_from_wire,
)
from worker.nodes.node_link import (
    JOIN_S,
    NODE_TIMINGS,
    Handler,
    NodeEntry,
    NodeLink,
    NodePlace,
    NodeTimings,
)
from worker.nodes.node_part import NodePart, digest_of
from worker.nodes.node_settings import NodeSettings

LOOK_S = 2.0
"""Seconds between two looks at the agents of this node. An agent that does not answer in this time is silent."""

KEPT_CANCELS = 256
"""Cancelled calls whose cancellation came before the call, or long after it."""


class FollowerLink(NodeLink):
    """The link of a node rank above 0. Call `start`, `join`, and `serve` when this node's part of the engine runs."""

    def __init__(
        self,
        place: NodePlace,
        settings: NodeSettings,
        hang_s: float,
        facts: Mapping[str, Any],
        digest: Callable[[Mapping[str, str]], str],
        timings: NodeTimings = NODE_TIMINGS,
    ) -> None:
        """`digest(tied)`: hashes the weights that this node has loaded. It blocks."""
        super().__init__(place, settings, hang_s, timings)
        self._facts = facts
        self._digest = digest
        self._head: NodeEntry | None = None
        self._part: NodePart | None = None
        self._silent: list[str] = []
        self.exit_code: int | None = None
        """The exit code of the head, if it has told its end."""
        self._cancelled: dict[str, threading.Event] = {}

    @property
    def head(self) -> NodeEntry:
        assert self._head is not None, "joined"
        return self._head

    # ---- the start; these block ----

    def join(self) -> None:
        """Waits until the head has all nodes. Raises Conflict if it refuses this one, Unavailable if it does not
        come."""
        self.run(self._join())

    async def _join(self) -> None:
        give_up = time.monotonic() + self.settings.wait_s
        taken_until: float | None = None
        there = False
        while True:
            try:
                # The head may send its first message right after its answer.
                answer = await self.ask_node(
                    0, "join", self.timings.ping_timeout_s, node=self.me.to_wire(), facts=self._facts
                )
                if "taken" in answer:
                    taken_until = taken_until or time.monotonic() + self.timings.taken_s
                    if time.monotonic() > taken_until:
                        raise error_from_wire(answer["taken"])
                    await asyncio.sleep(JOIN_S)
                    continue
                self._head = NodeEntry.from_wire(answer["head"])
                taken_until = None
                if not there:
                    there = True
                    await self._listen()
                if answer["go"]:
                    break
            except (WorkerLost, DeadlineExceeded, BusUnreachable) as error:
                if time.monotonic() > give_up:
                    raise Unavailable(
                        f"the head (node rank 0) did not come within {self.settings.wait_s:g} s: nothing was started",
                        fix="start it with the same dist_init_addr, instance id and NATS server",
                    ) from error
            await asyncio.sleep(JOIN_S)
        self._spawn(self._watch(self.head, lambda answer, silent_s: None))

    async def _tell_refusal(self, refusal: PlaneError) -> None:
        told = False
        while not told:
            # The head may come yet, or find out that another process with this node rank is dead.
            with contextlib.suppress(WorkerLost, DeadlineExceeded, BusUnreachable):
                answer = await self.ask_node(
                    0, "refuse", self.timings.ping_timeout_s, node=self.me.to_wire(), why=refusal.to_wire()
                )
                told = answer["told"]
            await asyncio.sleep(JOIN_S)

    def serve(self, part: NodePart) -> None:
        """Reports that this node's part of the engine runs, and answers for its agents from now on."""
        self._part = part
        self.run(self.ask_surely(0, "built", SERVICE_CONNECT_S, self.head.incarnation, ranks=list(part.numbers)))
        self._loop.call_soon_threadsafe(lambda: self._spawn(self._look()))

    def tell_end(self, why: str) -> None:
        """Tells the head that this node's part of the engine has ended."""
        if self._head is not None:
            with contextlib.suppress(Exception):
                told = self.ask_node(0, "ended", self.timings.ping_timeout_s, self.head.incarnation, why=why)
                self.run(told, self.timings.farewell_s)

    async def _look(self) -> None:
        """Notes which agents don't answer, for the head's pings."""
        assert self._part is not None, "serve sets it"
        while self._lost is None:
            self._silent = await asyncio.to_thread(self._part.silent, LOOK_S)
            await asyncio.sleep(LOOK_S)

    def _peers(self) -> list[NodeEntry]:
        return [] if self._head is None else [self._head]

    # ---- the messages of the head ----

    def _handlers(self) -> Mapping[str, Handler]:
        return {
            "ping": self._ping,
            "begin": self._begin,
            "ask": self._ask,
            "cancel": self._cancel,
            "digest": self._hash,
            "end": self._end,
        }

    async def _ping(self, body: Mapping[str, Any]) -> dict[str, Any]:
        return {"silent": self._silent}

    def _running(self) -> NodePart:
        if self._part is None:
            raise EngineFailed("this node's part of the engine is not there yet")
        return self._part

    async def _begin(self, body: Mapping[str, Any]) -> dict[str, Any]:
        part = self._running()
        model = await asyncio.to_thread(part.begin)
        return {"model": digest_of(model), "transports": list(part.host.transports)}

    async def _ask(self, body: Mapping[str, Any]) -> dict[str, Any]:
        part, cancelled = self._running(), self._event(str(body["call"]))
        try:
            values = await asyncio.to_thread(
                part.ask,
                str(body["group"]),
                str(body["what"]),
                body["body"],
                cancelled.is_set,
                float(body["within_s"]),
            )
        finally:
            self._cancelled.pop(str(body["call"]), None)
        return {"values": values}

    async def _cancel(self, body: Mapping[str, Any]) -> dict[str, Any]:
        self._event(str(body["call"])).set()
        return {}

    def _event(self, call: str) -> threading.Event:
        """The event that cancels a call. Either message may come first."""
        while len(self._cancelled) >= KEPT_CANCELS:
            del self._cancelled[next(iter(self._cancelled))]
        return self._cancelled.setdefault(call, threading.Event())

    async def _hash(self, body: Mapping[str, Any]) -> dict[str, Any]:
        return {"digest": await asyncio.to_thread(self._digest, body["tied"])}

    async def _end(self, body: Mapping[str, Any]) -> dict[str, Any]:
        self.exit_code = int(body["exit_code"])
        self.lose(f"{self.head.name} has ended: {body['why']}")
        return {}
