"""The frontend process: one connection to NATS, the facade, the generation API and the fleet subject."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import signal
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from fastapi import FastAPI

from frontend.completions.completion_routes import Generation, make_generation_app
from frontend.completions.tokens import Tokens
from frontend.dialects import DialectCalls, DialectPlane
from frontend.dialects.dialect_routes import close_routes
from frontend.facade.admin import Spoken, make_admin_app
from frontend.facade.calls import FleetCalls
from frontend.facade.events import FleetEvents
from frontend.facade.nats_service import FleetService
from frontend.facade.recovery import Finisher
from frontend.routing.committed import Committed
from frontend.routing.engine_client import EngineClient
from frontend.routing.fleet_status import FleetStatus
from frontend.routing.routing_lease import FrontendLease
from frontend.server.listeners import GRACE_S, Server, bind, url_of
from frontend.server.metrics import frontend_metrics
from frontend.server.options import FrontendOptions
from rl_plane._util.processes import exit_within
from rl_plane._util.tasks import end_tasks
from rl_plane.bus.connection import SERVICE_CONNECT_S
from rl_plane.bus.token_stream import StreamReceiver
from rl_plane.client import RlClient
from rl_plane.fleet.fleet import Fleet
from rl_plane.membership.view import MembershipView

log = logging.getLogger("frontend")

SIGNALS = (signal.SIGTERM, signal.SIGINT)
EXIT_MARGIN_S = 5.0 * GRACE_S
"""Beyond the drain: an orderly end has three graces in it, the listeners', the fleet subject's and the updates'."""

OnReady = Callable[[dict[str, Any]], None]


class Frontend:
    """Everything but the listeners. `running` starts and ends it."""

    def __init__(self, client: RlClient, view: MembershipView, options: FrontendOptions, frontend_id: str) -> None:
        self.client = client
        self.view = view
        self.delivers = options.http_port is not None or options.speaks
        """Tokens. A frontend that does not is not waited for by updates."""
        self.part_timeout_s = options.part_timeout_s
        self.status = FleetStatus(client, view)
        self.events = FleetEvents(view, self.status)
        self.committed = Committed(view)
        self.lease = FrontendLease(view, frontend_id)
        self.receiver = StreamReceiver(client.bus)
        self.engines = EngineClient(
            self.receiver, view, self.status, self.committed, self.lease, options.admission_wait_s
        )
        self.lease.on_abort = self.engines.aborts.abort
        self.generation = Generation(self.engines, view, self.committed, options.admission_wait_s)
        self.tokens = Tokens(client, view, self.generation.check_model)
        fleet = Fleet(client)
        fleet.liveness_timeout_s = options.liveness_timeout_s
        self.finisher = Finisher(fleet, view)
        self.calls = FleetCalls(fleet)
        self.service = FleetService(client.bus, view.subjects.fleet, self.calls)

    @classmethod
    @asynccontextmanager
    async def running(cls, options: FrontendOptions) -> AsyncIterator[Frontend]:
        frontend_id = secrets.token_hex(8)
        name = f"frontend-{frontend_id}"
        client = await RlClient.connect(
            options.nats_url, options.namespace, options.component, name=name, wait_s=SERVICE_CONNECT_S
        )
        async with AsyncExitStack() as stack:
            stack.push_async_callback(client.close)
            frontend = cls(client, await client.view(), options, frontend_id)
            # Ended in the opposite order: first what takes new work, last the connection.
            await frontend.receiver.start()
            stack.push_async_callback(frontend.receiver.stop)
            frontend.committed.start()
            stack.callback(frontend.committed.stop)
            await frontend.events.start()
            stack.callback(frontend.events.stop)
            await frontend.status.start()
            stack.push_async_callback(frontend.status.stop)
            frontend.engines.start()
            stack.callback(frontend.engines.stop)
            if frontend.delivers:
                await frontend.lease.start()
                stack.push_async_callback(frontend.lease.stop)
            frontend.finisher.start()
            stack.push_async_callback(frontend.finisher.stop)
            stack.push_async_callback(frontend.calls.close, GRACE_S)
            await frontend.service.start()
            stack.push_async_callback(frontend.service.stop, GRACE_S)
            yield frontend

    def spoken(self, dialects: tuple[str, ...]) -> Spoken:
        plane = DialectPlane(DialectCalls(self.calls), self.view, self.generation, self.part_timeout_s)
        return Spoken(dialects, plane, self.tokens)

    def metrics(self) -> str:
        snapshot = self.view.snapshot()
        record = self.committed.record
        return frontend_metrics(
            workers=len(snapshot),
            admitted=len(self.status.admitted()),
            closed=self.status.closed_by_reason(),
            canaries=self.events.canaries,
            epoch=snapshot.epoch,
            sequence=record.sequence if record else None,
            outcomes=self.generation.outcomes,
            in_flight=self.generation.in_flight,
            lease=self.lease.holds() if self.delivers else None,
            picks=self.engines.router.picks,
            moves=self.engines.moves,
        )


