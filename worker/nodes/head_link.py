"""The head's link to the other nodes of its engine: it gathers them, and asks their agents."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from rl_plane._util import tracing
from rl_plane._util.tasks import Cancelled
from rl_plane.errors import (
    BusUnreachable,
    Conflict,
    DeadlineExceeded,
    EngineFailed,
    PlaneError,
    Unavailable,
    WorkerLost,
    error_from_wire,
)
from rl_plane.protocol.transport_traits import known_transports
from worker.nodes.facts import check_facts
from worker.nodes.node_link import (
    JOIN_S,
    NODE_TIMINGS,
    Handler,
    NodeEntry,
    NodeLink,
    NodePlace,
    NodeTimings,
)
from worker.nodes.node_part import digest_of
from worker.nodes.node_settings import NodeSettings
from worker.receive.rank_agents.agent_client import CANCEL_WAIT_S, POLL_S
from worker.receive.rank_agents.model_description import ModelDescription

log = logging.getLogger("worker.nodes")

JOINED_S = 5.0
"""Seconds after its last try to join in which a waiting node counts as there."""

REFUSED_S = 10.0
"""Seconds in which the head tells every node why the engine is refused."""

BUILT_WAIT_S = 1800.0
"""The time from the start of the head's part until the other parts are there. They load the model side by side."""

DIGEST_WAIT_S = 1800.0
"""A terabyte at 600 MB/s."""

BEGIN_WAIT_S = 120.0
"""Seconds for the agents of a node to describe the model. They import torch meanwhile."""

NO_MEMORY = "it reads the memory of a trainer on the same host, and the nodes of this engine are on several"

ANSWER_MARGIN_S = 5.0
"""The time that a node's answer may take after the bound of its work."""


OWN_RANKS = "give each node a node rank of its own, and each engine a dist_init_addr of its own"


