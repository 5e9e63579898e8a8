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

from rl_plane._util.extras import import_error
from rl_plane._util.processes import exit_within
from rl_plane._util.tasks import end_tasks
from rl_plane.bus.connection import SERVICE_CONNECT_S
from rl_plane.bus.token_stream import StreamReceiver
from rl_plane.client import RlClient
from rl_plane.fleet.fleet_call import CALLED_FROM
from rl_plane.membership.view import MembershipView
from rl_plane.membership.worker_calls import BusConnector
from rl_plane.protocol.fleet_reply_types import LeftWorker, StartingWorker
from rl_plane.protocol.http_keys import Caller, Role

try:
    from starlette.applications import Starlette

    from frontend.completions.completion_routes import add_generation_routes
    from frontend.completions.component_chooser import ComponentChooser
    from frontend.completions.openai_replies import openai_error
    from frontend.dashboard import add_dashboard
    from frontend.dialects import mount_dialects
    from frontend.dialects.common.context import DialectCalls, DialectContext
    from frontend.dialects.common.dynamo_discovery import with_discovery
    from frontend.dialects.common.fleet_as_one import dialect_error
    from frontend.facade.events import FleetEvents
    from frontend.facade.facade_routes import add_facade_routes, add_own_routes
    from frontend.frontend_limits import FrontendLimits
    from frontend.metrics.frontend_metrics import FrontendMetrics
    from frontend.pooling.pooling_routes import add_pooling_routes
    from frontend.records.record_writer import RecordWriter
    from frontend.served_component import ServedComponent, start_all, stop_all
    from frontend.server.api import Api
    from frontend.server.listener_keys import KeyFile, Keys
    from frontend.server.listeners import Certificate, Server, bind, url_of
    from frontend.server.options import FrontendOptions
    from frontend.server.shared_routes import SharedRoutes
except ModuleNotFoundError as error:
    raise import_error(error, "frontend.main", "frontend") from None

log = logging.getLogger("frontend")

SIGNALS = (signal.SIGTERM, signal.SIGINT)
EXIT_GRACES = 5
"""The time beyond the drain, in graces. An orderly end has three: the listeners', the fleet subject's and the
updates'."""

OnReady = Callable[[dict[str, Any]], None]


