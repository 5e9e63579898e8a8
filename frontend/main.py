"""The frontend process: one connection to NATS, the facade, the generation API and the fleet subject."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import secrets
import signal
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from starlette.applications import Starlette

from frontend.completions.completion_routes import add_generation_routes
from frontend.completions.openai_replies import openai_error
from frontend.completions.service import Generation
from frontend.completions.tokens import Tokens
from frontend.dashboard import add_dashboard
from frontend.dialects import mount_dialects
from frontend.dialects.common.context import DialectCalls, DialectContext
from frontend.dialects.common.dynamo_discovery import with_discovery
from frontend.dialects.common.fleet_as_one import dialect_error
from frontend.facade.events import FleetEvents
from frontend.facade.facade_routes import add_facade_routes, add_own_routes
from frontend.facade.nats_service import FleetService
from frontend.facade.op_runner import OpRunner
from frontend.facade.starting_workers import StartingWorkers
from frontend.facade.update_recovery import UpdateRecovery
from frontend.metrics.frontend_metrics import FleetFacts, FrontendMetrics, GenerationFacts
from frontend.metrics.lock_and_pause import LockAndPause
from frontend.pooling.pooling_routes import add_pooling_routes
from frontend.records.record_writer import RecordWriter
from frontend.routing.committed import Committed
from frontend.routing.departures import Departures
from frontend.routing.engine_client import EngineClient
from frontend.routing.engine_facts import EngineFacts
from frontend.routing.fleet_status import FleetStatus
from frontend.routing.routing_lease import FrontendLease
from frontend.server.api import Api
from frontend.server.listener_keys import KeyFile, Keys
from frontend.server.listeners import GRACE_S, Certificate, Server, bind, url_of
from frontend.server.options import FrontendOptions
from frontend.server.shared_routes import SharedRoutes
from rl_plane._util.processes import exit_within
from rl_plane._util.tasks import end_tasks
from rl_plane.bus.connection import SERVICE_CONNECT_S
from rl_plane.bus.token_stream import StreamReceiver
from rl_plane.client import RlClient
from rl_plane.fleet.fleet import Fleet
from rl_plane.fleet.fleet_call import CALLED_FROM
from rl_plane.membership.view import MembershipView
from rl_plane.membership.worker_calls import BusConnector
from rl_plane.protocol.http_keys import Caller, Role

log = logging.getLogger("frontend")

SIGNALS = (signal.SIGTERM, signal.SIGINT)
EXIT_MARGIN_S = 5.0 * GRACE_S
"""The time beyond the drain. An orderly end has three graces: the listeners', the fleet subject's and the updates'."""

OnReady = Callable[[dict[str, Any]], None]