class HeadLink(NodeLink):
    """The link of node rank 0. After `gather`, the nodes build their parts of the engine."""

    def __init__(
        self,
        place: NodePlace,
        settings: NodeSettings,
        hang_s: float,
        facts: Mapping[str, Any],
        timings: NodeTimings = NODE_TIMINGS,
    ) -> None:
        super().__init__(place, settings, hang_s, timings)
        self._facts = facts
        self._joined: dict[int, tuple[NodeEntry, float]] = {}
        """Node rank → the node, and the time of its last try to join."""
        self._refusal: PlaneError | None = None
        self._refused: set[int] = set()
        self._go = False
        self._changed = asyncio.Event()
        self._silent: dict[int, str] = {}
        """Node rank → why it seems to hang."""
        self._silent_s: dict[int, float] = {}
        """Node rank → the seconds for which agents of it have been silent, as its answers say."""
        self._silent_at: dict[int, float] = {}
        """Node rank → the time of its last answer, if that named silent agents."""
        self._calls: set[NodeCalls] = set()
        self._warned: set[str] = set()
        self._transports: list[frozenset[str]] = []
        """The transports of each other node."""

    @property
    def nodes(self) -> list[NodeEntry]:
        """The other nodes, by node rank."""
        return [self._joined[rank][0] for rank in sorted(self._joined)]

    def rows(self) -> list[dict[str, Any]]:
        """All nodes, for the worker's record."""
        return [
            {"node_rank": node.rank, "host": node.host, "pid": node.pid, "ranks": list(node.ranks)}
            for node in (self.me, *self.nodes)
        ]

    # ---- the start; these block ----

    def gather(self) -> None:
        """Waits for all nodes. Raises Unavailable, which names the missing node ranks, or Conflict if the nodes don't
        fit each other. No node has started anything then."""
        self.run(self._gather_nodes())

    async def _gather_nodes(self) -> None:
        await self._check_only_head()
        await self._listen()
        log.info("waiting for %d nodes, at most %g s", self.settings.count - 1, self.settings.wait_s)
        give_up = time.monotonic() + self.settings.wait_s
        while self._missing() and self._refusal is None and time.monotonic() < give_up:
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(JOIN_S):
                    await self._changed.wait()
        if self._refusal is None and (missing := self._missing()):
            self._refuse(
                Unavailable(
                    f"the node ranks {missing} of {self.settings.count} did not come within "
                    f"{self.settings.wait_s:g} s: nothing was started",
                    fix="start `rl-plane worker` with each of them, with the same instance id and NATS server",
                )
            )
        if self._refusal is not None:
            await self._until(lambda: self._refused >= self._joined.keys(), REFUSED_S)
            raise self._refusal
        self._go = True
        for node in self.nodes:
            self._spawn(self._watch(node, partial(self._pinged, node)))

    async def _tell_refusal(self, refusal: PlaneError) -> None:
        with contextlib.suppress(WorkerLost):  # there is no head
            await self.ask_node(0, "who", self.timings.ping_timeout_s)
            return
        self._refusal = refusal
        await self._listen()
        await self._until(lambda: len(self._refused) >= self.settings.count - 1, self.timings.refusal_s)

    async def _check_only_head(self) -> None:
        """Raises Conflict if another process is the head of this engine. A head that has just died does not count."""
        give_up = time.monotonic() + self.timings.taken_s
        while True:
            try:
                there = await self.ask_node(0, "who", self.timings.ping_timeout_s)
            except (WorkerLost, DeadlineExceeded):
                return
            except BusUnreachable:
                there = {"name": "unknown"}
            if time.monotonic() > give_up:
                raise Conflict(
                    f"node rank 0 runs already: {there['name']}",
                    field="node_rank",
                    fix=OWN_RANKS,
                )
            await asyncio.sleep(JOIN_S)

    def _missing(self) -> list[int]:
        now = time.monotonic()
        for rank, (node, seen) in list(self._joined.items()):
            if now - seen > JOINED_S:
                log.warning("%s has gone again", node.name)
                del self._joined[rank]
        return [rank for rank in range(1, self.settings.count) if rank not in self._joined]

    def _refuse(self, error: PlaneError) -> None:
        self._refusal = self._refusal or error
        self._changed.set()

    async def _until(self, holds: Callable[[], bool], bound_s: float) -> bool:
        """Waits for a state that the messages of nodes change."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(bound_s):
                while not holds() and self._lost is None:
                    self._changed.clear()
                    await self._changed.wait()
        held: bool = holds()
        return held

    def wait_built(self) -> None:
        """Waits until every node has its part of the engine. Raises EngineFailed if one is lost."""
        built = self.run(self._until(lambda: all(node.ranks for node in self.nodes), BUILT_WAIT_S))
        if self._lost is not None:
            raise EngineFailed(self._lost)
        if not built:
            names = ", ".join(node.name for node in self.nodes if not node.ranks)
            raise EngineFailed(f"{names} did not load the model within {BUILT_WAIT_S:g} s")

    def begin(self, model: ModelDescription) -> None:
        """Lets the other nodes describe their part of the model to their host agents. Raises EngineFailed if a node has
        another model than `model`, which this host's ranks have described."""
        self.wait_built()
        own = digest_of(model)
        for node, reply in self._ask_all("begin", BEGIN_WAIT_S):
            if reply["model"] != own:
                raise EngineFailed(f"{node.name} has a model of other tensors")
            self._transports.append(frozenset(reply["transports"]))

    def _ask_all(self, op: str, timeout_s: float, **body: Any) -> list[tuple[NodeEntry, dict[str, Any]]]:
        """Asks all other nodes at the same time. Returns each with its answer."""

        async def gathered() -> list[dict[str, Any]]:
            asked = [self.ask_surely(node.rank, op, timeout_s, node.incarnation, **body) for node in self.nodes]
            return await asyncio.gather(*asked)

        return list(zip(self.nodes, self.run(gathered()), strict=True))

    def common(self, transports: Iterable[str]) -> tuple[str, ...]:
        """Returns the transports of this host that can bring weights to every node."""
        lacking = self.lacking_transports()
        return tuple(
            one for one in transports if one not in lacking and all(one in other for other in self._transports)
        )

    def lacking_transports(self) -> dict[str, str]:
        """Transport → why it can't bring weights to an engine over several hosts."""
        apart = len({node.host for node in (self.me, *self.nodes)}) > 1
        return {name: NO_MEMORY for name, traits in known_transports().items() if apart and traits.one_host}

    def check_digests(self, tied: Mapping[str, str], own: str) -> None:
        """Raises Conflict unless every node has loaded the weights that the head has loaded."""
        for node, reply in self._ask_all("digest", DIGEST_WAIT_S, tied=dict(tied)):
            if reply["digest"] != own:
                raise Conflict(
                    f"{node.name} has loaded {reply['digest']}, and the head {own}",
                    field="model",
                    fix="give every node the same model directory",
                )

    # ---- the messages of nodes ----

    def _handlers(self) -> Mapping[str, Handler]:
        return {
            "who": self._who,
            "join": self._join,
            "refuse": self._refused_there,
            "ping": self._ping,
            "built": self._built,
            "ended": self._ended_there,
        }

    async def _who(self, body: Mapping[str, Any]) -> dict[str, Any]:
        return {"name": self.me.name}

    async def _ping(self, body: Mapping[str, Any]) -> dict[str, Any]:
        return {}

    async def _join(self, body: Mapping[str, Any]) -> dict[str, Any]:
        node = NodeEntry.from_wire(body["node"])
        if self._refusal is not None:
            self._refused.add(node.rank)
            self._changed.set()
            raise self._refusal
        if (taken := self._other_of_rank(node)) is not None:
            return {"taken": taken.to_wire()}
        if not self._go:
            try:
                check_facts(node.name, body["facts"], self._facts)
            except PlaneError as error:
                self._refused.add(node.rank)
                self._refuse(error)
                raise
            self._joined[node.rank] = node, time.monotonic()
            self._changed.set()
        return {"go": self._go, "head": self.me.to_wire()}

    def _other_of_rank(self, node: NodeEntry) -> PlaneError | None:
        """Returns the refusal of a node whose node rank another process has. That process may be dead, and not noticed
        yet."""
        there, seen = self._joined.get(node.rank, (node, 0.0))
        if there.incarnation == node.incarnation or not (self._go or time.monotonic() - seen <= JOINED_S):
            return None
        error = Conflict(f"{node.name} has the node rank of {there.name}", field="node_rank", fix=OWN_RANKS)
        if node.incarnation not in self._warned:
            self._warned.add(node.incarnation)
            log.warning("%s", error.message)
        return error

    async def _refused_there(self, body: Mapping[str, Any]) -> dict[str, Any]:
        node, why = NodeEntry.from_wire(body["node"]), error_from_wire(body["why"])
        counts = not self._go and self._other_of_rank(node) is None
        if counts:
            self._refused.add(node.rank)
            self._refuse(why)
        return {"told": counts}

    async def _built(self, body: Mapping[str, Any]) -> dict[str, Any]:
        node, _ = self._joined[int(body["rank"])]
        if node.incarnation == body["from"]:
            node.ranks = tuple(int(rank) for rank in body["ranks"])
            self._changed.set()
        return {}

    async def _ended_there(self, body: Mapping[str, Any]) -> dict[str, Any]:
        node, _ = self._joined[int(body["rank"])]
        if node.incarnation == body["from"]:
            self.lose(f"{node.name} has ended: {body['why']}")
        return {}

    # ---- watching ----

    def _peers(self) -> list[NodeEntry]:
        return self.nodes

    def _pinged(self, node: NodeEntry, answer: Mapping[str, Any], silent_s: float) -> None:
        if silent_s:
            self._silent_at.pop(node.rank, None)  # without an answer, the state of its agents is not known
            self._silent[node.rank] = f"{node.name} has not answered for {silent_s:.0f} s"
        elif silent := answer.get("silent"):
            why = self._silent[node.rank] = f"{node.name}: {', '.join(silent)} does not answer"
            now = time.monotonic()
            self._silent_s[node.rank] = (
                self._silent_s.get(node.rank, 0.0) + now - self._silent_at.get(node.rank, now)
            )
            self._silent_at[node.rank] = now
            # Agents answer on threads of their own: also while their ranks load weights.
            if self._silent_s[node.rank] >= self._hang_s:
                self.lose(f"{why} for {self._hang_s:g} s")
        else:
            for known in (self._silent, self._silent_s, self._silent_at):
                known.pop(node.rank, None)

    @property
    def hanging(self) -> str | None:
        """Why a node seems to hang. None: all nodes answer."""
        return next(iter(self._silent.values()), None)

    def lose(self, why: str) -> None:
        super().lose(why)
        self._loop.call_soon_threadsafe(self._changed.set)
        for calls in list(self._calls):
            calls.failed(EngineFailed(why))

    # ---- asking agents; these block ----

    def ask(self, group: str, op: str, body: Mapping[str, Any], timeout_s: float) -> NodeCalls:
        """Begins a call of the agents of a group (`ranks` or `host`) on all other nodes."""
        calls = NodeCalls(self, group, op, body, timeout_s)
        self._calls.add(calls)
        if self._lost is not None:
            calls.failed(EngineFailed(self._lost))
        calls.begin()
        return calls

    def forget(self, calls: NodeCalls) -> None:
        self._calls.discard(calls)

    def tell_end(self, why: str, exit_code: int) -> None:
        """Tells the other nodes that the engine ends, so that they end at once, with the head's exit code."""
        if self._go:
            with contextlib.suppress(Exception):
                self.run(self._tell_end(why, exit_code), self.timings.farewell_s)

    async def _tell_end(self, why: str, exit_code: int) -> None:
        asked = [
            self.ask_node(
                node.rank, "end", self.timings.farewell_s, node.incarnation, why=why, exit_code=exit_code
            )
            for node in self.nodes
        ]
        await asyncio.gather(*asked, return_exceptions=True)


