"""The services that dialects use: the fleet's calls, its members, and the generation service."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from frontend.completions.service import Generation
from frontend.facade.op_runner import OpRunner
from rl_plane.bus.connection import Bus
from rl_plane.bus.state_store import read_session
from rl_plane.errors import BusUnreachable, Locked, PlaneError
from rl_plane.fleet.fleet import Fleet
from rl_plane.membership.view import MembershipView
from rl_plane.protocol.fleet_ops import FLEET_OPS
from rl_plane.protocol.record import UpdateSession
from rl_plane.protocol.subjects import KeyValueBucket


class DialectCalls:
    """The frontend's calls as dialects make them: weights of another float dtype are cast. The engines' own servers
    cast without a word, and no trainer's client can ask for it. The worker's log says so."""

    def __init__(self, calls: OpRunner) -> None:
        self._calls = calls

    @property
    def fleet(self) -> Fleet:
        return self._calls.fleet

    async def run(
        self, op: str, body: dict[str, Any], request_id: str = "", digest: str | None = None
    ) -> dict[str, Any]:
        """Runs an op, with the arguments of `OpRunner.run`."""
        if FLEET_OPS[op].brings_weights and "rollback" not in body:  # a roll-back is cast as its update was
            body = {**body, "cast": True}
        return await self._calls.run(op, body, request_id, digest)


@dataclass(frozen=True)
class DialectContext:
    """The services that the routes of a dialect use."""

    calls: DialectCalls
    view: MembershipView
    generation: Generation
    part_timeout_s: float
    """The time for the tensors of one call, where the dialect has no field for it."""

    @property
    def session_idle_s(self) -> float:
        """An update that a trainer has begun ends if the trainer is silent for this long."""
        return self.generation.limits.session_idle_s

    @property
    def bus(self) -> Bus:
        return self.calls.fleet.client.bus

    @property
    def state(self) -> KeyValueBucket:
        return self.view.subjects.state

    async def session(self, owner: str) -> UpdateSession | None:
        """The fleet's session, if it is an update of this owner that waits for its parts or its end."""
        session = await read_session(self.bus, self.state)
        return session if session is not None and session.owner == owner else None

    async def abort(self, update_id: str) -> None:
        """Drops a prepared update, unless it has ended already. Raises Locked or BusUnreachable if the update stands,
        and cannot be dropped now."""
        try:
            await self.calls.run("abort_weights_update", {"update_id": update_id})
        except (Locked, BusUnreachable):
            raise
        except PlaneError:
            pass  # the update has ended already
