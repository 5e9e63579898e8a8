"""Runs the fleet's ops for HTTP and NATS. Equal calls under way become one."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

from frontend.server.in_flight import InFlight
from rl_plane.errors import PlaneError, Unavailable
from rl_plane.fleet.fleet import Fleet
from rl_plane.fleet.fleet_call import ASKED_BY, CALLED_FROM
from rl_plane.protocol.fleet_ops import FLEET_OPS

log = logging.getLogger("frontend.facade.op_runner")

MAX_IN_FLIGHT = 64
"""Different updates that hold the lock or wait for it; more come from a trainer that has gone wrong."""


class OpRunner:
    """Runs the ops of a Fleet."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.on_op: Callable[[str, str, str, list[str]], None] = lambda op, asked_by, outcome, components: None
        """Called after each changing op with its name, whose key asked (`FleetCall.asked_by`), ok or the error's code,
        and the components that the caller has named."""
        self._in_flight: InFlight[dict[str, Any]] = InFlight(MAX_IN_FLIGHT, log)
        self._is_leaving = False

    def leave(self) -> None:
        """From now on it refuses each call that begins an update. Other calls let what runs come to its end."""
        self._is_leaving = True

    async def run(
        self, op: str, body: dict[str, Any], request_id: str = "", digest: str | None = None
    ) -> dict[str, Any]:
        """The merged reply. Equal calls share it: calls of one request id or, without an id, of one body.

        `digest`: a hash of the body's lists, where they may be long. Writing them out to compare them would block every
        other call."""
        if op not in FLEET_OPS or FLEET_OPS[op].method == "GET":
            return await self.fleet.run(op, body, request_id)
        outcome = "cancelled"
        try:
            reply = await self._change(op, body, request_id, digest)
            outcome = "ok"
            return reply
        except PlaneError as error:
            outcome = error.code
            raise
        finally:
            asked_by = ASKED_BY.get() or ""
            key = f"the key {asked_by}" if asked_by else "no key"
            log.info("%s, asked by %s with %s: %s", op, CALLED_FROM.get() or "this process", key, outcome)
            self.on_op(op, asked_by, outcome, _named_in(body))

    async def _change(self, op: str, body: dict[str, Any], request_id: str, digest: str | None) -> dict[str, Any]:
        if not FLEET_OPS[op].coalesce:
            self._check_stays(op)
            return await self.fleet.run(op, body, request_id)
        short = body if digest is None else {name: one for name, one in body.items() if not isinstance(one, list)}
        content = json.dumps([short, digest], sort_keys=True, default=str)
        if not self._in_flight.has(op, request_id, content):
            self._check_stays(op)
        return await self._in_flight.share(op, request_id, content, lambda: self.fleet.run(op, body, request_id))

    def _check_stays(self, op: str) -> None:
        if self._is_leaving and FLEET_OPS[op].begins_update:
            raise Unavailable("this frontend is shutting down", fix="ask another one", retry_after_s=1.0)

    async def close(self, grace_s: float) -> None:
        """Waits for the calls under way, then cancels the rest. The next coordinator continues those."""
        await self._in_flight.close(grace_s)


def _named_in(body: dict[str, Any]) -> list[str]:
    """The components that a body names, each once. The body may be malformed."""
    given = body.get("component")
    names = given.split(",") if isinstance(given, str) else given if isinstance(given, list) else []
    return list(dict.fromkeys(name for name in names if isinstance(name, str)))
