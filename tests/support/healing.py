"""Helpers of `tests/fleet/test_worker_healing.py` and of other tests."""

from __future__ import annotations

from typing import Any

from rl_plane.membership.worker_calls import WorkerCalls
from tests.conftest import Plane


async def state_of(client: WorkerCalls, instance_id: str) -> dict[str, Any]:
    return dict((await client.call(instance_id, "state")).body)


async def checksum_of(client: WorkerCalls, instance_id: str) -> str:
    row = await client.call(instance_id, "check_weights", {"action": "checksum"})
    return str(row.body["ranks"][0]["checksum"])


async def until_open(
    plane: Plane, client: WorkerCalls, instance_id: str, label: str, bound_s: float = 30.0
) -> None:
    async def at_it() -> bool:
        state = await state_of(client, instance_id)
        return bool(state["admission"]["open"]) and state["applied_weight_version"] == label

    await plane.until(at_it, bound_s)


async def until_behind(plane: Plane, client: WorkerCalls, instance_id: str) -> str:
    """Why the worker is not at the committed version, as its state says."""

    async def reason_for_closing() -> str:
        admission = (await state_of(client, instance_id))["admission"]
        assert not admission["open"]
        return next((reason for reason in admission["reasons"] if reason.startswith("behind: ")), "")

    return str(await plane.until(reason_for_closing))
