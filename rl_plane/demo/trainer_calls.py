"""Steers the fleet for the demo's trainer, through a frontend."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl_plane.errors import Conflict, DeadlineExceeded, PlaneError, Unavailable
from rl_plane.fleet.http_client import call_facade

CALL_TIMEOUT_S = 20.0
"""An update of the tiny model takes a tenth of a second; a worker's death in the middle adds a few seconds."""
ATTEMPTS = 4
"""A call that a joining or dying worker has undone changed nothing. It is repeated, but not for ever."""
PAUSE_S = 0.3
READY_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class Published:
    """The outcome of one update."""

    version: dict[str, Any]
    """The committed version."""
    workers: int
    """The number of workers that took it."""
    canary_difference: float | None
    """The largest difference between the engines' log probabilities and the trainer's. None: no engine scored."""
    mismatch_kl: float | None


@dataclass(slots=True)
class Steering:
    """Waits for workers, reads the version, and publishes checkpoints."""

    url: str
    """The frontend's address."""
    call: Callable[[str, str | None, str, Mapping[str, Any], float, str], dict[str, Any]] = call_facade
    repeats: int = field(default=0, init=False)
    """The number of calls that were repeated."""

    def wait_ready(self, workers: int, timeout_s: float) -> None:
        """Waits until so many workers serve the committed version."""
        give_up = time.monotonic() + timeout_s
        while True:
            try:
                self._ask("ready", {"min_workers": workers, "wait_s": 1})
                return
            except (Unavailable, DeadlineExceeded) as error:
                if time.monotonic() > give_up:
                    raise DeadlineExceeded(
                        f"{workers} workers were not ready in {timeout_s:g} s: {error}"
                    ) from error
            time.sleep(READY_POLL_S)

    def version(self) -> dict[str, Any]:
        """The committed version: `run`, `sequence`, `label`, `digest`."""
        version = self._ask("weight_version", {})["version"]
        if version is None:
            raise PlaneError("the fleet has no version yet")
        return dict(version)

    def publish(self, path: Path, label: str, digest: str, canary: dict[str, Any]) -> Published:
        """Commits a checkpoint. `canary`: what the trainer's own model computes with these weights."""
        transport = {"backend": "filesystem", "path": str(path)}
        body = {"transport": transport, "version": label, "digest": digest, "policy": {"canary": canary}}
        reply = self._change("update_weights", body)
        version = reply["version"]
        if (version["label"], version["digest"]) != (label, digest):
            raise PlaneError(
                f"published {label} {digest}, but {version['label']} {version['digest']} is committed"
            )
        workers = sum(row["status"] == "ok" for row in reply["workers"])
        shown = reply.get("canary") or {}
        return Published(dict(version), workers, shown.get("difference"), shown.get("mismatch_kl"))

    def _ask(self, op: str, body: dict[str, Any], request_id: str = "") -> dict[str, Any]:
        return self.call(self.url, None, op, body, CALL_TIMEOUT_S, request_id)

    def _change(self, op: str, body: dict[str, Any]) -> dict[str, Any]:
        request_id = uuid.uuid4().hex
        for _ in range(ATTEMPTS - 1):
            try:
                return self._ask(op, body, request_id)
            except Conflict:
                request_id = uuid.uuid4().hex  # the update was undone; the next one is another update
            except Unavailable:
                pass  # the update may be done and its answer lost: the same id asks for that answer
            self.repeats += 1
            time.sleep(PAUSE_S)
        return self._ask(op, body, request_id)
