"""The HTTP dialects that trainers' clients speak, on the facade's listener: each a translation to the fleet's ops.

A dialect is a module with `mount(app, plane)`. See docs/dialects.md.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass

from fastapi import FastAPI

from frontend.calls import FleetCalls
from frontend.generation import Generation
from rl_plane.view import MembershipView

MODULES = {
    "vllm": "frontend.dialects.vllm",
    "sglang": "frontend.dialects.sglang",
    "prime-rl": "frontend.dialects.prime_rl",
}


@dataclass(frozen=True)
class DialectPlane:
    """What a dialect speaks for."""

    calls: FleetCalls
    view: MembershipView
    generation: Generation
    feed_timeout_s: float
    """Of the tensors of one call, where its dialect has no word for it."""


def mount_dialects(app: FastAPI, names: Iterable[str], plane: DialectPlane) -> None:
    """In the order of the table, whatever order they were named in."""
    wanted = set(names)
    for name, module in MODULES.items():
        if name in wanted:
            importlib.import_module(module).mount(app, plane)
