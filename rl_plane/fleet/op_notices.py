"""Reports the changing ops that a process carries out for itself to the frontends, whose events show them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import nats.errors

from rl_plane.errors import PlaneError
from rl_plane.membership.worker_calls import WorkerCalls
from rl_plane.protocol.op_notice import MAX_CHARS, OpNotice


@asynccontextmanager
async def noticed(client: WorkerCalls, op: str, components: Sequence[str]) -> AsyncIterator[None]:
    """Reports the end of the op that the block carries out, to the frontends of each component."""
    outcome = "cancelled"
    try:
        yield
        outcome = "ok"
    except PlaneError as error:
        outcome = error.code
        raise
    finally:
        key = client.bus.login.public or ""
        notice = OpNotice(op=op, who=client.owner[:MAX_CHARS], key=key, outcome=outcome).encode()
        for component in components:
            # A notice is news. What has happened is in the record and in the history.
            with contextlib.suppress(nats.errors.Error):
                await client.bus.nc.publish(client.subjects(component).op_notices, notice)
