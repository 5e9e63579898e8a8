"""SyncRlClient: RlClient for plain loops. Its methods block, end within a bound, and may be called from any thread.

with SyncRlClient.connect() as fleet:
    fleet.wait_for(2)
    fleet.pause()
    fleet.update_weights({"backend": "filesystem", "path": "/ckpt/step_17"}, "step_17")
    fleet.resume()
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
import time
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from pydantic import ValidationError

from rl_plane.bus.connection import CONNECT_TIMEOUT_S
from rl_plane.bus.credentials import NO_CREDENTIALS, NatsCredentials
from rl_plane.bus.lock import DEFAULT_LOCK_WAIT_S
from rl_plane.client import RlClient
from rl_plane.errors import BusUnreachable, DeadlineExceeded
from rl_plane.fleet.fleet import LOST_RETRIES
from rl_plane.fleet.fleet_method import BlockingRun
from rl_plane.fleet.fleet_methods import FleetMethods
from rl_plane.membership.core import Snapshot
from rl_plane.membership.worker_calls import EmptyFleet, FanOut
from rl_plane.membership.worker_reply import WorkerReply
from rl_plane.protocol.fleet_ops import DEFAULT_WAIT_S, FLEET_OPS
from rl_plane.protocol.subjects import DEFAULT_COMPONENT, DEFAULT_NAMESPACE, DEFAULT_NATS_URL
from rl_plane.protocol.update_requests import PART_TIMEOUT_S, Part, UpdatePolicy
from rl_plane.protocol.worker_ops import ENGINE_S, OPS, op_named

MARGIN_S = 20.0
"""Seconds that a call may take beside its own bounds: for a restart of NATS, reading the record, and closing."""
CANCEL_S = 5.0
"""Seconds that a cancelled call may take to undo its work."""
SIGNAL_S = 0.5
"""Seconds between two looks for a signal, which the kernel may give to another thread."""

T = TypeVar("T")


class SyncRlClient(BlockingRun, FleetMethods):
    """One connection to the fleet: the typed ops of `FleetMethods`, and calls to single workers.

    `connect` makes it. Errors are those of RlClient, and two more:

    * DeadlineExceeded: the call has exceeded its bound, and is cancelled.
    * BusUnreachable: `close` has ended the call, or was called before it.

    Ctrl-C while a call waits cancels the call, then raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rl-plane-sync", daemon=True)
        self._thread.start()
        self._closing = threading.Lock()
        self._closed = False
        self._bounds = CallBounds()
        self._client: RlClient

    @classmethod
    def connect(
        cls,
        nats_url: str = DEFAULT_NATS_URL,
        namespace: str = DEFAULT_NAMESPACE,
        component: str = DEFAULT_COMPONENT,
        *,
        name: str = "rl-client",
        wait_s: float = CONNECT_TIMEOUT_S,
        credentials: NatsCredentials = NO_CREDENTIALS,
        must_exist: bool = False,
    ) -> SyncRlClient:
        """Connects and reads the membership. BusUnreachable if no server answers within `wait_s` seconds. Unauthorized
        if it refuses `credentials`, or is not the server that they ask for. With `must_exist`: NotFound if no frontend
        and no worker has ever run for the component."""
        self = cls()
        try:
            self._client = self._wait(
                RlClient.connect(
                    nats_url,
                    namespace,
                    component,
                    name=name,
                    wait_s=wait_s,
                    credentials=credentials,
                    must_exist=must_exist,
                ),
                2 * wait_s + MARGIN_S,
                "connect",
            )
        except BaseException:
            self.close()
            raise
        return self

    def close(self) -> None:
        """Ends calls under way with an error. A second call does nothing."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
        if self._thread.is_alive():
            ending = asyncio.run_coroutine_threadsafe(self._end(), self._loop)
            with contextlib.suppress(TimeoutError):
                ending.result(CANCEL_S + CONNECT_TIMEOUT_S)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(CANCEL_S)
        if not self._thread.is_alive():
            self._loop.close()

    async def _end(self) -> None:
        calls = asyncio.all_tasks() - {asyncio.current_task()}
        if hasattr(self, "_client"):
            calls = {task for task in calls if task.get_name().startswith(_CALL)}
        for call in calls:
            call.cancel()
        if calls:
            await asyncio.wait(calls, timeout=CANCEL_S)
        if hasattr(self, "_client"):
            await self._client.close()

    def __enter__(self) -> SyncRlClient:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def client(self) -> RlClient:
        """The asynchronous client. Its coroutines must run on another thread's loop."""
        return self._client

    # ---- membership ----

    def list_workers(self, component: str | None = None) -> Snapshot:
        """The members with their epoch and fingerprint, read from the store's leader."""
        return self._wait(self._client.list_workers(component), MARGIN_S, "list_workers")

    def wait_for(self, workers: int, timeout_s: float = 60.0, component: str | None = None) -> Snapshot:
        """Waits until the fleet has at least `workers` members. NoWorkers after `timeout_s` seconds."""
        return self._wait(self._client.wait_for(workers, timeout_s, component), timeout_s + MARGIN_S, "wait_for")

    # ---- the fleet's ops: bodies and merged replies as over HTTP ----

    def run(
        self, op: str, body: dict[str, Any] | None = None, request_id: str = "", *, timeout_s: float | None = None
    ) -> dict[str, Any]:
        own_s = self._bounds.of(op, body or {})
        bound = own_s if timeout_s is None else timeout_s
        return self._wait(self._client.run(op, body, request_id=request_id), bound, op)

    # ---- single ops ----

    def call(
        self,
        instance_id: str,
        op: str,
        body: dict[str, Any] | None = None,
        *,
        component: str | None = None,
        timeout_s: float | None = None,
    ) -> WorkerReply:
        """Asks one worker for an op of `worker_ops.OPS`, and raises the worker's error. See `WorkerCalls.call`."""
        call = self._client.call(instance_id, op, body, component=component, timeout_s=timeout_s)
        return self._wait(call, self._worker_bound(op, timeout_s), op)

    def call_all(
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
    ) -> FanOut:
        """Asks every engine directly, and returns a row for each. See `WorkerCalls.call_all`."""
        call = self._client.call_all(
            op,
            body,
            workers=workers,
            component=component,
            epoch=epoch,
            fingerprint=fingerprint,
            timeout_s=timeout_s,
            empty=empty,
        )
        return self._wait(call, self._worker_bound(op, timeout_s), op)

    # ---- the other thread ----

    def _worker_bound(self, op: str, timeout_s: float | None) -> float:
        spec_s = OPS[op].timeout_s if op in OPS else 0.0
        return (timeout_s or spec_s) + DEFAULT_LOCK_WAIT_S + MARGIN_S

    def _wait(self, work: Coroutine[Any, Any, T], bound_s: float, what: str) -> T:
        if self._closed:
            work.close()
            raise _closed()
        finished = threading.Event()
        result: Future[T] = Future()

        async def call() -> None:
            try:
                value = await work
            except asyncio.CancelledError:
                result.cancel()
            except BaseException as error:
                result.set_exception(error)
            else:
                result.set_result(value)
            finally:
                finished.set()

        task: list[asyncio.Task[None]] = []

        def start() -> None:
            task.append(self._loop.create_task(call(), name=f"{_CALL}{what}"))

        def cancel() -> None:
            for each in task:
                each.cancel()

        try:
            self._loop.call_soon_threadsafe(start)
        except RuntimeError as error:  # the client was closed meanwhile
            work.close()
            raise _closed() from error
        try:
            give_up = time.monotonic() + bound_s
            # A call during `close` may not even begin. Then the thread's end ends the wait.
            while (
                not finished.wait(min(SIGNAL_S, max(0.0, give_up - time.monotonic()))) and self._thread.is_alive()
            ):
                if time.monotonic() >= give_up:
                    raise DeadlineExceeded(f"{what} did not end within {bound_s:g} s")
        except BaseException:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(cancel)
            finished.wait(CANCEL_S)
            raise
        if inspect.getcoroutinestate(work) == inspect.CORO_CREATED:
            work.close()
        if result.cancelled() or not result.done():
            raise _closed()
        return result.result()


