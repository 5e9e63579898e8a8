"""Finds the update that runs, and says how far it is and what it waits for.

The lock, the session and the history have all of it, so any process can tell, also while the coordinator hangs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from rl_plane.bus.connection import Bus
from rl_plane.bus.lock import Holder, read_holder
from rl_plane.bus.state_store import read_session
from rl_plane.commit.history import UpdateEntry, read_entry
from rl_plane.membership.worker_reply import WorkerReply
from rl_plane.protocol.fleet_reply_types import RunningUpdate
from rl_plane.protocol.record import UpdateSession
from rl_plane.protocol.subjects import KeyValueBucket

WAITS_FOR = {
    "survey": "the workers' reports of the committed version",
    "clear": "the workers to drop what a silent trainer has left",
    "begin": "the store",
    "prepare": "the workers, which receive it",
    "receive": "the trainer's next tensors",
    "recheck": "the store",
    "abort": "the workers to drop it",
    "session": "the store",
    "decide": "the store",
    "resolve": "the workers' reports of the committed version",
    "pause": "the store",
    "gate": "the workers and frontends to learn the decision",
    "commit": "the workers to swap",
    "roll": "the next worker to swap",
    "leases": "processes that are silent, until they can't serve any more",
    "open": "the workers and frontends to learn that it may be served",
    "watch": "the workers to serve it",
}
"""Phase → the thing that the update waits for, unless the workers' own words say more."""
BEFORE_DECISION = frozenset({"survey", "begin", "prepare", "receive"})
"""The phases in which the workers' own words say more."""
WAITS_FOR_TRAINER = "the trainer's next call (complete_weights_update or abort_weights_update)"


async def read_running(bus: Bus, state: KeyValueBucket) -> RunningUpdate | None:
    """Reads the update that runs, without what the workers report of it. None: no update runs."""
    holder, session = await asyncio.gather(read_holder(bus, state), read_session(bus, state))
    update_id = str(holder.get("update_id", "")) if holder is not None else ""
    if not update_id:
        holder = None  # a call that is no update holds the lock
        update_id = session.update_id if session is not None else ""
    if not update_id:
        return None
    entry = await read_entry(bus, state, update_id)
    if entry is not None and entry.final and holder is None:
        return None
    return running(update_id, holder, session, entry, time.time())


def running(
    update_id: str,
    holder: Holder | None,
    session: UpdateSession | None,
    entry: UpdateEntry | None,
    now: float,
) -> RunningUpdate:
    """The running update, from what the store has of it. `now`: Unix seconds."""
    known = entry or UpdateEntry(update_id, session.label if session is not None else "", "running")
    waits = session if holder is None and session is not None else None
    phase = str(holder.get("phase", "survey")) if holder is not None else ""
    began_ms, bound_ms = (None, None) if holder is None else map(holder.get, ("phase_began_ms", "phase_bound_ms"))
    if waits is not None:
        phase = "receive" if waits.listening else "prepared"
    return RunningUpdate(
        update_id=update_id,
        label=known.label,
        phase=phase,
        caller=known.caller,
        asked_by=known.asked_by,
        who=str(holder["owner"]) if holder is not None else known.who,
        transport=(known.transport or {}).get("backend"),
        began_at=known.began_at,
        elapsed_s=max(0.0, now - known.began_at) if known.began_at is not None else 0.0,
        in_phase_s=max(0.0, now - int(began_ms) / 1000) if began_ms is not None else None,
        deadline_in_s=int(bound_ms) / 1000 - now if bound_ms is not None else None,
        idle_limit_s=float(waits.idle_s) if waits is not None else None,
        waits_for=WAITS_FOR_TRAINER if waits is not None else WAITS_FOR.get(phase, phase),
        workers=0,
        bytes=0,
        total_bytes=0,
        bytes_per_s=0.0,
        since_progress_s=None,
    )


def with_workers(update: RunningUpdate, rows: Sequence[WorkerReply]) -> RunningUpdate:
    """The running update with the sums of the workers' reports. `rows`: their answers to the op `state`."""
    states = [row.body.get("update") for row in rows if row.status == "ok"]
    mine: list[dict[str, Any]] = [
        one for one in states if one is not None and one["update_id"] == update["update_id"]
    ]
    behind = [one for one in mine if one["total_bytes"] is None or one["bytes"] < one["total_bytes"]]
    slowest = max(behind, key=lambda one: float(one["since_progress_s"]), default=None)
    waits_for = update["waits_for"]
    if slowest is not None and update["phase"] in BEFORE_DECISION:
        waits_for = f"{slowest['waits_for']}, since {slowest['since_progress_s']:.0f} s"
        waits_for += f" ({len(behind)} of {len(mine)} workers)" if len(mine) > 1 else ""
    return {
        **update,
        "waits_for": waits_for,
        "workers": len(mine),
        "bytes": sum(one["bytes"] for one in mine),
        "total_bytes": sum(one["total_bytes"] or 0 for one in mine),
        "bytes_per_s": sum(one["bytes_per_s"] or 0.0 for one in mine),
        "since_progress_s": float(slowest["since_progress_s"]) if slowest is not None else None,
    }