class NodeCalls:
    """One call of the agents of all other nodes. If one node fails, the call is cancelled on the others."""

    def __init__(self, link: HeadLink, group: str, op: str, body: Mapping[str, Any], timeout_s: float) -> None:
        self.error: PlaneError | None = None
        """The first error."""
        self._values: dict[int, list[Any]] = {}
        """Node rank → the answers of its agents."""
        self._link = link
        self._group = group
        self._op = op
        self._span = tracing.current()
        self._body = dict(body)
        self._timeout_s = timeout_s
        self._id = secrets.token_hex(8)
        self._waiting = len(link.nodes)
        self._changing = threading.Lock()
        self._done = threading.Event()
        self._cancelled = False

    def begin(self) -> None:
        for node in self._link.nodes:
            self._link.submit(self._ask(node))

    async def _ask(self, node: NodeEntry) -> None:
        span = self._span.child("host", host=node.host, node_rank=node.rank, op=self._op, agents=self._group)
        try:
            reply = await self._link.ask_surely(
                node.rank,
                "ask",
                self._timeout_s + ANSWER_MARGIN_S,
                node.incarnation,
                call=self._id,
                group=self._group,
                what=self._op,
                body=self._body,
                within_s=self._timeout_s,
            )
            with self._changing:
                self._values[node.rank] = reply["values"]
        except PlaneError as error:
            span.end(error)
            self.failed(_of_node(node, error))
        except Exception as error:
            span.end(error)
            self.failed(EngineFailed(f"{node.name}: {type(error).__name__}: {error}"))
        finally:
            span.end()
            with self._changing:
                self._waiting -= 1
                if not self._waiting:
                    self._done.set()

    def failed(self, error: PlaneError) -> None:
        with self._changing:
            self.error = self.error or error
        if self._link.lost is not None:
            self._done.set()  # a lost node does not answer any more
        self.cancel()

    def cancel(self) -> None:
        """Ends the call on the nodes that have not answered."""
        with self._changing:
            if self._cancelled:
                return
            self._cancelled = True
        for node in self._link.nodes:
            self._link.submit(self._cancel(node))

    async def _cancel(self, node: NodeEntry) -> None:
        with contextlib.suppress(PlaneError):
            await self._link.ask_surely(node.rank, "cancel", CANCEL_WAIT_S, node.incarnation, call=self._id)

    def end(self) -> None:
        """Waits until the call has ended on every node, after an error."""
        self._done.wait(CANCEL_WAIT_S)
        self._link.forget(self)

    def wait(self, cancelled: Cancelled) -> list[Any]:
        """Waits until every node has answered. Returns the answers of all agents, or raises the first error."""
        give_up: float | None = None
        try:
            while not self._done.wait(POLL_S):
                if cancelled():
                    self.failed(EngineFailed("staging was cancelled"))
                if self.error is not None:
                    now = time.monotonic()
                    give_up = give_up or now + CANCEL_WAIT_S
                    if now > give_up:
                        break
        finally:
            self._link.forget(self)
        if self.error is not None:
            raise self.error
        return [value for rank in sorted(self._values) for value in self._values[rank]]


def _of_node(node: NodeEntry, error: PlaneError) -> PlaneError:
    """Adds the node's name to an error."""
    wire = error.to_wire()
    return error_from_wire({**wire, "message": f"{node.name}: {wire['message']}"})
