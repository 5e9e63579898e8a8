"""The fleet as the publisher's threads call it: one blocking function over whichever client the trainer has."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable
from typing import Any

from rl_plane.client import RlClient
from rl_plane.errors import DeadlineExceeded, InvalidRequest
from rl_plane.fleet.fleet import Fleet
from rl_plane.fleet.http_client import call_facade
from rl_plane.membership.worker_calls import WorkerCalls
from rl_plane.protocol.subjects import DEFAULT_COMPONENT, DEFAULT_NAMESPACE, DEFAULT_NATS_URL
from rl_plane.sync import CallBounds, SyncRlClient

FleetLike = RlClient | Fleet | SyncRlClient | str
"""A client, or a URL: `http://…` of the facade, `nats://…` of the server."""


class BlockingFleet:
    """`run(op, body, request_id)` blocks, and raises the fleet's PlaneError."""

    def __init__(
        self,
        fleet: FleetLike,
        *,
        admin_key: str | None = None,
        namespace: str = DEFAULT_NAMESPACE,
        component: str | None = None,
    ) -> None:
        """An asynchronous client is given in the loop that runs it. `component`: of a URL; None: the default one."""
        self.nats_url: str | None = None
        self.namespace: str | None = None
        self.component: str | None = None
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
                fleet = SyncRlClient.connect(fleet, namespace, component or DEFAULT_COMPONENT, name="publisher")
                self._close = fleet.close
            client = fleet
            self._is_reached_by(client.client)

            def run(op: str, body: dict[str, Any], request_id: str) -> dict[str, Any]:
                return client.run(op, body, request_id=request_id)
        elif isinstance(fleet, (RlClient, Fleet)):
            merged = fleet if isinstance(fleet, Fleet) else Fleet(fleet)
            self._is_reached_by(merged.client)
            try:
                loop = self.loop = asyncio.get_running_loop()
            except RuntimeError as error:
                raise InvalidRequest(
                    "an asynchronous client is given outside its loop",
                    field="fleet",
                    fix="make the publisher in the loop that runs the client, or give a SyncRlClient or a URL",
                ) from error

            def run(op: str, body: dict[str, Any], request_id: str) -> dict[str, Any]:
                return _on_loop(loop, merged, op, body, request_id, bounds.of(op, body))
        else:
            raise InvalidRequest(
                f"{type(fleet).__name__} is no fleet",
                field="fleet",
                fix=f"give an RlClient, a Fleet, a SyncRlClient, the facade's URL, or {DEFAULT_NATS_URL}",
            )
        self._run = run

    def _is_reached_by(self, client: WorkerCalls) -> None:
        self.nats_url, self.namespace, self.component = client.bus.url, client.namespace, client.component

    def run(self, op: str, body: dict[str, Any], request_id: str = "") -> dict[str, Any]:
        return self._run(op, body, request_id)

    def close(self) -> None:
        """Ends a connection that was made here."""
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
