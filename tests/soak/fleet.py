"""nats-server, two frontends and the workers, each a process of its own that a supervisor brings back."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.soak.checker import Version, Weights
from tests.soak.probe import VARIABLE as COUNTS_DIR
from tests.support.kept_fleet import KeptFleet, Slow

FRONTENDS = 2
WHOLE_S = 120.0
"""The bound in seconds after the last kill: a worker imports torch, builds its engine and fetches the committed
version."""
IDLE_S = 20.0
"""Twice what a worker waits for a frontend that is gone, until it aborts its requests."""
CALL_S = 60.0
"""The bound in seconds for an update during kills."""
COUNT_S = 10.0
"""The bound in seconds for a process to count its tasks."""
EXCUSE_S = 3.0
"""The seconds after a restart in which a client may still get an error because of the death."""
POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer that the caller of an op got."""

    status: int | None
    """None: the connection was lost."""
    body: dict[str, Any]

    @property
    def error(self) -> dict[str, Any]:
        found: dict[str, Any] = self.body.get("error", {})
        return found

    @property
    def code(self) -> str:
        return "ok" if self.status == 200 else str(self.error.get("code", "lost"))

    def __str__(self) -> str:
        return f"{self.status} {self.code} {self.error.get('message', '')}".strip()


@dataclass(frozen=True, slots=True)
class Counts:
    """The resources of one process while nothing runs."""

    descriptors: int
    tasks: int
    threads: int


@dataclass(slots=True)
class Outage:
    """The time without a process that was killed."""

    name: str
    since: float
    until: float = float("inf")


class Broken(Exception):
    """The fleet is not as it should be."""