_CALL = "rl-plane call: "

BY_ANOTHER: dict[str, Any] = {"policy": {"barrier": "rolling"}}
"""The longest policy: another caller may have prepared so."""


def _closed() -> BusUnreachable:
    return BusUnreachable("this client has been closed", fix="connect a new one")


class CallBounds:
    """The bounds of one caller's calls. A `complete` has the longest policy of all calls of `prepare` for its
    component: the fleet may have refused the last call, of another thread."""

    def __init__(self) -> None:
        self._prepared: dict[str, dict[str, Any]] = {}

    def of(self, op: str, body: dict[str, Any]) -> float:
        component = str(body.get("component"))
        if op == "prepare_weights_update":
            both = (self._prepared.get(component, body), body)
            self._prepared[component] = max(both, key=lambda one: call_bound_s(op, one))
        if op == "complete_weights_update":
            body = {**body, "policy": self._prepared.get(component, BY_ANOTHER).get("policy")}
        return call_bound_s(op, body)


def call_bound_s(op: str, body: dict[str, Any]) -> float:
    """The longest that a call can take if all is well: the sum of its own waits, in seconds."""
    wait_s = _number(body.get("wait_s"), DEFAULT_WAIT_S) + DEFAULT_LOCK_WAIT_S + MARGIN_S
    spec = FLEET_OPS.get(op)
    if spec is None:
        return wait_s
    if spec.prepare_waits:
        try:
            policy = UpdatePolicy.model_validate(body.get("policy") or {})
        except ValidationError:  # the op itself refuses it
            policy = UpdatePolicy()
        return wait_s + spec.prepare_waits * policy.prepare_timeout_s + policy.commit_bound_s
    if issubclass(spec.own, Part):
        return wait_s + 2 * _number(body.get("timeout_s"), PART_TIMEOUT_S) + ENGINE_S  # a second time for the lock
    worker_op = spec.worker_op or op
    spec_s = op_named(worker_op).timeout_s if worker_op in OPS else 60.0
    return wait_s + spec_s * (1 + LOST_RETRIES)


def _number(value: Any, default: float) -> float:
    """The caller's bound if it is a valid number. The op itself refuses a wrong one."""
    return float(value) if isinstance(value, (int, float)) and 0 <= value < float("inf") else default
