"""One call of a trainer or an operator, and how long it may have to wait."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from rl_plane.errors import PlaneError
from rl_plane.fleet.fleet_call import ASKED_BY
from tests.sim.checks import CALL, CallRecord
from tests.sim.world import Coordinator, World

UPDATE_BOUND_S = 240.0
CHANGE_BOUND_S = 150.0
READ_BOUND_S = 20.0
"""I5: the time-outs of a call's phases and its retries, added up. What its own process stood still is not counted."""
READS = ("state", "workers", "weight_version", "updates", "ready", "describe")
UPDATES = (
    "new_run",
    "update_weights",
    "complete_weights_update",
    "prepare_weights_update",
    "receive_weights_part",
    "abort_weights_update",
)


async def call(
    world: World,
    by: Coordinator,
    op: str,
    body: Mapping[str, Any],
    name: str = "",
    request_id: str = "",
    wrong: str = "",
) -> dict[str, Any] | None:
    """Returns the reply, or None for an error, which the checks get. `wrong`: the reason why the reply can't be
    accepted."""
    checks = world.checks
    record = CallRecord(by.process, op, dict(body), name, world.loop.now, len(checks.decided), len(checks.done))
    record.shared, record.wrong = bool(request_id), wrong
    world.calls.append(record)
    CALL.set(record)
    ASKED_BY.set("")  # no notice is sent: a further message would make each seed another run
    stood_still = by.process.stood_still_s
    if op == "release_memory":
        world.memory_at = world.loop.now
    if body.get("action") == "reset_tensors":
        world.reset_at = world.loop.now
    bound_s = UPDATE_BOUND_S if op in UPDATES else READ_BOUND_S if op in READS else CHANGE_BOUND_S
    try:
        async with asyncio.timeout(bound_s + 60.0):
            reply = await by.run(op, dict(body), request_id)
        outcome, facts = "ok", reply
    except TimeoutError:
        world.checks.fail("I5", f"{op} {name} does not end")
        return None
    except PlaneError as error:
        outcome, facts = error.code, error.facts
        world.say(f"{op} {name}: {error.code} {error.message[:100]}")
    except Exception as error:
        world.checks.fail("I5", f"{op} {name} ends with {type(error).__name__}: {error}")
        return None
    took_s = world.loop.now - record.began_at - (by.process.stood_still_s - stood_still)
    if took_s > bound_s:
        world.checks.fail("I5", f"{op} {name} took {took_s:.1f} s")
    world.checks.answers.answered(record, outcome, facts)
    if outcome != "ok":
        world.refused += op in UPDATES
        return None
    world.committed += op in ("update_weights", "complete_weights_update")
    if op not in READS:
        world.say(f"{op} {name}: ok" + (f", excluded {reply['excluded']}" if reply.get("excluded") else ""))
    return reply
