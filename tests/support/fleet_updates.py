"""Helpers of `tests/fleet/test_updates.py` and of other tests."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

from rl_plane.bus.token_stream import StreamReceiver
from rl_plane.fleet.fleet import Fleet
from rl_plane.membership.worker_calls import WorkerCalls
from tests.conftest import Plane
from tests.support.stream_messages import messages_of


def update_of(directory: Path, version: str | None = None, **policy: Any) -> dict[str, Any]:
    body: dict[str, Any] = {"transport": {"backend": "filesystem", "path": str(directory)}}
    if version is not None:
        body["version"] = version
    if policy:
        body["policy"] = policy
    return body


async def states(client: WorkerCalls) -> dict[str, dict[str, Any]]:
    await client.list_workers()  # as new as the leader's: a process that has just joined is in it
    out = await client.call_all("state")
    return {row.instance_id: dict(row.body) for row in out.rows if row.status == "ok"}


async def all_serve(client: WorkerCalls, label: str) -> bool:
    found = await states(client)
    return bool(found) and all(
        state["admission"]["open"] and state["applied_weight_version"] == label for state in found.values()
    )


async def generated(
    client: WorkerCalls, instance_id: str, prompt: list[int], max_tokens: int, **more: Any
) -> list[int]:
    receiver = StreamReceiver(client.bus)
    await receiver.start()
    body = {"request": {"prompt_token_ids": prompt, "max_tokens": max_tokens, **more}}
    stream = await receiver.open(client.subjects().generate(instance_id), f"r{time.monotonic_ns()}", body)
    tokens: list[int] = []
    try:
        async with asyncio.timeout(30):
            async for message in messages_of(stream):
                if "delta" in message:
                    tokens += message["delta"]["token_ids"]
    finally:
        await receiver.stop()
    return tokens


async def is_locked(client: WorkerCalls) -> bool:
    entry = await client.bus.get(client.subjects().state, "lock")
    return entry is not None and entry.value is not None


async def while_preparing(plane: Plane, fleet: Fleet, body: dict[str, Any]) -> asyncio.Task[dict[str, Any]]:
    task = asyncio.create_task(fleet.run("update_weights", body))
    await plane.until(lambda: is_locked(fleet.client))
    view = await fleet.client.view()
    members = len(view.snapshot())

    async def asked() -> bool:  # every worker has seen the coordinator's fence
        found = await states(fleet.client)
        return len(found) == members and all(state["fence"] > 0 for state in found.values())

    await plane.until(asked)
    return task


_COORDINATOR = """
import asyncio, json, os, signal, sys
from rl_plane.client import RlClient
from rl_plane.membership.worker_calls import WorkerCalls
from rl_plane.fleet.fleet import Fleet
url, namespace, die_at, body = sys.argv[1:]

async def main():
    client = await RlClient.connect(url, namespace)
    ask = client.ask
    async def dying(view, members, op, *args, **more):
        if op != die_at:
            return await ask(view, members, op, *args, **more)
        if op == "prepare_update":
            await ask(view, members, op, *args, **more)
        os.kill(os.getpid(), signal.SIGKILL)
    client.ask = dying
    await Fleet(client).run("update_weights", json.loads(body))

asyncio.run(main())
"""


async def coordinator_that_dies(plane: Plane, body: dict[str, Any], at: str) -> None:
    """`at` prepare_update: when all have prepared; set_admission: when it is decided; commit_update: when all are
    gated."""
    arguments = [plane.url, plane.namespace, at, json.dumps(body)]
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", _COORDINATOR, *arguments)
    async with asyncio.timeout(60):
        assert await process.wait() == -signal.SIGKILL


async def paused(client: WorkerCalls) -> list[bool]:
    return [state["pause"]["paused"] for state in (await states(client)).values()]
