"""The HTTP dialects that trainers' clients speak, on the facade's listener: each a translation to the fleet's ops.

A dialect is a module with `mount(app, plane)`. See docs/dialects.md.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI

from frontend.completions.completion_routes import Generation
from frontend.facade.calls import FleetCalls
from rl_plane.fleet.fleet import Fleet
from rl_plane.membership.view import MembershipView
from rl_plane.protocol.fleet_ops import FLEET_OPS

MODULES = {
    "vllm": "frontend.dialects.vllm.vllm_routes",
    "sglang": "frontend.dialects.sglang.sglang_routes",
    "prime-rl": "frontend.dialects.prime_rl",
}


class DialectCalls:
    """The frontend's calls, as dialects make them: weights of another float dtype are cast, which the engines' own
    servers do without a word, and which no trainer's client can ask for. The worker's log tells of it."""

    def __init__(self, calls: FleetCalls) -> None:
        self._calls = calls

    @property
    def fleet(self) -> Fleet:
        return self._calls.fleet

    async def run(
        self, op: str, body: dict[str, Any], request_id: str = "", digest: str | None = None
    ) -> dict[str, Any]:
        """As `FleetCalls.run`."""
        if FLEET_OPS[op].brings_weights and "rollback" not in body:  # that is cast as it was
            body = {**body, "cast": True}
        return await self._calls.run(op, body, request_id, digest)


@dataclass(frozen=True)
class DialectPlane:
    """What a dialect speaks for."""

    calls: DialectCalls
    view: MembershipView
    generation: Generation
    part_timeout_s: float
    """Of the tensors of one call, where its dialect has no word for it."""


def mount_dialects(app: FastAPI, names: Iterable[str], plane: DialectPlane) -> None:
    """In the order of the table, whatever order they were named in."""
    wanted = set(names)
    for name, module in MODULES.items():
        if name in wanted:
            importlib.import_module(module).mount(app, plane)
