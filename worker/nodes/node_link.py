"""Connects the nodes of one engine over NATS: what the head and the other nodes have in common.

A link has a thread with a loop of its own: the building of an engine blocks the engine's loop for minutes, and the
nodes must notice each other's death meanwhile. Every message is a msgpack map with an `op`. Each node has one subject.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import platform
import secrets
import threading
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import msgpack
import nats.errors
from nats.aio.msg import Msg

from rl_plane._util.tasks import end_tasks
from rl_plane.bus.answers import answer_subject
from rl_plane.bus.connection import SERVICE_CONNECT_S, Bus
from rl_plane.bus.credentials import NO_CREDENTIALS, NatsCredentials
from rl_plane.bus.scatter import Gather, Missing
from rl_plane.errors import (
    BusUnreachable,
    Conflict,
    DeadlineExceeded,
    EngineFailed,
    InvalidRequest,
    PayloadTooLarge,
    PlaneError,
    WorkerLost,
    error_from_wire,
)
from rl_plane.protocol.envelope import MAX_MESSAGE_BYTES
from rl_plane.protocol.subjects import Subjects
from worker.nodes.node_settings import NodeSettings
from worker.nodes.peer_watch import PeerWatch

log = logging.getLogger("worker.nodes")

T = TypeVar("T")

BEAT_S = 1.0
"""Seconds between two pings of another node."""

JOIN_S = 0.5
"""Seconds between two tries to join the head."""

LOOK_AGAIN_S = 0.5
"""Seconds that a look waits for an answer before it asks again. A node that is just ending may take a question and
never answer it. To the next question NATS itself replies that no process listens. After three such replies, 0.1 s
apart, the node counts as gone."""

ASK_AGAIN_S = 5.0
"""A node that has not answered is asked again after this time: the message, or its answer, may be lost."""

KEPT_ANSWERS = 64
"""The last answers that a node keeps, for messages that come again."""

UNPACKED_BYTES = 1 << 26
"""An answer may have so many bytes when it is unpacked: the tensor names of the largest models take less than half."""

PACK_FROM_BYTES = 1 << 16
"""Larger messages are compressed. The names of a model's tensors shrink to a tenth."""

