"""Ends an update whose coordinator holds the lock: another process writes a key, which the coordinator reads.

The coordinator reads it only while workers receive, beside the call that it waits for. So it delays nothing, and after
the decision nothing reads it.
"""

from __future__ import annotations

import asyncio
import json
import logging

from rl_plane.bus.connection import Bus
from rl_plane.bus.entries import decoded
from rl_plane.errors import BusUnreachable, UpdateAborted
from rl_plane.protocol.subjects import CANCEL, KeyValueBucket

log = logging.getLogger("rl_plane.commit.cancellation")

LOOK_S = 0.5
"""The interval at which a coordinator reads the key. An operator waits this long at most."""
CANCEL_TTL_S = 60
"""Longer than the coordinator of a busy machine needs to read it."""


def aborted_by(who: str) -> UpdateAborted:
    """The error of an update that a person or a trainer has ended. `who`: such as `an operator on host a`."""
    return UpdateAborted(
        f"aborted by {who}", field="update_id", fix="begin another update, if its weights are still wanted"
    )


async def write_cancellation(bus: Bus, state: KeyValueBucket, update_id: str, who: str) -> None:
    """Tells the coordinator of the update to end it. This needs no lock: before the decision an update can always
    end."""
    value = json.dumps({"update_id": update_id, "by": who}).encode()
    await bus.put(state, CANCEL, value, ttl_s=CANCEL_TTL_S)


async def cancelled(bus: Bus, state: KeyValueBucket, update_id: str) -> UpdateAborted:
    """Waits until the update is to end, and returns its error."""
    while True:
        await asyncio.sleep(LOOK_S)
        try:
            found = decoded(await bus.get(state, CANCEL), _decode)
        except BusUnreachable as error:
            log.debug("the store does not say whether %s is to end: %s", update_id, error)
            continue
        if found is not None and found[0] == update_id:
            return aborted_by(found[1])


def _decode(value: bytes) -> tuple[str, str]:
    wire = json.loads(value)
    if not isinstance(wire["update_id"], str) or not isinstance(wire["by"], str):
        raise TypeError(f"the cancellation is {value[:80]!r}")
    return wire["update_id"], wire["by"]
