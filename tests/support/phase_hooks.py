"""Holds a changing op of a worker at a phase boundary, so that a test can kill a process there.

A worker of `tests.support.worker_main` or `tests.kill.held_main` has called `install`. It holds no op unless
`RL_PLANE_TEST_HOLD_DIR` names a directory. A file `<point>` or `<point>.<instance_id>` in it
holds the ops that reach the point, while the file exists. If the file has a text, it holds only the update with that
id.

The points are `<op>.before` (the handler has not begun) and `<op>.after` (it is done, but the answer is not sent). The
op `follow_record` is called `gate` if its record is not open yet, and `open` if it is.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Mapping
from pathlib import Path
from typing import Any

from rl_plane.protocol.worker_ops import OPS
from worker.ops.contract import Handler
from worker.ops.handlers import OpHandlers

Handlers = Mapping[str, Handler]
"""Op → its handler."""

log = logging.getLogger("tests.support.phase_hooks")

VARIABLE = "RL_PLANE_TEST_HOLD_DIR"
POLL_S = 0.01
MAX_HOLD_S = 60.0
"""An op waits no longer than this: a test may die and leave its file."""


def install() -> None:
    """Lets tests hold the ops of the workers that this process makes."""
    table = OpHandlers.table

    def held_table(self: OpHandlers) -> dict[str, Handler]:
        return dict(with_holds(table(self), self.core.state.instance_id))

    OpHandlers.table = held_table  # type: ignore[method-assign]


def with_holds(handlers: Handlers, instance_id: str) -> Handlers:
    """Returns handlers that wait where the test says, or these handlers if no test says so."""
    directory = os.environ.get(VARIABLE)
    if not directory:
        return handlers
    return {
        op: _held(Path(directory), op, handler, instance_id) if OPS[op].changes else handler
        for op, handler in handlers.items()
    }


def _held(directory: Path, op: str, handler: Handler, instance_id: str) -> Handler:
    async def handle(body: Any, fence: int) -> Mapping[str, Any]:
        point, update_id = _point(op, body), _update_id(body)
        await _hold(directory, f"{point}.before", instance_id, update_id)
        outcome = handler(body, fence)
        outcome = await outcome if isinstance(outcome, Awaitable) else outcome
        await _hold(directory, f"{point}.after", instance_id, update_id)
        return outcome

    return handle


def _point(op: str, body: Any) -> str:
    if op == "follow_record":
        return "open" if body.record.open else "gate"
    return op


def _update_id(body: Any) -> str:
    record = getattr(body, "record", None)
    return str(getattr(record or body, "update_id", None) or "")


def _holds(file: Path, update_id: str) -> bool:
    try:
        return file.read_text() in ("", update_id)
    except FileNotFoundError:
        return False


async def _hold(directory: Path, point: str, instance_id: str, update_id: str) -> None:
    files = (directory / point, directory / f"{point}.{instance_id}")
    if not any(_holds(file, update_id) for file in files):
        return
    log.warning("%s waits at %s", instance_id, point)
    (directory / f"reached.{point}.{instance_id}").touch()
    give_up = time.monotonic() + MAX_HOLD_S
    while any(_holds(file, update_id) for file in files):
        if time.monotonic() > give_up:
            log.warning("%s gives up its wait at %s", instance_id, point)
            return
        await asyncio.sleep(POLL_S)
