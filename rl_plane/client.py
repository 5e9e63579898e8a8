"""RlClient: the fleet as a service or trainer sees it. Asynchronous; `sync.py` wraps it for plain loops.

async with await RlClient.connect() as client:
    await client.wait_for(2)
    print(await client.state())
    await client.update_weights({"transport": {"backend": "filesystem", "path": "/ckpt/step_17"}})
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

from rl_plane.bus.connection import CONNECT_TIMEOUT_S, Bus
from rl_plane.bus.lock import DEFAULT_LOCK_WAIT_S, HeldLock, hold_lock
from rl_plane.bus.scatter import Answer, Gather, Missing, Scatter
from rl_plane.bus.sealed_record import bar_former
from rl_plane.errors import (
    BusUnreachable,
    DeadlineExceeded,
    EngineFailed,
    InvalidRequest,
    MembershipChanged,
    NotFound,
    NoWorkers,
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
from rl_plane.protocol.validation import MAX_TIMEOUT_S, parse_body
from rl_plane.protocol.worker_ops import Op, not_a_member, op_named

WATCH_QUEUE = 10_000
"""Changes that a slow watcher may be behind; then its watch ends with an error, rather than growing."""

EmptyFleet = Literal["error", "ok"]


@dataclass(frozen=True, slots=True)
class FanOut:
    """The answers of one fan-out: a row for each member of the snapshot that it was sent to."""

    snapshot: Snapshot
    rows: list[WorkerReply]
    elapsed_s: float

    @property
    def failed(self) -> list[WorkerReply]:
        return [row for row in self.rows if row.status == "error"]


class RlClient:
    """One connection. Methods may be called concurrently; `close` ends what is under way with an error."""

    def __init__(self, bus: Bus, namespace: str, component: str) -> None:
        self.bus = bus
        self.namespace = namespace
        self.component = component
        self.owner = f"{bus.name}@{socket.gethostname()}:{os.getpid()}"
        """How others see who holds the lock."""
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
    ) -> RlClient:
        """Connects and reads the membership. BusUnreachable when no server answers within `wait_s`."""
        subjects = Subjects(namespace, component)  # checks the names before anything is opened
        bus = await Bus.connect(nats_url, name, wait_s)
        client = cls(bus, namespace, component)
        try:
            await client._gather.start_listening()
            await client._start_view(subjects)
        except BaseException:
            await client.close()
            raise
        return client

    async def close(self) -> None:
        for view in self._views.values():
            await view.stop()
        await self.bus.close()

    async def __aenter__(self) -> RlClient:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    # ---- membership ----

    def subjects(self, component: str | None = None) -> Subjects:
        return Subjects(self.namespace, component or self.component)

    async def view(self, component: str | None = None) -> MembershipView:
        """The live view of a component (default: this client's). NotFound if no worker ever joined it."""
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
                    fix="is a worker of it running?",
                )
            return await self._start_view(subjects)

    async def _start_view(self, subjects: Subjects) -> MembershipView:
        view = MembershipView(self.bus, subjects, self._gather)
        await view.start()
        self._views[subjects.component] = view
        return view

    async def list_workers(self, component: str | None = None) -> Snapshot:
        """The members, their epoch and fingerprint, as new as the leader's."""
        return await (await self.view(component)).barrier()

    async def watch(self, component: str | None = None) -> AsyncIterator[Changed]:
        """Every join, leave and death from now on."""
        queue: asyncio.Queue[Changed] = asyncio.Queue(WATCH_QUEUE)
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
            raise BusUnreachable(f"this watcher is {WATCH_QUEUE} changes behind: watch again")
        finally:
            stop()

    async def wait_for(self, workers: int, timeout_s: float = 60.0, component: str | None = None) -> Snapshot:
        """The fleet once it has at least so many members; NoWorkers when the time-out is over."""
        check_timeout("timeout_s", timeout_s)
        view = await self.view(component)
        if not await view.wait_until(lambda now: len(now) >= workers, timeout_s):
            raise NoWorkers(
                f"{len(view.snapshot())} of {workers} workers are there after {timeout_s:g} s",
                field="min_workers",
                fix="start workers, or wait longer",
                retry_after_s=1.0,
            )
        return view.snapshot()

    # ---- the fleet's ops: bodies and merged replies as over HTTP ----

    async def run(self, op: str, body: dict[str, Any] | None = None, request_id: str = "") -> dict[str, Any]:
        """Any op of `rl_plane.protocol.fleet_ops.FLEET_OPS`: a complete success, or a PlaneError whose facts name every
        worker.

        The body may select by component, workers, epoch, fingerprint, min_workers (1), wait_s (5).
        `request_id` makes an update idempotent: asked again, the first answer comes back."""
        from rl_plane.fleet.fleet import Fleet  # it is built on this class

        return await Fleet(self).run(op, body, request_id)

    async def state(self, **select: Any) -> dict[str, Any]:
        return await self.run("state", select)

    async def pause(self, **body: Any) -> dict[str, Any]:
        """`mode` (keep), `clear_cache` (as the mode says), `lease_s` (600): after it the fleet resumes by itself."""
        return await self.run("pause", body)

    async def resume(self, **select: Any) -> dict[str, Any]:
        return await self.run("resume", select)

    async def update_weights(self, body: dict[str, Any], request_id: str = "") -> dict[str, Any]:
        """All of the fleet or nobody."""
        return await self.run("update_weights", body, request_id)

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
        """The component's lock, for a sequence of changing calls. Locked when it can't be had in time.

        `update_id`: what it is held for; `same_wait_s`: how long to wait while another holds it for the same."""
        async with hold_lock(
            self.bus,
            view.subjects.state,
            self.owner,
            wait_s=wait_s,
            died=view.connection_died,
            update_id=update_id,
            same_wait_s=same_wait_s,
        ) as held:
            if held.taken:
                await bar_former(self.bus, view.subjects.state, held)
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
        request_id: str = "",
    ) -> WorkerReply:
        """Asks one worker, and raises its error. Strictly that one: NotFound when it is not in the fleet.

        A changing op takes the component's lock for its fence, unless the caller holds it already."""
        check_instance_id("instance_id", instance_id)
        spec = op_named(op)
        check_timeout("timeout_s", timeout_s)
        view = await self.view(component)
        member = view.member(instance_id) or (await view.barrier() and view.member(instance_id))
        if not member:
            raise not_a_member(instance_id)
        async with self._fenced(spec, view, held) as lock:
            request = self._request(spec, body, timeout_s, lock, request_id)
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
        retries: int = 0,
        empty: EmptyFleet = "error",
        held: HeldLock | None = None,
        request_id: str = "",
    ) -> FanOut:
        """Asks every engine (or those named), each directly, and returns a row for each: errors are rows.

        `epoch`, `fingerprint`: MembershipChanged unless the fleet is that one, before and after.
        `timeout_s` bounds each of 1 + `retries` attempts (None: the op's default). `empty`: what no worker
        at all means. A changing op takes the component's lock, as `call` does."""
        spec = op_named(op)
        check_timeout("timeout_s", timeout_s)
        view = await self.view(component)
        pinned = epoch is not None or fingerprint is not None
        snapshot = await view.barrier() if pinned or spec.changes else view.snapshot()
        check_pin(snapshot, epoch, fingerprint)
        members = select_members(snapshot, workers)
        if not members and empty == "error":
            raise NoWorkers(
                f"no worker of {view.subjects.namespace}.{view.subjects.component} is there",
                field="workers",
                fix="start one: `rl-plane worker`",
                retry_after_s=1.0,
            )
        start = time.monotonic()
        async with self._fenced(spec, view, held) as lock:
            request = self._request(spec, body, (timeout_s or spec.timeout_s) * (1 + retries), lock, request_id)
            rows = await self._send(view, members, request, timeout_s or spec.timeout_s, retries)
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
        told: Callable[[WorkerReply], None] | None = None,
    ) -> list[WorkerReply]:
        """`call_all` for a coordinator, which knows its members and, if the op changes anything, has the lock.
        `told` gets each row as it comes; it must not raise."""
        spec = op_named(op)
        request = self._request(spec, body, timeout_s, held if spec.changes else None, "")
        return await self._send(view, members, request, timeout_s or spec.timeout_s, told=told)

    async def gather(self, targets: Sequence[tuple[str, bytes]], timeout_s: float) -> list[Answer]:
        """Sends `(subject, payload)` to each at once; their answers, in the same order."""
        return await self._gather.run(targets, timeout_s)

    def _fenced(
        self, spec: Op, view: MembershipView, held: HeldLock | None
    ) -> AbstractAsyncContextManager[HeldLock | None]:
        return self.lock(view) if spec.changes and held is None else nullcontext(held)

    def _request(
        self,
        spec: Op,
        body: dict[str, Any] | None,
        timeout_s: float | None,
        lock: HeldLock | None,
        request_id: str,
    ) -> Request:
        parse_body(spec.request, body or {})  # bad input is refused here, before anybody is asked
        return Request(
            op=spec.name,
            body=body or {},
            id=request_id,
            fence=lock.fence if lock else None,
            timeout_ms=int((timeout_s or spec.timeout_s) * 1000) if spec.changes else None,
        )

    async def _send(
        self,
        view: MembershipView,
        members: Sequence[Member],
        request: Request,
        timeout_s: float,
        retries: int = 0,
        told: Callable[[WorkerReply], None] | None = None,
    ) -> list[WorkerReply]:
        direct = view.subjects.rl_direct("")
        if request.fence is None:
            payload = encode(request.to_wire())
            targets = [(direct + member.instance_id, payload) for member in members]
        else:
            payloads = encode_for_each(request, [member.incarnation for member in members])
            targets = [
                (direct + member.instance_id, payload) for member, payload in zip(members, payloads, strict=True)
            ]
        rows: dict[int, WorkerReply] = {}

        def heard(index: int, answer: Answer) -> None:
            member = members[index]
            rows[index] = _row(member, answer, timeout_s)
            if answer is Missing.LOST:
                view.found_dead(member.instance_id, member.revision)
            if told is not None:
                told(rows[index])

        scatter = await self._gather.scatter(targets, heard)
        stop = view.listen(_follow(self._gather, scatter, members))
        try:
            self._catch_up(view, scatter, members)  # it has sent for some time, in a large fleet
            for attempt in range(1 + retries):
                if attempt:
                    for index in scatter.unanswered:
                        await scatter.send(index)
                if await scatter.wait(timeout_s):
                    break
            else:
                await self._last_look(view, scatter, members)
        finally:
            stop()
            self._gather.close(scatter)
        return [
            rows[index] if index in rows else _row(member, Missing.SILENT, timeout_s)
            for index, member in enumerate(members)
        ]

    async def _last_look(self, view: MembershipView, scatter: Scatter, members: Sequence[Member]) -> None:
        """Lets the membership say of a silent target that it has died, if it knows."""
        try:
            await view.barrier()
        except BusUnreachable:
            return
        self._catch_up(view, scatter, members)

    def _catch_up(self, view: MembershipView, scatter: Scatter, members: Sequence[Member]) -> None:
        """With what has changed since the members were read, as `_follow` does with what changes."""
        for index in scatter.unanswered:
            member = members[index]
            now = view.member(member.instance_id)
            if now is None or now.incarnation != member.incarnation:
                scatter.left(index)
            elif now.revision != member.revision:
                self._gather.start(scatter.send(index))


