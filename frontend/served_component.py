"""Everything in a frontend that belongs to one component: its members, lease, requests, ops, events and counts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

from frontend.completions.service import Generation
from frontend.facade.events import FleetEvents
from frontend.facade.nats_service import FleetService
from frontend.facade.op_runner import OpRunner
from frontend.facade.starting_workers import StartingWorkers
from frontend.facade.update_recovery import UpdateRecovery
from frontend.metrics.component_metrics import ComponentMetrics
from frontend.metrics.lock_and_pause import LockAndPause
from frontend.routing.committed import Committed
from frontend.routing.departures import Departures
from frontend.routing.engine_client import EngineClient
from frontend.routing.fleet_status import FleetStatus
from frontend.routing.routing_lease import FrontendLease
from frontend.server.options import FrontendOptions
from rl_plane._util.tasks import end_tasks
from rl_plane.bus.token_stream import StreamReceiver
from rl_plane.client import RlClient
from rl_plane.fleet.fleet import Fleet
from rl_plane.membership.view import MembershipView


class ServedComponent:
    """The parts of one component, which `start` starts and `stop` stops. Components share the connection to NATS, the
    receiver of token streams and the listeners, and nothing else: no state of one reaches another."""

    def __init__(
        self,
        client: RlClient,
        view: MembershipView,
        receiver: StreamReceiver,
        options: FrontendOptions,
        frontend_id: str,
        *,
        is_own: bool,
    ) -> None:
        """`is_own`: the frontend's own component, which requests without a `model` and ops without a `component` mean.
        Only its tokens are delivered on the facade's listener."""
        self.name = client.component
        self.client = client
        self.view = view
        self.delivers_tokens = options.http_port is not None or (is_own and options.speaks)
        """Whether this frontend delivers its tokens. Updates do not wait for a frontend that does not."""
        self.status = FleetStatus(client, view)
        self.departures = Departures(view, self.status)
        self.starting = StartingWorkers(client.bus, view)
        self.lock_and_pause = LockAndPause(client.bus, view.subjects.state)
        self.events = FleetEvents(view, self.status, frontend_id, options.limits)
        self.committed = Committed(view)
        self.lease = FrontendLease(view, frontend_id, options.limits)
        self.engines = EngineClient(
            receiver, view, self.status, self.committed, self.lease, options.admission_wait_s, options.limits
        )
        self.generation = Generation(
            self.engines,
            client,
            view,
            self.status,
            self.committed,
            options.admission_wait_s,
            options.limits,
            is_own=is_own,
        )
        self.lease.on_abort = self.generation.abort
        self.metrics = ComponentMetrics(
            view=view,
            status=self.status,
            departures=self.departures,
            committed=self.committed,
            lease=self.lease if self.delivers_tokens else None,
            lock_and_pause=self.lock_and_pause,
            engines=self.engines,
            generation=self.generation,
        )
        self.events.on_ended = self.metrics.updates.on_ended
        fleet = Fleet(client, options.limits.session_idle_s)
        fleet.liveness_timeout_s = options.liveness_timeout_s
        fleet.expected = options.expect if is_own else 0
        self.recovery = UpdateRecovery(fleet, view)
        self.calls = OpRunner(fleet)
        self.events.running = fleet.running_update
        self.service = FleetService(
            client.bus, view.subjects.fleet, self.calls, max_calls=options.limits.fleet_calls
        )
        self.reading = FleetService(
            client.bus, view.subjects.fleet_read, self.calls, reads=True, max_calls=options.limits.fleet_calls
        )
        self._grace_s = options.limits.grace_s
        self._running = AsyncExitStack()

    async def start(self) -> None:
        """Starts the parts. After an error, `stop` stops the parts that have started."""
        # The stack stops them in reverse: first the parts that take new work. The listeners of the view stay: they
        # change memory only, and end with the connection, which closes last.
        stack = self._running
        self.committed.start()
        self.departures.start()
        await self.client.bus.subscribe(self.view.subjects.exited("*"), self.departures.on_exit)
        await self.starting.start()
        await self.lock_and_pause.start()
        await self.events.start()
        stack.push_async_callback(self.events.stored.stop)
        stack.callback(self.events.stop)
        await self.status.start()
        stack.push_async_callback(self.status.stop)
        self.engines.start()
        self.generation.start()
        if self.delivers_tokens:
            await self.lease.start()
            stack.push_async_callback(self.lease.stop)
        await self.recovery.start()
        stack.push_async_callback(self.recovery.stop)
        stack.push_async_callback(self.calls.close, self._grace_s)
        await self.service.start()
        stack.push_async_callback(self.service.stop, self._grace_s)
        await self.reading.start()
        stack.push_async_callback(self.reading.stop, self._grace_s)

    async def stop(self) -> None:
        await self._running.aclose()

    # ---- facts, from this process's memory ----

    def about(self) -> dict[str, Any]:
        """The facts of `GET /v1/rl/about` that belong to the component."""
        owner = self.lock_and_pause.owner()
        return {
            "serving_lease": self.lease.holds() if self.delivers_tokens else None,
            "lock": {"owner": owner, "held_s": self.lock_and_pause.held_s()} if owner is not None else None,
            "pause_left_s": self.lock_and_pause.pause_left_s(),
            "expected": self.calls.fleet.expected or None,
            "workers": self.status.by_state(),
        }


async def start_all(components: Sequence[ServedComponent]) -> None:
    """Starts the components side by side. So workers that do not answer delay the start once, and not once for each
    component. If one component fails, the others have ended their start when this raises the error."""
    starts = [asyncio.create_task(one.start()) for one in components]
    try:
        await asyncio.gather(*starts)
    finally:
        await end_tasks(starts)


async def stop_all(components: Sequence[ServedComponent]) -> None:
    """Stops them side by side, so that several take no longer than one."""
    ends = await asyncio.gather(*(one.stop() for one in components), return_exceptions=True)
    for error in ends:
        if isinstance(error, BaseException):
            raise error
