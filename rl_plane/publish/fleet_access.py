"""Calls the fleet from the publisher's threads: one blocking function over any kind of client."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable
from typing import Any

from rl_plane.bus.credentials import NO_CREDENTIALS, NatsCredentials
from rl_plane.client import RlClient
from rl_plane.errors import DeadlineExceeded, InvalidRequest
from rl_plane.fleet.fleet import Fleet
from rl_plane.fleet.http_client import call_facade
from rl_plane.membership.worker_calls import WorkerCalls
from rl_plane.protocol.subjects import DEFAULT_COMPONENT, DEFAULT_NAMESPACE, DEFAULT_NATS_URL
from rl_plane.sync import CallBounds, SyncRlClient

FleetLike = RlClient | Fleet | SyncRlClient | str
"""A client, or a URL: `http://…` of the frontend, or `nats://…` of the NATS server."""


class BlockingFleet:
    """Runs ops of the fleet. `run` blocks, and raises the fleet's PlaneError."""

    def __init__(
        self,
        fleet: FleetLike,
        *,
        admin_key: str | None = None,
        namespace: str = DEFAULT_NAMESPACE,
        component: str | None = None,
        credentials: NatsCredentials = NO_CREDENTIALS,
    ) -> None:
        """An asynchronous client must be given in the event loop that runs it. `component` belongs to a URL; None is
        the default component."""
        self.nats_url: str | None = None
        self.credentials = credentials
        self.loop: asyncio.AbstractEventLoop | None = None
        self._close: Callable[[], None] | None = None
        bounds = CallBounds()
        if isinstance(fleet, str) and fleet.startswith(("http://", "https://")):
            url = fleet
            select = {"component": component} if component is not None else {}

            def run(op: str, body: dict[str, Any], request_id: str) -> dict[str, Any]:
                return call_facade(url, admin_key, op, {**body, **select}, bounds.of(op, body), request_id)
        elif isinstance(fleet, (str, SyncRlClient)):
            if isinstance(fleet, str):
                fleet = SyncRlClient.connect(
                    fleet, namespace, component or DEFAULT_COMPONENT, name="publisher", credentials=credentials
                )
                self._close = fleet.close
            client = fleet
            self._set_address(client.client)

            def run(op: str, body: dict[str, Any], request_id: str) -> dict[str, Any]:
                return client.run(op, body, request_id=request_id)
        elif isinstance(fleet, (RlClient, Fleet)):
            merged = fleet if isinstance(fleet, Fleet) else Fleet(fleet)
            self._set_address(merged.client)
            try:
                loop = self.loop = asyncio.get_running_loop()
            except RuntimeError as error:
                raise InvalidRequest(
                    "an asynchronous client was given outside its event loop",
                    field="fleet",
                    fix="make the publisher in that event loop, or give a SyncRlClient or a URL",
                ) from error

            def run(op: str, body: dict[str, Any], request_id: str) -> dict[str, Any]:
                return _on_loop(loop, merged, op, body, request_id, bounds.of(op, body))
        else:
            raise InvalidRequest(
                f"a {type(fleet).__name__} is not a fleet",
                field="fleet",
                fix=f"give an RlClient, a Fleet, a SyncRlClient, the frontend's URL, or {DEFAULT_NATS_URL}",
            )
        self._run = run

    def _set_address(self, client: WorkerCalls) -> None:
        self.nats_url = client.bus.url
        self.credentials = client.bus.credentials

    def run(self, op: str, body: dict[str, Any], request_id: str = "") -> dict[str, Any]:
        return self._run(op, body, request_id)

    def close(self) -> None:
        """Closes the connection if this object has opened it."""
        if self._close is not None:
            self._close()


def _on_loop(
    loop: asyncio.AbstractEventLoop, fleet: Fleet, op: str, body: dict[str, Any], request_id: str, bound_s: float
) -> dict[str, Any]:
    call = asyncio.run_coroutine_threadsafe(fleet.run(op, body, request_id), loop)
    try:
        return call.result(bound_s)
    except concurrent.futures.TimeoutError:
        call.cancel()
        raise DeadlineExceeded(f"{op} did not end within {bound_s:g} s") from None
