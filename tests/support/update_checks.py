"""slime's and miles' `--check-weight-update-equal`: snapshot, reset, the first update, compare."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import httpx

from tests.conftest import Plane
from tests.support.dialect_facade import HEAL_S, fine, refused, served

WAITS = "behind: reset_tensors overwrote the weights: an update brings others"


async def check(http: httpx.AsyncClient, action: str) -> httpx.Response:
    """The body of miles' `SGLangEngine.check_weights`."""
    body = {"action": action, "allow_quant_error": False, "selector": "all"}
    return await http.post("/weights_checker", json=body)


async def reset(http: httpx.AsyncClient) -> None:
    """Takes a snapshot and writes noise, as `create_rollout_manager` does. No worker serves then, or heals."""
    for action in ("snapshot", "reset_tensors"):
        assert fine(await check(http, action))["success"] is True
    await no_worker_heals(http)


async def no_worker_heals(http: httpx.AsyncClient) -> None:
    for row in fine(await http.get("/v1/rl/state"))["workers"]:
        assert row["admission"]["open"] is False
        assert any(reason.startswith(WAITS) for reason in row["admission"]["reasons"]), row["admission"]
        assert row["version"] is None


async def until_all_serve(plane: Plane, http: httpx.AsyncClient) -> None:
    async def all_open() -> bool:
        return all(is_open for is_open, _ in await served(http))

    await plane.until(all_open, HEAL_S)


async def check_updates(plane: Plane, http: httpx.AsyncClient, update: Callable[[], Awaitable[Any]]) -> None:
    """A check without an update fails. One with `update`, which brings what the fleet serves already, succeeds."""
    await reset(http)
    # What a trainer does around an update that brings nothing.
    for path in ("/pause_generation", "/continue_generation"):
        fine(await http.post(path, json={}))
    await no_worker_heals(http)
    error = refused(await check(http, "compare"), 409)
    assert all(rank["mismatches"] for rank in error["ranks"])
    await until_all_serve(plane, http)  # the comparison ends the wait
    await reset(http)
    await update()
    assert fine(await check(http, "compare"))["success"] is True
    await until_all_serve(plane, http)