class Frontend:
    """All parts of the process but the listeners. `running` starts and stops them."""

    def __init__(self, client: RlClient, view: MembershipView, options: FrontendOptions, frontend_id: str) -> None:
        self.client = client
        self.view = view
        self.delivers_tokens = options.http_port is not None or options.speaks
        """Whether this frontend delivers tokens. Updates do not wait for a frontend that does not."""
        self.part_timeout_s = options.part_timeout_s
        self.status = FleetStatus(client, view)
        self.metrics = FrontendMetrics(self, options.dialects if options.speaks else ())
        self.departures = Departures(view, self.status)
        self.starting = StartingWorkers(client.bus, view)
        self.lock_and_pause = LockAndPause(client.bus, view.subjects.state)
        self.events = FleetEvents(view, self.status, frontend_id, options.limits)
        self.events.on_ended = self.metrics.updates.on_ended
        self.committed = Committed(view)
        self.lease = FrontendLease(view, frontend_id, options.limits)
        self.receiver = StreamReceiver(client.bus)
        self.engines = EngineClient(
            self.receiver, view, self.status, self.committed, self.lease, options.admission_wait_s, options.limits
        )
        self.lease.on_abort = self.engines.aborts.abort
        self.generation = Generation(self.engines, view, self.committed, options.admission_wait_s, options.limits)
        self.recorder = RecordWriter(options.record, options.record_files) if options.record is not None else None
        if self.recorder is not None:
            self.generation.on_record = self.recorder.put
        self.tokens = Tokens(client, view, self.generation.check_model)
        fleet = Fleet(client)
        fleet.liveness_timeout_s = options.liveness_timeout_s
        fleet.expected, fleet.left = options.expect, self.departures.recent
        fleet.starting = self.starting.now
        self.recovery = UpdateRecovery(fleet, view)
        self.calls = OpRunner(fleet)
        self.events.running = fleet.running_update
        self.calls.on_op = self._on_op
        self.service = FleetService(
            client.bus, view.subjects.fleet, self.calls, max_calls=options.limits.fleet_calls
        )
        self.reading = FleetService(
            client.bus, view.subjects.fleet_read, self.calls, reads=True, max_calls=options.limits.fleet_calls
        )

    @classmethod
    @asynccontextmanager
    async def running(
        cls, options: FrontendOptions, connect_bus: BusConnector | None = None
    ) -> AsyncIterator[Frontend]:
        """Starts a frontend, and stops it when the block ends. `connect_bus`: as in `RlClient.connect`."""
        frontend_id = secrets.token_hex(8)
        name = f"frontend-{frontend_id}"
        client = await RlClient.connect(
            options.nats_url,
            options.namespace,
            options.component,
            name=name,
            wait_s=SERVICE_CONNECT_S,
            connect_bus=connect_bus,
            credentials=options.credentials,
        )
        async with AsyncExitStack() as stack:
            stack.push_async_callback(client.close)
            frontend = cls(client, await client.view(), options, frontend_id)
            if frontend.recorder is not None:
                frontend.recorder.start()
                stack.push_async_callback(asyncio.to_thread, frontend.recorder.close)
            # The stack stops them in reverse: first the parts that take new work, last the connection.
            await frontend.receiver.start()
            stack.push_async_callback(frontend.receiver.stop)
            frontend.committed.start()
            stack.callback(frontend.committed.stop)
            frontend.departures.start()
            stack.callback(frontend.departures.stop)
            await client.bus.subscribe(frontend.view.subjects.exited("*"), frontend.departures.on_exit)
            await frontend.starting.start()
            stack.callback(frontend.starting.stop)
            await frontend.lock_and_pause.start()
            await frontend.events.start()
            stack.push_async_callback(frontend.events.stored.stop)
            stack.callback(frontend.events.stop)
            await frontend.status.start()
            stack.push_async_callback(frontend.status.stop)
            frontend.engines.start()
            stack.callback(frontend.engines.stop)
            if frontend.delivers_tokens:
                await frontend.lease.start()
                stack.push_async_callback(frontend.lease.stop)
            await frontend.recovery.start()
            stack.push_async_callback(frontend.recovery.stop)
            stack.push_async_callback(frontend.calls.close, GRACE_S)
            await frontend.service.start()
            stack.push_async_callback(frontend.service.stop, GRACE_S)
            await frontend.reading.start()
            stack.push_async_callback(frontend.reading.stop, GRACE_S)
            yield frontend

    def _on_op(self, op: str, asked_by: str, outcome: str) -> None:
        self.events.on_op(self.client.owner, op, asked_by, outcome, CALLED_FROM.get() or "")
        self.metrics.on_op(op, outcome)

    def _about(self) -> dict[str, Any]:
        owner = self.lock_and_pause.owner()
        return {
            "nats": self.client.bus.about,
            "serving_lease": self.lease.holds() if self.delivers_tokens else None,
            "lock": {"owner": owner, "held_s": self.lock_and_pause.held_s()} if owner is not None else None,
            "pause_left_s": self.lock_and_pause.pause_left_s(),
            "expected": self.calls.fleet.expected or None,
            "workers": self.status.by_state(),
        }

    def fleet_facts(self) -> FleetFacts:
        members, record, bus = self.view.snapshot(), self.committed.record, self.client.bus
        return FleetFacts(
            by_state=self.status.by_state(),
            closed=self.status.closed_by_reason(),
            left=self.departures.counts,
            engine_requests=self.status.engine_requests(),
            epoch=members.epoch,
            sequence=record.sequence if record else None,
            version_lag=self.status.version_lag(record.sequence) if record else 0,
            lease=self.lease.holds() if self.delivers_tokens else None,
            lock_held_by=self.lock_and_pause.held_by(),
            lock_held_s=self.lock_and_pause.held_s(),
            pause_left_s=self.lock_and_pause.pause_left_s(),
            connected=bus.nc.is_connected,
            reconnects=bus.nc.stats["reconnects"],
        )

    def engine_facts(self) -> Sequence[EngineFacts]:
        return self.status.engine_facts()

    def generation_facts(self) -> GenerationFacts:
        return GenerationFacts(
            outcomes=self.generation.outcomes,
            in_flight=self.generation.in_flight,
            picks=self.engines.router.picks,
            moves=self.engines.moves,
            timings=self.generation.timings,
            records=self.recorder.counts if self.recorder is not None else {},
        )

    def _service_of(self, model: str | None) -> Generation:
        """The service of the fleet that has the model of a request. This frontend has one fleet."""
        return self.generation

    def generation_app(self, options: FrontendOptions, keys: Keys) -> Starlette:
        api = Api("rl_plane: generation", keys, options.allowed_hosts, openai_error)
        add_generation_routes(api, self.generation, self.tokens)
        add_pooling_routes(api, self._service_of)
        return api.app()

    def facade_app(self, options: FrontendOptions, keys: Keys, shared: SharedRoutes) -> Starlette:
        """`shared` collects the dialects' routes. The caller closes it."""
        api = Api("rl_plane: the fleet", keys, options.allowed_hosts)
        extend: Callable[[dict[str, Any], str], dict[str, Any]] | None = None
        if options.dialects:
            # The dialects' clients take this listener for a whole engine, so it generates too.
            add_generation_routes(api, self.generation, self.tokens, as_engine=True)
            add_pooling_routes(api, self._service_of)
            calls = DialectCalls(self.calls)
            context = DialectContext(calls, self.view, self.generation, options.part_timeout_s)
            mount_dialects(shared, options.dialects, context)
            extend = functools.partial(with_discovery, context)
        add_facade_routes(api, self.calls, self.events, self.metrics, shared, extend)
        add_own_routes(api, self.client.owner, self._about, self.engines.running)
        shared.mount(api)
        add_dashboard(api)
        return api.app()