def _follow(gather: Gather, scatter: Scatter, members: Sequence[Member]) -> Any:
    """A listener that ends the wait for a target that died, and asks again one that has lost its connection
    since (it may have missed the request; ops are idempotent)."""
    index_of: dict[str, int] = {}

    def changed(change: Changed) -> None:
        before = change.before
        if not index_of:  # most fan-outs end without a change
            index_of.update({member.instance_id: index for index, member in enumerate(members)})
        if before is None or (index := index_of.get(before.instance_id)) is None:
            return
        if change.after is None or change.after.incarnation != members[index].incarnation:
            scatter.left(index)
        elif index in scatter.unanswered:
            gather.start(scatter.send(index))

    return changed


def _row(member: Member, answer: Answer, timeout_s: float) -> WorkerReply:
    error: PlaneError
    if isinstance(answer, Missing):
        if answer is Missing.SILENT:
            error = DeadlineExceeded(
                f"no answer within {timeout_s:g} s", instance_id=member.instance_id, fix="is the worker hung?"
            )
        else:
            error = WorkerLost(answer.value, instance_id=member.instance_id)
        return WorkerReply(member.instance_id, member.incarnation, "error", error=error)
    try:
        wire = decode(answer)
        failure = wire.get("error")
        if wire["status"] == "skipped" and member.stage is None:
            raise ValueError("an engine skips nothing")
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
    """MembershipChanged unless the fleet is the one that was named."""
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
    """The engines: all, or of those named. NotFound for one that is not there."""
    if workers is None:
        return snapshot.members
    by_id = {member.instance_id: member for member in (*snapshot.members, *snapshot.stages)}
    for instance_id in workers:
        check_instance_id("workers", instance_id)
        if instance_id not in by_id:
            raise not_a_member(instance_id)
    return [by_id[key] for key in dict.fromkeys(workers) if by_id[key].stage is None]
