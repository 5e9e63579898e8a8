"""Helpers of `tests/fleet/test_frontend_lease.py` and of other tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from frontend.main import Frontend
from frontend.served_component import ServedComponent
from frontend.server.options import FrontendOptions
from rl_plane.bus.state_store import read_frontends
from rl_plane.client import RlClient
from rl_plane.membership.worker_calls import BusConnector
from rl_plane.protocol.envelope import Request, decode, encode
from rl_plane.protocol.record import DecisionRecord
from tests.conftest import Plane
from tests.support.committed_records import span
from tests.support.scripted_worker import ScriptedWorker, Stream

BOUND_S = 10.0


@asynccontextmanager
async def running(
    plane: Plane, connect_bus: BusConnector | None = None, **more: Any
) -> AsyncIterator[ServedComponent]:
    """The own component of a frontend that runs until the block ends."""
    given = {"rl_port": None, "http_port": 0, "admission_wait_s": BOUND_S, **more}
    options = FrontendOptions(plane.url, plane.namespace, plane.component, **given)
    async with Frontend.running(options, connect_bus) as frontend:
        yield frontend.own


async def listed(client: RlClient) -> list[str]:
    return await read_frontends(client.bus, client.subjects().state)


async def tell(
    client: RlClient, frontend_id: str, wire: dict[str, Any] | bytes, form: Any = "msgpack"
) -> dict[str, Any]:
    data = wire if isinstance(wire, bytes) else encode(wire, form)
    message = await client.bus.nc.request(client.subjects().frontend(frontend_id), data, timeout=BOUND_S)
    return decode(message.data)


def follow(record: DecisionRecord, sequence: int) -> dict[str, Any]:
    return Request("follow_record", {"record": record.to_wire(), "sequence": sequence}, id="x").to_wire()


@asynccontextmanager
async def scripted(plane: Plane, holds: DecisionRecord, *tokens: int) -> AsyncIterator[ScriptedWorker]:
    """A worker that answers every request with these tokens, honestly labelled."""

    async def script(stream: Stream) -> None:
        assert worker.held is not None
        await stream.send([*tokens], span(worker.held.version.sequence, 0, len(tokens)), end=True)

    client = await plane.client("worker")
    worker = ScriptedWorker(client.bus, client.subjects(), script, holds)
    await worker.start()
    yield worker
    await worker.stop()