class Frontend:
    """All parts of the process but the listeners. `running` starts and stops them."""

    def __init__(
        self,
        clients: Sequence[RlClient],
        views: Sequence[MembershipView],
        options: FrontendOptions,
        frontend_id: str,
    ) -> None:
        """`clients`, `views`: one of each component that it serves, the frontend's own first."""
        self.bus = clients[0].bus
        self.receiver = StreamReceiver(self.bus)
        self.components = [
            ServedComponent(client, view, self.receiver, options, frontend_id, is_own=client is clients[0])
            for client, view in zip(clients, views, strict=True)
        ]
        self.own = self.components[0]
        self.by_name = {one.name: one for one in self.components}
        self.recorder = RecordWriter(options.record, options.record_files) if options.record is not None else None
        for one in self.components:
            one.calls.fleet.left, one.calls.fleet.starting = self._left, self._starting
            one.calls.on_op = functools.partial(self._on_op, one)
            if self.recorder is not None:
                one.generation.on_record = self.recorder.put
        self.metrics = FrontendMetrics(
            self.bus,
            self.recorder.counts if self.recorder is not None else {},
            {one.name: one.metrics for one in self.components},
            self.own.status.engines,
            options.dialects if options.speaks else (),
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
            clients = [client, *[await client.beside(other) for other in options.also_serve]]
            frontend = cls(clients, [await one.view() for one in clients], options, frontend_id)
            if frontend.recorder is not None:
                frontend.recorder.start()
                stack.push_async_callback(asyncio.to_thread, frontend.recorder.close)
            # The stack stops them in reverse: first the components, last the connection.
            await frontend.receiver.start()
            stack.push_async_callback(frontend.receiver.stop)
            stack.push_async_callback(stop_all, frontend.components)
            await start_all(frontend.components)
            yield frontend

    def _on_op(
        self, default: ServedComponent, op: str, asked_by: str, outcome: str, components: Sequence[str]
    ) -> None:
        """`default`: the component that the op means where the caller names none that is served here."""
        for one in [self.by_name[name] for name in components if name in self.by_name] or [default]:
            one.events.on_op(default.client.owner, op, asked_by, outcome, CALLED_FROM.get() or "")
            one.metrics.on_op(op, outcome)

    def _left(self, component: str) -> list[LeftWorker]:
        return self.by_name[component].departures.recent() if component in self.by_name else []

    def _starting(self, component: str) -> list[StartingWorker]:
        return self.by_name[component].starting.now() if component in self.by_name else []

    def _about(self) -> dict[str, Any]:
        return {
            "nats": self.bus.about,
            "namespace": self.own.client.namespace,
            "component": self.own.name,
            **self.own.about(),
            "components": {name: one.about() for name, one in self.by_name.items()},
        }

    async def drain(self, timeout_s: float) -> None:
        """Refuses new requests and new updates, and waits for the requests under way."""
        for one in self.components:
            one.calls.leave()
        await asyncio.gather(*(one.generation.drain(timeout_s) for one in self.components))

    def end_streams(self) -> None:
        """Ends the streams of events. They never end by themselves, and would delay the stop for its whole grace."""
        for one in self.components:
            one.events.end_streams()

    def generation_app(self, options: FrontendOptions, keys: Keys) -> Starlette:
        api = Api("rl_plane: generation", keys, options.allowed_hosts, openai_error)
        chooser = ComponentChooser([one.generation for one in self.components])
        add_generation_routes(api, chooser)
        add_pooling_routes(api, chooser.choose)
        return api.app()

    def facade_app(self, options: FrontendOptions, keys: Keys, shared: SharedRoutes) -> Starlette:
        """`shared` collects the dialects' routes. The caller closes it."""
        api = Api("rl_plane: the fleet", keys, options.allowed_hosts)
        own, extend = self.own, None
        if options.dialects:
            # The dialects' clients take this listener for a whole engine, so it generates too: the own component.
            chooser = ComponentChooser([own.generation])
            add_generation_routes(api, chooser, as_engine=True)
            add_pooling_routes(api, chooser.choose)
            calls = DialectCalls(own.calls)
            context = DialectContext(calls, own.view, own.generation, options.part_timeout_s)
            mount_dialects(shared, options.dialects, context)
            extend = functools.partial(with_discovery, context)
        named = ComponentChooser([one.generation for one in self.components]).named

        def events_of(name: str | None) -> FleetEvents:
            return self.by_name[named(name).component].events

        add_facade_routes(api, own.calls, events_of, self.metrics, shared, extend)
        running = {one.name: one.engines.running for one in self.components}
        add_own_routes(api, own.client.owner, self._about, running)
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
            limits = options.limits
            stop = _Stop(options.drain_s, EXIT_GRACES * limits.grace_s)
            try:
                await _serve(
                    apps, lambda: on_ready(urls) if on_ready else None, frontend, stop, certificate, limits
                )
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

    def __init__(self, drain_s: float, exit_margin_s: float) -> None:
        """`exit_margin_s`: the time that the stop may take after the drain, before the process is ended."""
        self.drain_s = drain_s
        self._exit_margin_s = exit_margin_s
        self.asked = asyncio.Event()
        self.at_once = asyncio.Event()

    def on_signal(self) -> None:
        exit_within(self.drain_s + self._exit_margin_s)
        (self.at_once if self.asked.is_set() else self.asked).set()


async def _serve(
    apps: list[tuple[Starlette, socket.socket]],
    on_ready: Callable[[], None],
    frontend: Frontend,
    stop: _Stop,
    certificate: Certificate | None,
    limits: FrontendLimits,
) -> None:
    servers = [Server(app, certificate, limits) for app, _ in apps]
    follower = (
        asyncio.create_task(certificate.follow(limits.certificate_reload_s), name="certificate")
        if certificate is not None
        else None
    )
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
                await _first_of([frontend.drain(stop.drain_s), stop.at_once.wait()])
    finally:
        if follower is not None:
            await end_tasks([follower])
        frontend.end_streams()
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
