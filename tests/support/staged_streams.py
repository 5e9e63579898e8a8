"""Helpers of `tests/fleet/test_frontend_labels.py` and of other tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from frontend.frontend_limits import LIMITS, FrontendLimits
from frontend.server.options import FrontendOptions
from rl_plane.client import RlClient
from rl_plane.membership.worker_calls import BusConnector
from rl_plane.protocol.record import DecisionRecord
from tests.conftest import Plane
from tests.support.committed_records import span
from tests.support.frontend_here import started
from tests.support.lease_calls import follow, listed, tell
from tests.support.plain_client import plain_client
from tests.support.scripted_worker import Script, ScriptedWorker, Stream, decide

BOUND_S = 20.0


class Stage:
    """A frontend, scripted workers, and what is decided."""

    def __init__(self, plane: Plane, client: RlClient, http: httpx.AsyncClient) -> None:
        self.plane = plane
        self.client = client
        self.http = http
        self.workers: list[ScriptedWorker] = []

    async def worker(self, script: Script, holds: DecisionRecord) -> ScriptedWorker:
        client = await self.plane.client("worker")
        worker = ScriptedWorker(client.bus, client.subjects(), script, holds)
        await worker.start()
        self.workers.append(worker)
        return worker

    async def decide(self, decided: DecisionRecord) -> None:
        """Writes a decision, and waits until every frontend has learnt it, as a coordinator does."""
        written = await decide(self.client.bus, self.client.subjects(), decided)
        for frontend_id in await self.plane.until(lambda: listed(self.client)):
            reply = await tell(self.client, frontend_id, follow(decided, written))
            assert (reply["status"], reply["body"]) == ("ok", {"sequence": decided.sequence})

    async def ask(self, **body: Any) -> httpx.Response:
        return await self.http.post("/v1/completions", json={"prompt": "hi", "return_token_ids": True, **body})


@asynccontextmanager
async def staged(
    plane: Plane,
    wait_s: float = 5.0,
    limits: FrontendLimits = LIMITS,
    connect_bus: BusConnector | None = None,
) -> AsyncIterator[Stage]:
    options = FrontendOptions(
        plane.url,
        plane.namespace,
        plane.component,
        rl_port=None,
        http_port=0,
        admission_wait_s=wait_s,
        limits=limits,
    )
    client = await plane.client()
    async with (
        started(options, connect_bus) as urls,
        plain_client(base_url=urls["http_url"], timeout=BOUND_S) as http,
    ):
        stage = Stage(plane, client, http)
        yield stage
        for worker in stage.workers:
            await worker.stop()


def always(*tokens: int, base: int, **adapter: int) -> Script:
    """Answers each request with these tokens at once."""

    async def script(stream: Stream) -> None:
        await stream.send([*tokens], span(base, 0, len(tokens), **adapter), end=True)

    return script