class SoakFleet(KeptFleet):
    def __init__(self, tmp: Path, engines: Sequence[str], model: Path, weights: Path) -> None:
        (tmp / "counts").mkdir()
        super().__init__(tmp, "tests.soak.probe", {COUNTS_DIR: str(tmp / "counts")}, "soak", with_nats=False)
        self.outages: list[Outage] = []
        self.committed: dict[tuple[str | None, Version], Weights] = {}
        """(adapter, version) → its weights, as the history shows it."""
        self.engines = engines
        self.worker_ids = [secrets.token_hex(8) for _ in engines]
        self.frontends = [f"frontend-{number}" for number in range(FRONTENDS)]
        self._model = ("--model", str(model), "--weight-root", str(weights))
        self._http = httpx.AsyncClient(timeout=httpx.Timeout(CALL_S), trust_env=False)

    # ---- its life ----

    async def start(self) -> None:
        self.start_nats()
        for name in self.frontends:
            self.keep_frontend(name)
        for instance_id, engine in zip(self.worker_ids, self.engines, strict=True):
            flags = ("--engine", engine, "--device", "cpu", *_ENGINE_FLAGS.get(engine, ()))
            self.keep_worker(instance_id, *self._model, *flags)
        try:
            await self.ready()
        except Slow as slow:
            raise Broken(str(slow)) from None
        await self.whole()
        await self.learn_committed()

    async def close(self) -> None:
        await self._http.aclose()
        await super().close()

    def back(self, name: str) -> None:
        for outage in self.outages:
            if outage.name == name and outage.until == float("inf"):
                outage.until = time.monotonic()

    # ---- its processes ----

    def kill(self, name: str) -> None:
        self.note(f"the soak kills {name}")
        self.outages.append(Outage(name, time.monotonic()))
        with suppress(ProcessLookupError):  # it has not started again after its last death
            os.kill(self.pid(name), signal.SIGKILL)

    def is_down(self, name: str) -> bool:
        return any(one.name == name and one.until == float("inf") for one in self.outages)

    def was_down(self, frontend: int | None, since: float) -> bool:
        """Returns True if this frontend, or for None any worker, was down after `since`, or had just returned then."""
        names = self.worker_ids if frontend is None else [self.frontends[frontend]]
        return any(one.name in names and one.until + EXCUSE_S > since for one in self.outages)

    async def counts(self) -> dict[str, Counts]:
        """Returns the resources of each process of the plane, by its name."""
        return {name: await self._counts(name) for name in self.names}

    async def _counts(self, name: str) -> Counts:
        process = psutil.Process(self.pid(name))
        file = self.tmp / "counts" / str(process.pid)
        file.unlink(missing_ok=True)
        process.send_signal(signal.SIGUSR1)
        give_up = time.monotonic() + COUNT_S
        while not file.exists():
            if time.monotonic() > give_up:
                raise Broken(f"{name} did not count its tasks within {COUNT_S:g} s")
            await asyncio.sleep(POLL_S)
        return Counts(process.num_fds(), int(file.read_text()), process.num_threads())

    # ---- what is asked of it ----

    async def call(self, frontend: str, op: str, body: dict[str, Any] | None = None, key: str = "") -> Answer:
        """Sends a POST with a body, or else a GET."""
        url = f"{self.url(frontend, 'rl_url')}/v1/rl/{op}"
        headers = {"Idempotency-Key": key} if key else {}
        try:
            response = await self._http.request("GET" if body is None else "POST", url, json=body, headers=headers)
            return Answer(response.status_code, response.json())
        except (httpx.TransportError, ValueError) as error:
            return Answer(None, {"error": {"code": "lost", "message": f"{type(error).__name__}: {error}"}})

    async def learn_committed(self) -> None:
        """Reads the history. No entry that was read before may change. If a frontend is killed at that moment, or the
        machine stands still for seconds, it reads the history again."""
        if missing := await _until(self._read_history, WHOLE_S):
            raise Broken(f"the history can't be read: {missing}")

    async def _read_history(self) -> list[str]:
        up = [name for name in self.frontends if not self.is_down(name)]
        answer = await self.call((up or self.frontends)[0], "updates?limit=256")
        if answer.status != 200:
            return [str(answer)]
        for entry in answer.body["updates"]:
            version, target = entry.get("version"), entry.get("target") or {}
            if version is None or target.get("op") == "unload":
                continue
            key = target.get("name"), (version["run"], version["sequence"])
            weights = version["label"], version["digest"]
            if self.committed.setdefault(key, weights) != weights:
                raise Broken(f"the history has changed: {key} was {self.committed[key]}, now {weights}")
        return []

    async def whole(self) -> dict[str, Any]:
        """Waits until every worker serves the committed version and every frontend reports the same, and returns the
        state."""
        missing = await _until(self._missing, WHOLE_S)
        if missing:
            raise Broken(f"the fleet is not whole after {WHOLE_S:g} s: {missing}")
        return (await self.call(self.frontends[0], "state")).body

    async def _missing(self) -> list[str]:
        answers = [await self.call(name, "state?min_workers=0") for name in self.frontends]
        found = [f"{name}: {one}" for name, one in zip(self.frontends, answers, strict=True) if one.status != 200]
        if found:
            return found
        states = [one.body for one in answers]
        if len({json.dumps([state["version"], state["adapters"]], sort_keys=True) for state in states}) > 1:
            return ["the frontends know different versions"]
        rows = {row["instance_id"]: row for row in states[0]["workers"]}
        if set(rows) != set(self.worker_ids):
            found.append(f"the members are {sorted(rows)}")
        for instance_id, row in rows.items():
            due = {
                "status": "ok",
                "pause_state": "running",
                "version": states[0]["version"],
                "adapters": states[0]["adapters"],
                "staged": None,
                "admission": {"open": True, "reasons": []},
            }
            found += [
                f"{instance_id}: {key} {row.get(key)}" for key, value in due.items() if row.get(key) != value
            ]
        return found

    async def idle(self) -> None:
        """Waits until no request is left in any engine or frontend."""
        left = await _until(self._left, IDLE_S)
        if left:
            raise Broken(f"requests are left {IDLE_S:g} s after the last client: {left}")

    async def _left(self) -> list[str]:
        state = await self.call(self.frontends[0], "state")
        rows = state.body.get("workers", [])
        found = [f"{row['instance_id']}: {row}" for row in rows if row.get("running", 1) or row.get("waiting", 1)]
        for name in self.frontends:
            metrics = (await self._http.get(f"{self.url(name, 'rl_url')}/metrics")).text
            found += [f"{name}: {line}" for line in metrics.splitlines() if line.startswith(_IN_FLIGHT)][:1]
        return [one for one in found if not one.endswith(" 0.0")] if state.status == 200 else [str(state)]


_IN_FLIGHT = "rl_plane_generation_in_flight{"
_ENGINE_FLAGS = {
    "vllm": ("--engine-arg", "max_model_len=2048", "--engine-arg", "max_lora_rank=64"),
    "sglang": ("--engine-arg", "context_length=2048"),
}


async def _until(look: Any, bound_s: float) -> list[str]:
    """Polls until nothing is missing or the bound ends, and returns what is still missing."""
    give_up = time.monotonic() + bound_s
    while missing := await look():
        if time.monotonic() > give_up:
            return list(missing)
        await asyncio.sleep(POLL_S)
    return []
