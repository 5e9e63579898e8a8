"""A simulated NATS server with the few JetStream calls that the plane makes, behind the interface of `Bus`.

Like the real one: messages from one connection to another keep their order, others overtake each other; what is in
flight is lost when the server restarts; what a client sends while it is cut off it sends later, its writes included; a
request to a subject without subscribers is answered 503; writes to a bucket are compare-and-set, kept over restarts,
and republished. A write's answer may be lost though it was taken. A restart may lose writes that were acknowledged, or
the whole store.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rl_plane.errors import BusUnreachable
from rl_plane.protocol.subjects import ADVISORY, KeyValueBucket
from tests.sim.holding import Holding
from tests.sim.partition import Partition
from tests.sim.sim_client import RECONNECT_S, SimConn, SimMsg, Subscription
from tests.sim.sim_store import Key, SimStore, Stream
from tests.sim.virtual_loop import VirtualLoop

if TYPE_CHECKING:
    from tests.sim.process import Process

DELAY_S = (0.0001, 0.003)
SLOW_S = (0.05, 0.6)
SLOW_SHARE = 0.01
STALL_S = (0.6, 8.0)
"""The seconds for which a path stands still, with `stalls`."""
LATE_S = (0.0, 6.0)
"""The delay of the second copy of a request."""
PING_S = (4.0, 6.0)
"""The time for which a server and its clients wait for answers to their PINGs."""


def _process(conn: SimConn | None) -> Process | None:
    return conn.process if conn is not None else None


@dataclass(frozen=True, slots=True)
class OldLeader:
    """A node of a cluster that was cut off, and has not noticed yet that it is not the leader any more."""

    conns: Sequence[SimConn]
    """The connections whose reads it answers."""
    since: float


class SimServer(SimStore):
    def __init__(self, loop: VirtualLoop, rng: random.Random) -> None:
        super().__init__(loop, rng)
        self.id = "SIM"
        self.up_since = 0.0
        self.stood_still = False
        """Has it, or its disk, ever?"""
        self.disk_until = 0.0
        """Its disk stands still until then: reads and writes of buckets wait, and are done later."""
        self.restarts = 0
        self.lost_answers = 0.0
        self.stalls = 0.0
        """The share of messages that stop on their way, with all messages behind them on the same path."""
        self.stalled = False
        """Has anything?"""
        self.duplicates = 0.0
        """The share of requests that arrive twice."""
        self.numbers = itertools.count(1)
        self.conns: list[SimConn] = []
        self.on_replaced: Callable[[str, KeyValueBucket, str, Key, bytes | None], None] = lambda *_: None
        """Called with the client that has overwritten the value of a key."""
        self.holding: Holding | None = None
        """Delayed messages to the server."""
        self.old_leader: OldLeader | None = None
        self.partition: Partition | None = None
        self._exact: dict[str, list[Subscription]] = {}
        self._patterns: list[Subscription] = []
        self._free_at: dict[tuple[int, int], float] = {}

    def told(self, conn: SimConn, bucket: KeyValueBucket) -> Stream:
        """The stream that this client reads."""
        stream, old = self.stream(bucket), self.old_leader
        return stream.as_of(old.since) if old is not None and conn in old.conns else stream

    def write_of(self, conn: SimConn, *write: Any) -> int:
        if self.old_leader is not None and conn in self.old_leader.conns:
            raise BusUnreachable("simulated: the leader has no quorum")
        bucket, key, value, *_ = write
        before = self.value(bucket, key)
        sequence = self.write(*write)
        if before is not None and before.value:
            self.on_replaced(conn.name, bucket, key, before, value)
        return sequence

    def delay(self) -> float:
        chance = self.rng.random()
        if chance < SLOW_SHARE:
            return self.rng.uniform(*SLOW_S)
        if chance > 1.0 - self.stalls:
            self.stalled = True
            return self.rng.uniform(*STALL_S)
        return self.rng.uniform(*DELAY_S)

    # ---- core NATS ----

    def remember(self, subscription: Subscription) -> None:
        subscription.conn.subscriptions.append(subscription)
        if "*" in subscription.tokens or ">" in subscription.tokens:
            self._patterns.append(subscription)
        else:
            self._exact.setdefault(".".join(subscription.tokens), []).append(subscription)

    def forget(self, subscription: Subscription) -> None:
        if subscription not in subscription.conn.subscriptions:
            return
        subscription.conn.subscriptions.remove(subscription)
        if "*" in subscription.tokens or ">" in subscription.tokens:
            self._patterns.remove(subscription)
        else:
            self._exact[".".join(subscription.tokens)].remove(subscription)

    def publish(
        self,
        source: SimConn | None,
        subject: str,
        data: bytes,
        reply: str = "",
        headers: dict[str, str] | None = None,
        beside: SimConn | None = None,
    ) -> None:
        """`beside`: of a message of the servers' own, the client whose server sends it. None: the one with the
        buckets."""
        if not self.up:
            return
        beside = source or beside
        tokens = subject.split(".")
        head = tokens[0]
        found = list(self._exact.get(subject, ()))
        found += [one for one in self._patterns if one.tokens[0] in (head, "*", ">") and one.matches(tokens)]
        queues: dict[str, list[Subscription]] = {}
        chosen = []
        for subscription in sorted(found, key=lambda each: each.number) if len(found) > 1 else found:
            if subscription.conn.is_connected and not self._is_refused(beside, subscription.conn):
                if subscription.queue:
                    queues.setdefault(subscription.queue, []).append(subscription)
                else:
                    chosen.append(subscription)
        chosen += [self.rng.choice(members) for members in queues.values()]
        if not chosen and reply:
            self.publish(None, reply, b"", headers={"Status": "503"}, beside=beside)
        for subscription in chosen:
            message = SimMsg(subject, reply, data, headers)
            self._send(beside, source, subscription, message)
            if reply and self.duplicates and self.rng.random() < self.duplicates:
                self.later(self.rng.uniform(*LATE_S), self._send, beside, source, subscription, message)

    def _travel(self, source: int, to: int, arrive: Callable[[], None]) -> None:
        pair = (source, to)
        at = max(self.loop.now + self.delay(), self._free_at.get(pair, 0.0) + 1e-6, self.still_until)
        self._free_at[pair] = at
        self.at(at, arrive)

    def _is_refused(self, source: SimConn | None, to: SimConn) -> bool:
        """Does the server of `source` know that it can't reach the server of `to`?"""
        partition = self.partition
        return (
            partition is not None and partition.way == "refused" and partition.cuts(_process(source), to.process)
        )

    def _pass(self, source: Process | None, to: Process | None, send: Callable[[], None]) -> None:
        """Sends a message, unless a partition cuts it. None: the server with the buckets."""
        if self.partition is not None and self.partition.cuts(source, to):
            self.partition.take(source, to, send)
        else:
            send()

    def heal(self) -> None:
        if (partition := self.partition) is not None:
            self.partition = None
            partition.heal()

    def answer(self, conn: SimConn, answered: Callable[..., None], result: Any, *, of_bucket: bool) -> None:
        """JetStream's answer; or a PONG, which comes from the client's own server."""

        def send() -> None:
            self.later(self.delay(), answered, result, client_id)

        client_id = conn.client_id
        if of_bucket:
            self._pass(None, conn.process, send)
        else:
            send()

    def arrive_from(self, conn: SimConn, arrive: Callable[[], None], *, for_bucket: bool = True) -> None:
        """A client's message for the server itself: JetStream's, or a PING for its own one. In flight it dies with the
        connection."""
        client_id, restarts = conn.client_id, self.restarts
        in_its_buffer = self.still  # which it reads to the end, whatever has become of the client

        def arrived() -> None:
            if self.restarts == restarts and (in_its_buffer or conn.client_id == client_id):
                arrive()

        def send() -> None:
            if for_bucket:
                self._pass(conn.process, None, lambda: self._travel(client_id, 0, arrived))
            else:
                self._travel(client_id, 0, arrived)

        if self.holding is not None and self.holding.takes(conn):
            self.holding.add(send)
        else:
            send()

    def _send(
        self, beside: SimConn | None, source: SimConn | None, subscription: Subscription, message: SimMsg
    ) -> None:
        to = subscription.conn.process
        self._pass(_process(beside), to, lambda: self.deliver(source, subscription, message))

    def deliver(self, source: SimConn | None, subscription: Subscription, message: SimMsg) -> None:
        conn, client_id = subscription.conn, subscription.conn.client_id

        def arrive() -> None:
            if conn.is_connected and conn.client_id == client_id:
                subscription.inbox.put_nowait(message)

        self._travel(source.client_id if source else 0, client_id, arrive)

    # ---- connections and restarts ----

    def disconnect(self, conn: SimConn, for_good: bool) -> None:
        was_connected, conn.is_connected = conn.is_connected, False
        if for_good:
            conn.is_closed = True
            self.conns.remove(conn)
            for subscription in list(conn.subscriptions):
                self.forget(subscription)
                if subscription.task is not None:
                    subscription.task.cancel()
        if was_connected and self.up:
            event = {"server": {"id": self.id}, "client": {"id": conn.client_id}}
            self.publish(None, ADVISORY, json.dumps(event).encode(), beside=conn)
        if not for_good:
            self.later(self.rng.uniform(*RECONNECT_S), self.reconnect, conn)

    def reconnect(self, conn: SimConn) -> None:
        if conn.is_closed or conn.is_connected:
            return
        if not self.up or self.still or (conn.process is not None and conn.process.frozen):
            self.later(self.rng.uniform(*RECONNECT_S), self.reconnect, conn)
            return
        conn.client_id = next(self.numbers)
        conn.is_connected = True
        conn.up.set()
        conn.send_pending()
        conn.context.run(self.loop.create_task, conn.bus._reconnected(), name=f"reconnected {conn.name}")

    def stand_still(self, seconds: float) -> None:
        """SIGSTOP, then SIGCONT. Its clients give their connections up, as it does theirs, if it takes too long."""
        self.still_until, self.stood_still = self.loop.now + seconds, True
        for conn in sorted(self.conns, key=lambda each: each.client_id):
            patience = self.rng.uniform(*PING_S)
            if patience < seconds:
                self.later(patience, self._given_up, conn, conn.client_id)

    def _given_up(self, conn: SimConn, client_id: int) -> None:
        if self.still and conn.is_connected and conn.client_id == client_id:
            self.disconnect(conn, for_good=False)

    def kill(self) -> None:
        self.up = False
        self.still_until = self.disk_until = 0.0
        self.restarts += 1
        for conn in sorted(self.conns, key=lambda each: each.client_id):
            self.disconnect(conn, for_good=False)

    def start(self) -> None:
        if not self.up:
            self.up, self.up_since = True, self.loop.now