Handler = Callable[[Mapping[str, Any]], Awaitable[Mapping[str, Any]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTimings:
    """The bounds of the waits of one link, in seconds. The defaults are right for every engine."""

    ping_timeout_s: float = 3.0
    """A node answers a ping at once, on a thread of its own. Only an import holds the interpreter for a second or
    two."""
    taken_s: float = 15.0
    """A node waits so long for the end of another process with its node rank, which may be dead and not noticed yet."""
    look_s: float = 1.0
    """A node has so long for an answer when ranks have ended, perhaps because it has."""
    refusal_s: float = 3.0
    """A node that refuses its settings tells this to the nodes that wait. Each of them asks every JOIN_S. The node ends
    afterwards, so its own user sees the error so much later."""
    farewell_s: float = 2.0
    """The news of this node's end may take so long."""
    gone_s: float = 3.0
    """A node is gone when no process has listened to its subject for so long. After a restart of nats-server a node
    listens again within a second."""


NODE_TIMINGS = NodeTimings()


@dataclass(frozen=True, slots=True)
class NodePlace:
    """The address of this node in NATS."""

    url: str
    subjects: Subjects
    instance_id: str
    """The worker's instance id, which all nodes share."""
    credentials: NatsCredentials = NO_CREDENTIALS


@dataclass(slots=True)
class NodeEntry:
    """A node as the other nodes know it."""

    rank: int
    incarnation: str
    host: str
    pid: int
    ranks: tuple[int, ...] = ()
    """The ranks of the model on this node. Empty until its part of the engine runs."""

    @property
    def name(self) -> str:
        return f"node rank {self.rank} ({self.host}, pid {self.pid})"

    def to_wire(self) -> dict[str, Any]:
        return {"rank": self.rank, "incarnation": self.incarnation, "host": self.host, "pid": self.pid}

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> NodeEntry:
        return cls(int(wire["rank"]), str(wire["incarnation"]), str(wire["host"]), int(wire["pid"]))


class NodeLink(ABC):
    """One node's link to the others. Call `start` first, from any thread; `close` at last."""

    def __init__(
        self, place: NodePlace, settings: NodeSettings, hang_s: float, timings: NodeTimings = NODE_TIMINGS
    ) -> None:
        """`hang_s`: the seconds of silence after which another node counts as lost."""
        self.settings = settings
        self.timings = timings
        self.me = NodeEntry(settings.rank, secrets.token_hex(8), platform.node(), os.getpid())
        self._place = place
        self._hang_s = hang_s
        self._thread = threading.Thread(target=self._run, name="nodes", daemon=True)
        self._loop: asyncio.AbstractEventLoop
        """The loop of the link's thread, from `start` on."""
        self._bus: Bus | None = None
        self._gather: Gather | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._inboxes: dict[tuple[str, str], str] = {}
        """The op and the call of each message that is carried out → the inbox in which the caller waits now."""
        self._kept: dict[tuple[str, str], bytes] = {}
        """The op and the call of each message that was carried out → its answer. The oldest comes first."""
        self._waited_for: set[Future[Any]] = set()
        """The work for which threads wait in `run`."""
        self._is_closed = False
        self._lost: str | None = None
        self._on_lost: list[Callable[[str], None]] = []
        self._losing = threading.Lock()

    @property
    def instance_id(self) -> str:
        return self._place.instance_id

    # ---- its life; any thread may call these, and they block ----

    def start(self, within_s: float = SERVICE_CONNECT_S) -> None:
        """Connects to NATS, within `within_s` seconds. Raises BusUnreachable or Unauthorized."""
        self._loop = asyncio.new_event_loop()
        self._thread.start()
        self.run(self._connect(within_s), within_s + self.timings.ping_timeout_s)

    def tell_refusal(self, error: PlaneError) -> None:
        """Tells the other nodes that wait that this one refuses its settings. Use it in place of `start`; the link is
        closed afterwards. It raises nothing, and takes at most `refusal_s` after NATS has answered."""
        facts = {name: str(error.facts[name]) for name in ("field", "fix") if name in error.facts}
        refusal = Conflict(f"{self.me.name} refuses its settings: {error.message}", **facts)
        try:
            self.start(self.timings.ping_timeout_s)
            self.run(self._tell_refusal(refusal), self.timings.refusal_s)
        except Exception as cause:  # the node's own error is the one to report
            log.debug("the other nodes may not know of the refusal: %r", cause)
        finally:
            self.close()

    def close(self) -> None:
        """Ends the link, and the waits of other threads in `run`. Tells nothing to the other nodes."""
        if self._thread.is_alive():
            self._is_closed = True
            for future in list(self._waited_for):
                future.cancel()
            with contextlib.suppress(Exception):
                left = asyncio.run_coroutine_threadsafe(self._disconnect(), self._loop)
                left.result(self.timings.farewell_s)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(self.timings.farewell_s)
            if not self._thread.is_alive():
                self._loop.close()

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Runs `work` on the link's loop, and returns its result. CancelledError: `close` has ended the link."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        self._waited_for.add(future)
        future.add_done_callback(self._waited_for.discard)
        if self._is_closed:  # `close` may have looked before
            future.cancel()
        try:
            return future.result(timeout_s)
        except BaseException:
            future.cancel()
            raise

    def submit(self, work: Coroutine[Any, Any, None]) -> None:
        """Starts `work` on the link's loop. Any thread may call it."""
        self._loop.call_soon_threadsafe(lambda: self._spawn(work))

    @property
    def lost(self) -> str | None:
        """Why the engine can't run any more: another node has ended, or hangs."""
        return self._lost

    def on_lost(self, tell: Callable[[str], None]) -> None:
        """Calls `tell(why)` on the link's thread when another node is lost, or at once if that has happened."""
        with self._losing:
            self._on_lost.append(tell)
            why = self._lost
        if why is not None:
            tell(why)

    # ---- on the link's loop ----

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    async def _connect(self, within_s: float) -> None:
        place, name = self._place, f"{self._place.instance_id} node {self.me.rank}"
        self._bus = await Bus.connect(place.url, name, within_s, place.credentials)
        self._gather = Gather(self._bus)
        await self._gather.start_listening()

    async def _disconnect(self) -> None:
        await end_tasks(self._tasks)
        if self._bus is not None:
            await self._bus.close()

    async def _listen(self) -> None:
        assert self._bus is not None, "connected"
        await self._bus.subscribe(self._place.subjects.node(self._place.instance_id, self.me.rank), self._heard)
        await self._bus.flush()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("the link to the other nodes has failed", exc_info=error)

    async def _heard(self, message: Msg) -> None:
        self._spawn(self._answer(message))

    async def _answer(self, message: Msg) -> None:
        """Carries a message out, and answers it. A message with a `call` may come again, and is carried out once."""
        inbox = answer_subject(message)
        try:
            body = unpack(message.data)
        except InvalidRequest as error:
            await self._publish(inbox, pack({"error": error.to_wire()}))
            return
        if "call" not in body:
            await self._publish(inbox, await self._handled(body))
            return
        call = str(body.get("op")), str(body["call"])
        if (answer := self._kept.get(call)) is None:
            is_first = call not in self._inboxes
            self._inboxes[call] = inbox
            if not is_first:
                return
            answer = await self._handled(body)
            inbox = self._inboxes.pop(call)
            self._kept[call] = answer
            while len(self._kept) > KEPT_ANSWERS:
                del self._kept[next(iter(self._kept))]
        await self._publish(inbox, answer)

    async def _handled(self, body: Mapping[str, Any]) -> bytes:
        """Carries a message out, and returns the answer."""
        try:
            if body.get("to") not in (None, self.me.incarnation):
                raise Conflict(f"node rank {self.me.rank} is another process now: {self.me.name}")
            handler = self._handlers().get(str(body.get("op")))
            if handler is None:
                raise InvalidRequest(f"a node has no {body.get('op')!r}", field="op", fix="update all nodes")
            return pack(await handler(body))
        except PlaneError as error:
            return pack({"error": error.to_wire()})
        except Exception as error:
            log.exception("a message of another node")
            return pack({"error": EngineFailed(f"{type(error).__name__}: {error}").to_wire()})

    async def _publish(self, inbox: str, answer: bytes) -> None:
        if inbox and self._bus is not None:
            with contextlib.suppress(nats.errors.Error):
                await self._bus.nc.publish(inbox, answer)

    @abstractmethod
    def _handlers(self) -> Mapping[str, Handler]:
        """Op → its handler."""

    async def ask_node(
        self, rank: int, op: str, timeout_s: float, to: str | None = None, **body: Any
    ) -> dict[str, Any]:
        """Sends a message to a node, and returns its answer.

        WorkerLost: no process listens there. DeadlineExceeded: no answer came. Conflict: another process has the node
        rank. `to`: the process that is meant."""
        return _checked(await self._reply(rank, op, timeout_s, to, body))

    async def ask_surely(
        self, rank: int, op: str, timeout_s: float, to: str, call: str = "", **body: Any
    ) -> dict[str, Any]:
        """Like `ask_node`, but asks again while NATS is away or the answer may be lost, until this link or the time is
        lost. The node carries the message out once. `call`: its id. Empty: a new one."""
        give_up = time.monotonic() + timeout_s
        body["call"] = call or secrets.token_hex(8)
        while True:
            within_s = min(ASK_AGAIN_S, max(0.0, give_up - time.monotonic()))
            try:
                reply = await self._reply(rank, op, within_s, to, body)
                break
            except DeadlineExceeded:
                if self._lost is not None or time.monotonic() >= give_up:
                    raise _silent(rank, op, timeout_s) from None
            except (BusUnreachable, WorkerLost):
                if self._lost is not None or time.monotonic() >= give_up:
                    raise
                await asyncio.sleep(JOIN_S)
        return _checked(reply)

    async def _reply(
        self, rank: int, op: str, timeout_s: float, to: str | None, body: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Sends a message to a node, and returns its answer, which may be an error."""
        assert self._gather is not None, "connected"
        subject = self._place.subjects.node(self._place.instance_id, rank)
        sent = pack({"op": op, "to": to, "rank": self.me.rank, "from": self.me.incarnation, **body})
        (answer,) = await self._gather.run([(subject, sent)], timeout_s)
        if answer is Missing.LOST:
            raise WorkerLost(f"node rank {rank} does not listen")
        if isinstance(answer, Missing):
            raise _silent(rank, op, timeout_s)
        return unpack(answer)

    @abstractmethod
    async def _tell_refusal(self, refusal: PlaneError) -> None:
        """Tells the other nodes of this one's refusal. The caller bounds it."""

    # ---- watching ----

    @abstractmethod
    def _peers(self) -> list[NodeEntry]:
        """The nodes without which this one can't run."""

    def look_for_lost(self) -> None:
        """Looks at once whether another node has ended. It blocks, for a moment."""
        with contextlib.suppress(Exception):
            self.run(self._look_for_lost(), self.timings.look_s)

    async def _look_for_lost(self) -> None:
        async def look(peer: NodeEntry) -> None:
            while True:
                try:
                    await self.ask_node(peer.rank, "ping", LOOK_AGAIN_S, peer.incarnation)
                except DeadlineExceeded:
                    continue  # the caller bounds the look
                except (WorkerLost, Conflict):
                    self.lose(f"{peer.name} has ended")
                except PlaneError as error:
                    log.debug("%s: %s", peer.name, error)
                return

        await asyncio.gather(*(look(peer) for peer in self._peers()))

    async def _watch(self, peer: NodeEntry, told: Callable[[Mapping[str, Any], float], None]) -> None:
        """Pings a node until it is lost. `told(answer, seconds of silence)` is called after each ping."""
        watch = PeerWatch(self._hang_s, self.timings.gone_s, time.monotonic())
        while self._lost is None:
            answer: Mapping[str, Any] = {}
            try:
                answer = await self.ask_node(peer.rank, "ping", self.timings.ping_timeout_s, peer.incarnation)
                watch.heard(time.monotonic())
            except WorkerLost:
                watch.missing(time.monotonic())
            except BusUnreachable:
                watch.cut_off(time.monotonic())
            except Conflict:
                self.lose(f"{peer.name} has ended: another process has its node rank")
                return
            except PlaneError:
                watch.silent(time.monotonic())
            told(answer, watch.silent_s)
            if watch.gone:
                self.lose(f"{peer.name} is gone: it has ended, or lost NATS")
            elif watch.hangs:
                self.lose(f"{peer.name} hangs: no answer for {watch.silent_s:.0f} s")
            else:
                await asyncio.sleep(BEAT_S)

    def lose(self, why: str) -> None:
        """Notes that the engine can't run any more. Only the first reason counts. Any thread may call it."""
        with self._losing:
            if self._lost is not None:
                return
            self._lost, listeners = why, list(self._on_lost)
        log.error("%s", why)
        for tell in listeners:
            tell(why)


def _silent(rank: int, op: str, timeout_s: float) -> DeadlineExceeded:
    return DeadlineExceeded(f"node rank {rank} did not answer {op} within {timeout_s:g} s")


def _checked(reply: dict[str, Any]) -> dict[str, Any]:
    """Returns a node's answer, or raises the error that it is."""
    if "error" in reply:
        raise error_from_wire(reply["error"])
    return reply


def pack(body: Mapping[str, Any]) -> bytes:
    data: bytes = msgpack.packb(dict(body))
    if len(data) > PACK_FROM_BYTES:
        data = b"z" + zlib.compress(data)
    if len(data) > MAX_MESSAGE_BYTES:
        raise PayloadTooLarge(
            f"a message between two nodes has {len(data)} bytes; a NATS message carries {MAX_MESSAGE_BYTES}"
        )
    return data


def unpack(data: bytes) -> dict[str, Any]:
    try:
        if data[:1] == b"z":
            inflating = zlib.decompressobj()
            data = inflating.decompress(data[1:], UNPACKED_BYTES)
            if inflating.unconsumed_tail:
                raise ValueError("too large")
        body = msgpack.unpackb(data)
        if not isinstance(body, dict):
            raise ValueError("not a map")
    except (ValueError, zlib.error, msgpack.UnpackException) as error:
        raise InvalidRequest(f"a message between nodes is unreadable: {error}", field="op") from error
    return body