async def serve(options: FrontendOptions, on_ready: OnReady | None = None) -> None:
    """Runs until SIGTERM, SIGINT or cancellation. `on_ready` gets `{rl_url, http_url}` once both accept
    connections; None stands for a listener that is off."""
    with contextlib.ExitStack() as sockets:
        # Before anything else is opened: a port that is taken is found at once, and nobody is disturbed.
        rl = _listener(sockets, "rl_port", options, options.rl_port, options.admin_key)
        http = _listener(sockets, "http_port", options, options.http_port, options.api_key)
        async with Frontend.running(options) as frontend:
            apps: list[tuple[FastAPI, socket.socket]] = []
            if rl is not None:
                key = options.admin_key or None
                spoken = frontend.spoken(options.dialects) if options.speaks else None
                app = make_admin_app(frontend.calls, key, frontend.metrics, frontend.events, spoken)
                apps.append((app, rl))
            if http is not None:
                api_key = options.api_key or None
                apps.append((make_generation_app(frontend.generation, frontend.tokens, api_key), http))
            urls = {"rl_url": url_of(rl) if rl else None, "http_url": url_of(http) if http else None}
            ending = _Ending(options.drain_s)
            try:
                await _serve(apps, lambda: on_ready(urls) if on_ready else None, frontend, ending)
            finally:
                for app, _ in apps:
                    await close_routes(app)


def _listener(
    stack: contextlib.ExitStack, field: str, options: FrontendOptions, port: int | None, key: str | None
) -> socket.socket | None:
    if port is None:
        return None
    return stack.enter_context(bind(field, options.host, port, key or None, options.insecure))


class _Ending:
    """What signals ask for."""

    def __init__(self, drain_s: float) -> None:
        self.drain_s = drain_s
        self.asked = asyncio.Event()
        self.at_once = asyncio.Event()
        """By the second one: whoever sends it does not want to wait."""

    def signalled(self) -> None:
        exit_within(self.drain_s + EXIT_MARGIN_S)
        (self.at_once if self.asked.is_set() else self.asked).set()


async def _serve(
    apps: list[tuple[FastAPI, socket.socket]], on_ready: Callable[[], None], frontend: Frontend, ending: _Ending
) -> None:
    servers = [Server(app) for app, _ in apps]
    runs = [
        asyncio.create_task(server.serve([listener]), name="listener")
        for server, (_, listener) in zip(servers, apps, strict=True)
    ]
    try:
        with _signals(ending):
            for server in servers:
                await server.accepting.wait()
            on_ready()
            await _first_of([ending.asked.wait()], runs)
            log.info("stopping")
            if ending.asked.is_set():
                await _first_of([frontend.generation.drain(ending.drain_s), ending.at_once.wait()])
    finally:
        # Streams of events never end by themselves: they would hold the stop for its whole grace.
        frontend.events.stop()
        for server in servers:
            server.should_exit, server.force_exit = True, ending.at_once.is_set()
        await asyncio.gather(*runs)


async def _first_of(
    waits: Sequence[Coroutine[Any, Any, object]], others: Sequence[asyncio.Task[None]] = ()
) -> None:
    """Until one has ended. `others` go on."""
    tasks = [asyncio.create_task(wait) for wait in waits]
    try:
        await asyncio.wait([*tasks, *others], return_when=asyncio.FIRST_COMPLETED)
    finally:
        await end_tasks(tasks)


@contextlib.contextmanager
def _signals(ending: _Ending) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    installed = []
    for number in SIGNALS:
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):  # not in the main thread
            loop.add_signal_handler(number, ending.signalled)
            installed.append(number)
    try:
        yield
    finally:
        for number in installed:
            loop.remove_signal_handler(number)


@asynccontextmanager
async def started(options: FrontendOptions) -> AsyncIterator[dict[str, Any]]:
    """A frontend beside other work in this loop, until the block ends; gives what `on_ready` gets."""
    urls: dict[str, Any] = {}
    ready = asyncio.Event()

    def on_ready(found: dict[str, Any]) -> None:
        urls.update(found)
        ready.set()

    run = asyncio.create_task(serve(options, on_ready))
    run.add_done_callback(lambda _: ready.set())
    try:
        await ready.wait()
        if run.done():
            await run  # raises why it could not start
        yield urls
    finally:
        run.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await run
