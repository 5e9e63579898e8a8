"""Asks any of several workers for something that each of them can answer, such as its tokenizer."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from frontend.routing.fleet_status import FleetStatus
from rl_plane.client import RlClient
from rl_plane.errors import (
    DeadlineExceeded,
    EngineFailed,
    NotFound,
    NoWorkers,
    PlaneError,
    Unavailable,
    WorkerLost,
    WrongIncarnation,
)
from rl_plane.membership.core import Member

MAX_ASKED = 3
"""The most workers that the frontend asks, one after another, if each dies or leaves before it answers."""


async def ask_any(
    client: RlClient, status: FleetStatus, members: Sequence[Member], op: str, body: dict[str, Any]
) -> dict[str, Any]:
    """Returns the reply of one of the members. If all fail, it raises the error of the last member. It asks open
    members first, because a member that hangs or loads costs the op's whole time-out."""
    admitted = status.admitted()
    shuffled = random.sample(members, len(members))
    shuffled.sort(key=lambda member: member.instance_id not in admitted)
    last: PlaneError = NoWorkers("no worker is there", fix="start one: `rl-plane worker`", retry_after_s=1.0)
    for member in shuffled[:MAX_ASKED]:
        try:
            row = await client.call(member.instance_id, op, body)
        except (Unavailable, DeadlineExceeded, EngineFailed) as error:
            last = error
        except (NotFound, WrongIncarnation):
            last = WorkerLost("the worker left just now", instance_id=member.instance_id, retry_after_s=1.0)
        else:
            return dict(row.body)
    raise last
