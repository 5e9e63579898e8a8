"""A policy and a reference, and one frontend that serves both."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from frontend.server.options import FrontendOptions
from tests.conftest import Plane
from tests.support.frontend_here import started
from tests.support.plain_client import plain_client
from tests.support.streaming_client import Streaming
from worker.receive.staging import model_digest

BOUND_S = 30.0
WAIT_S = 1.0
"""The seconds that a request waits for a worker that is not there."""
LONG = 3000
"""More tokens than an engine makes while a test runs."""


@dataclass
class Fleets:
    """A policy and a reference, and one frontend that serves both."""

    policy: Plane
    reference: Plane
    http: httpx.AsyncClient
    rl: httpx.AsyncClient

    async def steer(self, op: str, **body: Any) -> dict[str, Any]:
        response = await self.rl.post(f"/v1/rl/{op}", json=body)
        assert response.status_code == 200, response.text
        reply: dict[str, Any] = response.json()
        return reply

    def stream(self, model: str, max_tokens: int = LONG, **body: Any) -> Streaming:
        return Streaming(self.http, model=model, max_tokens=max_tokens, logprobs=1, **body)

    async def state(self, component: str) -> dict[str, Any]:
        reply: dict[str, Any] = (await self.rl.get("/v1/rl/state", params={"component": component})).json()
        return reply

    async def end(self, stream: Streaming, component: str) -> None:
        """Ends the requests of one component, and reads a stream of it to its end."""
        await self.steer("abort_requests", component=component)
        await stream.end()
        assert stream.last["finish_reason"] == "abort"

    async def update(self, plane: Plane, path: Path, label: str) -> str:
        """Updates one component to a model. Returns its digest."""
        transport = {"backend": "filesystem", "path": str(path)}
        component = {} if plane is self.policy else {"component": plane.component}
        await self.steer("update_weights", transport=transport, version=label, **component)
        return model_digest(path)


async def ready(rl: httpx.AsyncClient, component: str) -> None:
    reply = await rl.get("/v1/rl/ready", params={"component": component, "wait_s": BOUND_S})
    assert reply.status_code == 200, reply.text


@asynccontextmanager
async def serving(policy: Plane, *others: str, **more: Any) -> AsyncIterator[tuple[httpx.AsyncClient, ...]]:
    """A frontend's listeners: of generation, and of the facade."""
    given = {"rl_port": 0, "http_port": 0, "admission_wait_s": WAIT_S, "also_serve": others, **more}
    options = FrontendOptions(policy.url, policy.namespace, policy.component, **given)
    async with (
        started(options) as urls,
        plain_client(base_url=urls["http_url"], timeout=BOUND_S) as http,
        plain_client(base_url=urls["rl_url"], timeout=BOUND_S) as rl,
    ):
        yield http, rl


def labels(reply: dict[str, Any]) -> list[tuple[str, int]]:
    return [(one["version"], one["sequence"]) for one in reply["choices"][0]["weight_versions"]]
