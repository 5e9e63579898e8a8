"""Calls to workers, directly and under the component's lock, from one connection to the bus.

`WorkerCalls` sends an op to one worker (`call`), to all of them (`call_all`), or to members that a coordinator has
chosen (`ask`). Changing ops carry the fence of the component's lock.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from rl_plane._util import tracing
from rl_plane.bus.connection import CONNECT_TIMEOUT_S, RECONNECT_GRACE_S, Bus
from rl_plane.bus.credentials import NO_CREDENTIALS, NatsCredentials
from rl_plane.bus.lock import DEFAULT_LOCK_WAIT_S, LOCK_TIMINGS, HeldLock, LockTimings, hold_lock
from rl_plane.bus.scatter import Answer, Gather, Missing, Scatter
from rl_plane.bus.sealed_record import bar_former
from rl_plane.bus.state_store import read_frontends
from rl_plane.errors import (
    BusUnreachable,
    DeadlineExceeded,
    EngineFailed,
    InvalidRequest,
    MembershipChanged,
    NotFound,
    NoWorkers,
    PermissionDenied,
    PlaneError,
    WorkerLost,
    error_from_wire,
)
from rl_plane.membership.core import Changed, Member, Snapshot
from rl_plane.membership.view import MembershipView
from rl_plane.membership.worker_reply import WorkerReply
from rl_plane.protocol.envelope import Request, decode, encode, encode_for_each
from rl_plane.protocol.subjects import (
    DEFAULT_COMPONENT,
    DEFAULT_NAMESPACE,
    DEFAULT_NATS_URL,
    Subjects,
    check_instance_id,
)
from rl_plane.protocol.transport_traits import known_transports
from rl_plane.protocol.validation import MAX_TIMEOUT_S, parse_body
from rl_plane.protocol.worker_ops import Op, not_a_member, op_named

WATCH_QUEUE = 10_000
"""The number of changes that a watcher may be behind. Then its watch ends with an error, so that the queue stays
bounded."""

ASK_AGAIN_S = 5.0
"""A worker that has not answered is asked again after this time. Its answer may be lost: NATS forgets who may answer
when it reads its keys again."""

NOTHING_MORE: Mapping[str, Mapping[str, Any]] = {}

BusConnector = Callable[[str, str, float, NatsCredentials], Awaitable[Bus]]
"""Opens a connection from the server's URL, the connection's name, the longest wait in seconds and the credentials."""
EmptyFleet = Literal["error", "ok"]


@dataclass(frozen=True, slots=True)
class FanOut:
    """The answers of one fan-out: a row for each member that was asked."""

    snapshot: Snapshot
    rows: list[WorkerReply]
    elapsed_s: float

    @property
    def failed(self) -> list[WorkerReply]:
        return [row for row in self.rows if row.status == "error"]


class WorkerCalls:
    """One connection, with a live view of the members. Methods may be called concurrently; `close` ends calls under way
    with an error."""

    def __init__(
        self, bus: Bus, namespace: str, component: str, *, lock_timings: LockTimings = LOCK_TIMINGS
    ) -> None:
        self.bus = bus
        self.namespace = namespace
        self.component = component
        self.owner = f"{bus.name}@{socket.gethostname()}:{os.getpid()}"
        """The name that other processes see while this one holds the lock."""
        self._lock_timings = lock_timings
        self._gather = Gather(bus)
        self._views: dict[str, MembershipView] = {}
        self._starting = asyncio.Lock()

    @classmethod
    async def connect(
        cls,
        nats_url: str = DEFAULT_NATS_URL,
        namespace: str = DEFAULT_NAMESPACE,
        component: str = DEFAULT_COMPONENT,
        *,
        name: str = "rl-client",
        wait_s: float = CONNECT_TIMEOUT_S,
        credentials: NatsCredentials = NO_CREDENTIALS,
        must_exist: bool = False,
        lock_timings: LockTimings = LOCK_TIMINGS,
        connect_bus: BusConnector | None = None,
    ) -> Self:
        """Connects and reads the membership. BusUnreachable if no server answers within `wait_s` seconds. Unauthorized
        if it refuses `credentials`, or is not the server that they ask for.

        `must_exist`: NotFound if no frontend and no worker has ever run for the component. False: the client prepares
        NATS for it, and can wait for its first worker.
        `lock_timings`: for the component's lock while this client holds it.
        `connect_bus`: opens the connection. None: `Bus.connect`."""
        subjects = Subjects(namespace, component)  # checks the names before a connection is opened
        known_transports()  # imports what packages state of their transports: not later, beside calls under way
        bus = await (connect_bus or Bus.connect)(nats_url, name, wait_s, credentials)
        client = cls(bus, namespace, component, lock_timings=lock_timings)
        try:
            await client._gather.start_listening()
            await (client.view() if must_exist else client._start_view(subjects))
        except BaseException:
            await client.close()
            raise
        return client

    async def close(self) -> None:
        """Stops the views and closes the connection."""
        for view in self._views.values():
            await view.stop()
        await self.bus.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    # ---- membership ----

    def subjects(self, component: str | None = None) -> Subjects:
        """The NATS subjects of a component (default: this client's)."""
        return Subjects(self.namespace, component or self.component)

    async def view(self, component: str | None = None) -> MembershipView:
        """The live view of a component (default: this client's). NotFound if no worker has ever joined it."""
        name = component or self.component
        if (view := self._views.get(name)) is not None:
            return view
        subjects = Subjects(self.namespace, name)
        async with self._starting:
            if name in self._views:
                return self._views[name]
            if not await self.bus.bucket_exists(subjects.members):
                raise NotFound(
                    f"no component {name!r} in the namespace {self.namespace!r}",
                    field="component",
                    fix="start a worker with this --component, or correct the name",
                )
            return await self._start_view(subjects)

    async def beside(self, component: str) -> Self:
        """A client of another component of the namespace, over this connection, with the same views. It ends when this
        client is closed. No worker need have joined the component."""
        other = type(self)(self.bus, self.namespace, component, lock_timings=self._lock_timings)
        other._gather, other._views, other._starting = self._gather, self._views, self._starting
        async with self._starting:
            if component not in self._views:
                await self._start_view(other.subjects())
        return other

    @property
    def views(self) -> tuple[MembershipView, ...]:
        """The live views that this client has so far, one for each component."""
        return tuple(self._views.values())

    async def _start_view(self, subjects: Subjects) -> MembershipView:
        view = MembershipView(self.bus, subjects, self._gather)
        await view.start()
        self._views[subjects.component] = view
        return view

    async def list_workers(self, component: str | None = None) -> Snapshot:
        """The members with their epoch and fingerprint, read from the store's leader."""
        return await (await self.view(component)).barrier()

    async def watch(
        self, component: str | None = None, *, max_behind: int = WATCH_QUEUE
    ) -> AsyncIterator[Changed]:
        """Yields each join, leave and death from now on. BusUnreachable for a caller `max_behind` changes behind."""
        queue: asyncio.Queue[Changed] = asyncio.Queue(max_behind)
        missed = False

        def changed(change: Changed) -> None:
            nonlocal missed
            missed = missed or queue.full()
            if not missed:
                queue.put_nowait(change)

        stop = (await self.view(component)).listen(changed)
        try:
            while not missed:
                yield await queue.get()
            raise BusUnreachable(f"this watcher is {max_behind} changes behind", fix="watch again")
        finally:
            stop()

    async def wait_for(self, workers: int, timeout_s: float = 60.0, component: str | None = None) -> Snapshot:
        """Waits until the fleet has at least `workers` members. NoWorkers after `timeout_s` seconds."""
        check_timeout("timeout_s", timeout_s)
        view = await self.view(component)
        if not await view.wait_until(lambda now: len(now) >= workers, timeout_s):
            raise NoWorkers(
                f"{len(view.snapshot())} of {workers} workers have joined after {timeout_s:g} s",
                field="min_workers",
                fix="start workers, or wait longer",
                retry_after_s=1.0,
            )
        return view.snapshot()

    # ---- single ops ----

    @asynccontextmanager
    async def lock(
        self,
        view: MembershipView,
        wait_s: float = DEFAULT_LOCK_WAIT_S,
        *,
        update_id: str = "",
        same_wait_s: float = 0.0,
    ) -> AsyncIterator[HeldLock]:
        """Holds the component's lock for a sequence of changing calls. Locked if another process has it for too long.

        Args:
            wait_s: Seconds to wait for the lock.
            update_id: The update for which the call takes the lock; other processes can read it.
            same_wait_s: Seconds to wait while another process holds the lock for the same update."""
        async with AsyncExitStack() as stack:
            with tracing.child("lock"):
                held = await stack.enter_async_context(
                    hold_lock(
                        self.bus,
                        view.subjects.state,
                        self.owner,
                        wait_s=wait_s,
                        died=view.connection_died,
                        update_id=update_id,
                        same_wait_s=same_wait_s,
                        timings=self._lock_timings,
                    )
                )
            if held.taken:
                await bar_former(self.bus, view.subjects.state, held, view.record)
            yield held

    async def call(
        self,
        instance_id: str,
        op: str,
        body: dict[str, Any] | None = None,
        *,
        component: str | None = None,
        timeout_s: float | None = None,
        held: HeldLock | None = None,
    ) -> WorkerReply:
        """Asks one worker for an op of `worker_ops.OPS`, and raises the worker's error.

        A changing op takes the component's lock for its fence.

        Args:
            instance_id: The worker. NotFound if it is not in the fleet.
            op: The op's name.
            body: The op's fields.
            component: The worker's component. None: this client's.
            timeout_s: Seconds for the worker's answer. None: the op's own time-out.
            held: The lock, if the caller holds it already."""
        check_instance_id("instance_id", instance_id)
        spec = op_named(op)
        check_timeout("timeout_s", timeout_s)
        view = await self.view(component)
        member = view.member(instance_id) or (await view.barrier() and view.member(instance_id))
        if not member:
            raise not_a_member(instance_id)
        async with self._fenced(spec, view, held) as lock:
            request = _checked_request(spec, body, timeout_s, lock)
            rows = await self._send(view, [member], request, timeout_s or spec.timeout_s)
        if (error := rows[0].error) is not None:
            raise error
        return rows[0]

    async def call_all(
        self,
        op: str,
        body: dict[str, Any] | None = None,
        *,
        workers: Sequence[str] | None = None,
        component: str | None = None,
        epoch: int | None = None,
        fingerprint: str | None = None,
        timeout_s: float | None = None,
        empty: EmptyFleet = "error",
        held: HeldLock | None = None,
    ) -> FanOut:
        """Asks every engine directly, and returns a row for each. A worker's error is a row.

        A changing op takes the component's lock for its fence.

        Args:
            op: A name in `worker_ops.OPS`.
            body: The op's fields.
            workers: Instance ids to ask. None: every engine. NotFound if one is not in the fleet.
            component: The workers' component. None: this client's.
            epoch, fingerprint: The fleet that the caller means. MembershipChanged if the fleet is another one before or
                after the call.
            timeout_s: Seconds for the workers' answers. None: the op's own time-out.
            empty: `error` raises NoWorkers if the fleet has no worker.
            held: The lock, if the caller holds it already."""
        spec = op_named(op)
        check_timeout("timeout_s", timeout_s)
        view = await self.view(component)
        pinned = epoch is not None or fingerprint is not None
        snapshot = await view.barrier() if pinned or spec.changes else view.snapshot()
        check_pin(snapshot, epoch, fingerprint)
        members = select_members(snapshot, workers)
        if not members and empty == "error":
            raise NoWorkers(
                f"{view.subjects.namespace}.{view.subjects.component} has no worker",
                field="workers",
                fix=f"start one: {view.subjects.start_worker}",
                retry_after_s=1.0,
            )
        start = time.monotonic()
        async with self._fenced(spec, view, held) as lock:
            request = _checked_request(spec, body, timeout_s, lock)
            rows = await self._send(view, members, request, timeout_s or spec.timeout_s)
        if pinned:
            check_pin(await view.barrier(), epoch, fingerprint)
        return FanOut(snapshot, rows, time.monotonic() - start)

    async def ask(
        self,
        view: MembershipView,
        members: Sequence[Member],
        op: str,
        body: dict[str, Any],
        timeout_s: float | None = None,
        held: HeldLock | None = None,
        on_row: Callable[[WorkerReply], None] | None = None,
        each: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> list[WorkerReply]:
        """Asks members that a coordinator has chosen. The workers check the body, which the plane itself has built.

        `held` is the coordinator's lock; a changing op needs it. `on_row` gets each row when it arrives; it must not
        raise. `each`: more fields of a worker's body, by its id."""
        spec = op_named(op)
        request = _request(spec, body, timeout_s, held if spec.changes else None)
        return await self._send(
            view, members, request, timeout_s or spec.timeout_s, on_row=on_row, each=each or {}
        )

    async def ask_frontends(
        self, view: MembershipView, op: str, body: dict[str, Any], timeout_s: float, fence: int | None = None
    ) -> dict[str, dict[str, Any] | None]:
        """Asks every listed frontend, and returns each one's reply. None: it has not answered in time. A dead frontend
        has no subscriber on its subject, so it is left out."""
        frontends = await read_frontends(self.bus, view.subjects.state)
        request = encode(Request(op, body=body, fence=fence).to_wire())
        targets = [(view.subjects.frontend(each), request) for each in frontends]
        answers = await self._gather.run(targets, timeout_s)
        return {
            each: decode(answer) if isinstance(answer, bytes) else None
            for each, answer in zip(frontends, answers, strict=True)
            if answer is not Missing.LOST
        }

    def _fenced(
        self, spec: Op, view: MembershipView, held: HeldLock | None
    ) -> AbstractAsyncContextManager[HeldLock | None]:
        return self.lock(view) if spec.changes and held is None else nullcontext(held)

    async def _send(
        self,
        view: MembershipView,
        members: Sequence[Member],
        request: Request,
        timeout_s: float,
        on_row: Callable[[WorkerReply], None] | None = None,
        each: Mapping[str, Mapping[str, Any]] = NOTHING_MORE,
    ) -> list[WorkerReply]:
        subjects = view.subjects
        changes = op_named(request.op).changes
        direct = subjects.rl_direct("") if changes else subjects.read("")
        if request.fence is None:
            payload = encode(request.to_wire())
            targets = [(direct + member.instance_id, payload) for member in members]
        else:
            payloads = encode_for_each(request, [member.incarnation for member in members])
            targets = [
                (direct + member.instance_id, payload) for member, payload in zip(members, payloads, strict=True)
            ]
            for index, member in enumerate(members):
                if (more := each.get(member.instance_id)) is not None:
                    own = replace(request, body={**request.body, **more}, incarnation=member.incarnation)
                    targets[index] = (targets[index][0], encode(own.to_wire()))
        rows: dict[int, WorkerReply] = {}

        def heard(index: int, answer: Answer) -> None:
            member = members[index]
            rows[index] = _row(member, answer, timeout_s)
            if answer is Missing.LOST:
                view.found_dead(member.instance_id, member.revision)
            if on_row is not None:
                on_row(rows[index])

        scatter = await self._gather.scatter(targets, heard, tracing.outgoing() if changes else None)
        stop = view.listen(_follow(self._gather, scatter, members))
        try:
            self._catch_up(view, scatter, members)  # in a large fleet, sending has taken some time
            if not await _answered(scatter, timeout_s):
                await self._last_look(view, scatter, members)
        finally:
            stop()
            self._gather.close(scatter)
        return [
            rows[index] if index in rows else _row(member, Missing.SILENT, timeout_s)
            for index, member in enumerate(members)
        ]

    async def _last_look(self, view: MembershipView, scatter: Scatter, members: Sequence[Member]) -> None:
        """Reads the membership once more, which may know that a silent target has died."""
        try:
            await view.barrier()
        except BusUnreachable:
            return
        self._catch_up(view, scatter, members)

    def _catch_up(self, view: MembershipView, scatter: Scatter, members: Sequence[Member]) -> None:
        """Handles the changes since the members were read: ends the wait for a worker that left, and asks a worker that
        has reconnected again."""
        for index in scatter.unanswered:
            member = members[index]
            now = view.member(member.instance_id)
            if now is None or now.incarnation != member.incarnation:
                scatter.answer(index, Missing.LEFT)
            elif now.revision != member.revision:
                self._gather.start(scatter.send(index))


def _checked_request(
    spec: Op, body: dict[str, Any] | None, timeout_s: float | None, lock: HeldLock | None
) -> Request:
    """The request of a body that a caller has given. InvalidRequest before any worker is asked, if it is wrong."""
    parse_body(spec.request, body or {})
    return _request(spec, body, timeout_s, lock)


def _request(spec: Op, body: dict[str, Any] | None, timeout_s: float | None, lock: HeldLock | None) -> Request:
    return Request(
        op=spec.name,
        body=body or {},
        fence=lock.fence if lock else None,
        timeout_ms=int((timeout_s or spec.timeout_s) * 1000) if spec.changes else None,
    )


async def _answered(scatter: Scatter, timeout_s: float) -> bool:
    """Waits for all answers, at most `timeout_s`, and asks silent workers again meanwhile: a worker carries out once
    what comes again. Returns whether all answers have come."""
    give_up, asked = time.monotonic() + timeout_s, True  # not asked: once the workers must have reconnected
    while not await scatter.wait(min(ASK_AGAIN_S if asked else RECONNECT_GRACE_S, give_up - time.monotonic())):
        if time.monotonic() >= give_up:
            return False
        asked = await scatter.ask_again()
    return True


def _follow(gather: Gather, scatter: Scatter, members: Sequence[Member]) -> Callable[[Changed], None]:
    """A listener to the membership during a fan-out.

    It ends the wait for a worker that died. It asks a worker that has reconnected again, because that worker may have
    missed the request; ops are idempotent."""
    index_of: dict[str, int] = {}

    def changed(change: Changed) -> None:
        before = change.before
        if not index_of:  # most fan-outs end without a change
            index_of.update({member.instance_id: index for index, member in enumerate(members)})
        if before is None or (index := index_of.get(before.instance_id)) is None:
            return
        if change.after is None or change.after.incarnation != members[index].incarnation:
            scatter.answer(index, Missing.LEFT)
        elif index in scatter.unanswered:
            gather.start(scatter.send(index))

    return changed


def _row(member: Member, answer: Answer, timeout_s: float) -> WorkerReply:
    error: PlaneError
    if isinstance(answer, Missing):
        if answer is Missing.DENIED:
            error = PermissionDenied(
                answer.value, instance_id=member.instance_id, fix="use a key that may (docs/security.md)"
            )
        elif answer is Missing.SILENT:
            error = DeadlineExceeded(
                f"no answer within {timeout_s:g} s",
                instance_id=member.instance_id,
                fix="look at the worker: rl-plane explain",
            )
        else:
            error = WorkerLost(answer.value, instance_id=member.instance_id)
        return WorkerReply(member.instance_id, member.incarnation, "error", error=error)
    try:
        wire = decode(answer)
        failure = wire.get("error")
        if wire["status"] == "skipped" and member.pipeline_stage is None:
            raise ValueError("an engine answers 'skipped'")
        return WorkerReply(
            member.instance_id,
            wire["incarnation"],
            wire["status"],
            wire.get("body") or {},
            error_from_wire(failure) if failure else None,
            wire.get("rank_results"),
            wire["elapsed_s"],
        )
    except (PlaneError, LookupError, TypeError, ValueError) as malformed:
        error = EngineFailed(f"its reply can't be read: {malformed}", instance_id=member.instance_id)
        return WorkerReply(member.instance_id, member.incarnation, "error", error=error)


def check_timeout(field: str, timeout_s: float | None) -> None:
    if timeout_s is not None and not 0 < timeout_s <= MAX_TIMEOUT_S:
        raise InvalidRequest(
            f"{field} is {timeout_s!r}", field=field, fix=f"seconds, above 0 and at most {MAX_TIMEOUT_S:g}"
        )


def check_pin(snapshot: Snapshot, epoch: int | None, fingerprint: str | None) -> None:
    """MembershipChanged unless the fleet has this epoch and this fingerprint (None: any)."""
    if epoch is not None and epoch != snapshot.epoch:
        raise MembershipChanged(before_epoch=epoch, after_epoch=snapshot.epoch, fingerprint=snapshot.fingerprint)
    if fingerprint is not None and fingerprint != snapshot.fingerprint:
        raise MembershipChanged(
            f"the fleet's fingerprint is {snapshot.fingerprint} at epoch {snapshot.epoch}, not {fingerprint}",
            after_epoch=snapshot.epoch,
            before_epoch=epoch,
            fingerprint=snapshot.fingerprint,
        )


def select_members(snapshot: Snapshot, workers: Sequence[str] | None) -> Sequence[Member]:
    """The engines to ask: all, or those in `workers`. NotFound if one is not in the fleet."""
    if workers is None:
        return snapshot.members
    by_id = {member.instance_id: member for member in (*snapshot.members, *snapshot.pipeline_stages)}
    for instance_id in workers:
        check_instance_id("workers", instance_id)
        if instance_id not in by_id:
            raise not_a_member(instance_id)
    return [by_id[key] for key in dict.fromkeys(workers) if by_id[key].pipeline_stage is None]
