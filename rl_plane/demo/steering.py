"""Steering the fleet through `/v1/rl/*`: pause, update_weights, resume."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl_plane.demo.http_json import call_json
from rl_plane.errors import Conflict, DeadlineExceeded, PlaneError, Unavailable

CALL_TIMEOUT_S = 20.0
"""An update of the tiny model takes a tenth of a second; a death in the middle of it a few seconds."""
ATTEMPTS = 4
"""A call that a joining or dying worker undid has changed nothing: it is repeated, but not for ever."""
PAUSE_S = 0.3
READY_POLL_S = 0.2
PAUSE_LEASE_S = 60.0
"""If this trainer dies the fleet goes on by itself after a minute."""


@dataclass(frozen=True, slots=True)
class Published:
    """What an update was answered with."""

    version: dict[str, Any]
    """The committed version."""
    workers: int
    """How many took it."""
    canary_difference: float | None
    """The largest difference between the engines' log probabilities and the trainer's. None: no engine scored."""
    mismatch_kl: float | None


@dataclass(slots=True)
class Steering:
    url: str
    """Of the facade, without a path."""
    post: Callable[[str, dict[str, Any] | None, float, str], dict[str, Any]] = call_json
    repeats: int = field(default=0, init=False)
    """Calls that had to be made again."""

    def wait_ready(self, workers: int, timeout_s: float) -> None:
        """Until so many workers serve the committed version."""
        give_up = time.monotonic() + timeout_s
        while True:
            try:
                self.post(f"{self.url}/v1/rl/ready?min_workers={workers}&wait_s=1", None, CALL_TIMEOUT_S, "")
                return
            except (Unavailable, DeadlineExceeded) as error:
                if time.monotonic() > give_up:
                    raise DeadlineExceeded(
                        f"{workers} workers were not ready in {timeout_s:g} s: {error}"
                    ) from error
            time.sleep(READY_POLL_S)

    def version(self) -> dict[str, Any]:
        """The committed one: `run`, `sequence`, `label`, `digest`."""
        version = self.post(f"{self.url}/v1/rl/weight_version", None, CALL_TIMEOUT_S, "")["version"]
        if version is None:
            raise PlaneError("the fleet has no version yet")
        return dict(version)

    def publish(self, path: Path, label: str, digest: str, canary: dict[str, Any]) -> Published:
        """`canary`: what the trainer's own model computes with these weights."""
        self._call("pause", {"mode": "keep", "lease_s": PAUSE_LEASE_S})
        transport = {"backend": "filesystem", "path": str(path)}
        body = {"transport": transport, "version": label, "digest": digest, "policy": {"canary": canary}}
        reply = self._call("update_weights", body)
        self._call("resume", {})
        version = reply["version"]
        if (version["label"], version["digest"]) != (label, digest):
            raise PlaneError(
                f"published {label} {digest}, but {version['label']} {version['digest']} is committed"
            )
        workers = sum(row["status"] == "ok" for row in reply["workers"])
        shown = reply.get("canary") or {}
        return Published(dict(version), workers, shown.get("difference"), shown.get("mismatch_kl"))

    def _call(self, op: str, body: dict[str, Any]) -> dict[str, Any]:
        url, key = f"{self.url}/v1/rl/{op}", uuid.uuid4().hex
        for _ in range(ATTEMPTS - 1):
            try:
                return self.post(url, body, CALL_TIMEOUT_S, key)
            except Conflict:
                key = uuid.uuid4().hex  # it was undone: this will be another one
            except Unavailable:
                pass  # it may have been done, with the answer lost: the key tells
            self.repeats += 1
            time.sleep(PAUSE_S)
        return self.post(url, body, CALL_TIMEOUT_S, key)