async def serve(
    options: FrontendOptions, on_ready: OnReady | None = None, connect_bus: BusConnector | None = None
) -> None:
    """Runs until SIGTERM, SIGINT or cancellation. `on_ready` gets `{rl_url, http_url}` once both accept connections.
    The URL of a listener that is off is None."""
    certificate = (
        Certificate(options.https_cert, options.https_key) if options.https_cert and options.https_key else None
    )
    file = KeyFile(options.keys_file) if options.keys_file is not None else None
    with contextlib.ExitStack() as sockets:
        # The sockets come first: a port that is in use ends the start before it disturbs the fleet.
        rl = _listener(sockets, "rl_port", options, options.rl_port, options.admin_key)
        http = _listener(sockets, "http_port", options, options.http_port, options.api_key)
        async with Frontend.running(options, connect_bus) as frontend:
            apps: list[tuple[Starlette, socket.socket]] = []
            shared = SharedRoutes(dialect_error)
            if rl is not None:
                apps.append((frontend.facade_app(options, _keys(options.admin_key, "admin", file), shared), rl))
            if http is not None:
                apps.append((frontend.generation_app(options, _keys(options.api_key, "generate", file)), http))
            scheme = "http" if certificate is None else "https"
            urls = {
                "rl_url": url_of(rl, scheme) if rl else None,
                "http_url": url_of(http, scheme) if http else None,
            }
            stop = _Stop(options.drain_s)
            try:
                await _serve(apps, lambda: on_ready(urls) if on_ready else None, frontend, stop, certificate)
            finally:
                await shared.close()


def _listener(
    stack: contextlib.ExitStack, field: str, options: FrontendOptions, port: int | None, key: str | None
) -> socket.socket | None:
    if port is None:
        return None
    has_file = options.keys_file is not None
    return stack.enter_context(bind(field, options.host, port, key or None, options.insecure, has_file))


def _keys(own: str | None, role: Role, file: KeyFile | None) -> Keys:
    """The keys of one listener. `own`: its own key, which has the id of its option."""
    name = "admin_key" if role == "admin" else "api_key"
    return Keys((own, Caller(name, role)) if own else None, file)


class _Stop:
    """The stop that signals request. The first signal drains, the second one stops at once."""

    def __init__(self, drain_s: float) -> None:
        self.drain_s = drain_s
        self.asked = asyncio.Event()
        self.at_once = asyncio.Event()

    def on_signal(self) -> None:
        exit_within(self.drain_s + EXIT_MARGIN_S)
        (self.at_once if self.asked.is_set() else self.asked).set()


async def _serve(
    apps: list[tuple[Starlette, socket.socket]],
    on_ready: Callable[[], None],
    frontend: Frontend,
    stop: _Stop,
    certificate: Certificate | None,
) -> None:
    servers = [Server(app, certificate) for app, _ in apps]
    follower = asyncio.create_task(certificate.follow(), name="certificate") if certificate is not None else None
    runs = [
        asyncio.create_task(server.serve([listener]), name="listener")
        for server, (_, listener) in zip(servers, apps, strict=True)
    ]
    try:
        with _signals(stop):
            for server in servers:
                await server.accepting.wait()
            on_ready()
            await _first_of([stop.asked.wait()], runs)
            log.info("stopping")
            if stop.asked.is_set():
                await _first_of([frontend.generation.drain(stop.drain_s), stop.at_once.wait()])
    finally:
        if follower is not None:
            await end_tasks([follower])
        # Event streams never end by themselves, and would delay the stop for its whole grace.
        frontend.events.stop()
        for server in servers:
            server.should_exit, server.force_exit = True, stop.at_once.is_set()
        await asyncio.gather(*runs)


async def _first_of(
    waits: Sequence[Coroutine[Any, Any, object]], others: Sequence[asyncio.Task[None]] = ()
) -> None:
    """Waits until one has ended, and cancels the other `waits`. `others` continue."""
    tasks = [asyncio.create_task(wait) for wait in waits]
    try:
        await asyncio.wait([*tasks, *others], return_when=asyncio.FIRST_COMPLETED)
    finally:
        await end_tasks(tasks)


@contextlib.contextmanager
def _signals(stop: _Stop) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    installed = []
    for number in SIGNALS:
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):  # not in the main thread
            loop.add_signal_handler(number, stop.on_signal)
            installed.append(number)
    try:
        yield
    finally:
        for number in installed:
            loop.remove_signal_handler(number)
