"""Updates the fleet. In the middle of one update a script outside kills a worker (deploy/smoke_with_kill.sh)."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from deploy.smoke.checks import SmokeFailed, expect
from deploy.smoke.fleet import Fleet, Json

KILL_S = 90.0
"""The bound of the wait for the kill: less than the 120 s after which the fleet drops a prepared update."""
KILL_POLL_S = 0.1
LEASE_S = 300.0
"""The fleet resumes by itself if this process dies while the fleet is paused."""
KILL_NOW = f"kill a worker now ({KILL_S:g} s)"
"""Scripts wait for this text: deploy/smoke_with_kill.sh."""


class Kill:
    """Waits once, in the middle of an update, until a worker has died. It does so only if it is `wanted`."""

    def __init__(self, fleet: Fleet, say: Callable[[str], None], wanted: bool) -> None:
        self.pending = wanted
        self._fleet = fleet
        self._say = say

    def wait(self, where: str) -> None:
        self.pending = False
        before = self._fleet.members()
        self._say(f"{where}: {KILL_NOW}")
        give_up = time.monotonic() + KILL_S
        while time.monotonic() < give_up:
            now = self._fleet.members()
            if dead := [one for one, incarnation in before.items() if now.get(one) != incarnation]:
                self._say(f"{', '.join(dead)} is dead, {len(now)} of {len(before)} workers are left")
                return
            time.sleep(KILL_POLL_S)
        raise SmokeFailed(f"no worker was killed within {KILL_S:g} s")


class Updates:
    """Sends updates to the whole fleet."""

    def __init__(self, fleet: Fleet, kill: Kill, say: Callable[[str], None]) -> None:
        self._fleet, self._kill, self._say = fleet, kill, say

    def apply(self, body: Json, may_die: bool = False) -> Json:
        """Runs an update that must reach every worker, and returns the committed version.

        `may_die`: a worker may be killed between the two halves of this update. The fleet must undo the update, or
        commit it without that worker. It must heal by itself. Then an update that was undone is sent again.
        """
        reply = self._interrupted(body) if may_die and self._kill.pending else None
        if reply is None:
            reply = self._fleet.rl("update_weights", body)
            told = [row["status"] for row in reply["workers"]]
            expect(told == ["ok"] * self._fleet.workers, "every worker updated", reply)
        version: Json = reply["version"]
        digest = body.get("digest")
        expect(digest in (None, version["digest"]), f"the digest {digest}", version)
        return version

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pauses the whole fleet meanwhile, as trainers do around an update. Its requests freeze."""
        self._fleet.rl("pause", {"mode": "keep", "lease_s": LEASE_S})
        try:
            self._check_pause("paused")
            yield
            self._check_pause("paused")  # a new process of a worker, too
        finally:
            self._fleet.rl("resume", {})
        self._check_pause("running")

    def _check_pause(self, wanted: str) -> None:
        state = self._fleet.rl("state")
        expect(state["pause_state"] == wanted, f"the whole fleet {wanted}", state)

    def _interrupted(self, body: Json) -> Json | None:
        """Prepares an update, waits for the kill, and completes it. Returns None if the update was undone."""
        before = self._fleet.rl("weight_version")
        prepared = self._fleet.rl("prepare_weights_update", body)
        update = {"update_id": prepared["update_id"]}
        try:
            expect(prepared["ready"], "every worker has staged the weights", prepared)
            self._kill.wait("every worker has staged the new weights, none serves them")
        except SmokeFailed:
            self._fleet.rl("abort_weights_update", update)  # or it would be in the way of the next run
            raise
        status, reply = self._complete(update)
        if status == 503:  # no worker is left that could answer, and the update still waits
            self._say(f"not completed yet: {reply['error']['message']}")
            self._fleet.wait_members()
            status, reply = self._complete(update)
        if status == 200:
            self._say(f"committed without {reply['excluded']}")
            self._fleet.wait_ready()
            return reply
        told = f"HTTP {status} {json.dumps(reply)}"
        expect(status == 409, "HTTP 200 or 409 from complete_weights_update", told)
        self._say(f"undone: {reply['error']['message']}")
        self._fleet.check_version(before["version"])
        held = self._fleet.rl("weight_version")["adapters"]
        expect(held == before["adapters"], f"the adapters {before['adapters']}", held)
        held_labels = [one["label"] for one in (before["version"], *held.values())]
        self._say(f"the worker is back, and all {self._fleet.workers} hold {', '.join(held_labels)}")
        return None

    def _complete(self, update: Json) -> tuple[int, Json]:
        return self._fleet.call(self._fleet.rl_url, "/v1/rl/complete_weights_update", update)


def base_update(path: Path, label: str, digest: str | None = None) -> Json:
    """Returns the body of an update of the base by a checkpoint's directory."""
    body: Json = {"transport": {"backend": "filesystem", "path": str(path)}, "version": label}
    return body if digest is None else {**body, "digest": digest}


def adapter_update(op: str, name: str, path: Path, label: str, digest: str) -> Json:
    """Returns the body of an update that loads or swaps an adapter by a PEFT directory."""
    return {**base_update(path, label, digest), "target": {"kind": "lora", "op": op, "name": name}}
