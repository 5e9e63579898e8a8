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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil

from rl_plane.cli.children import Printer
from rl_plane.cli.supervisor import FIRST_PAUSE_S, Kept, Supervisor
from rl_plane.cli.up import python
from rl_plane.demo.processes import child_environment
from rl_plane.nats_server import NatsServer
from tests.soak.checker import Version, Weights
from tests.soak.probe import VARIABLE as COUNTS_DIR
from tests.zygote import fork_rl_plane

FRONTENDS = 2
START_S = 240.0
"""Torch processes, and engines with processes of their own, on two busy cores."""
WHOLE_S = 120.0
"""After the last kill: a worker imports torch, builds its engine and fetches what is committed."""
IDLE_S = 20.0
"""Twice what a worker waits for a frontend that is gone, until it aborts its requests."""
CALL_S = 60.0
"""For an update, whatever is killed meanwhile."""
COUNT_S = 10.0
"""For a process to count its tasks."""
EXCUSE_S = 3.0
"""After a killed process is back, somebody may still hear of its death."""
POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Answer:
    """What the caller of an op was told."""

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
    """Of one process, while nothing runs."""

    descriptors: int
    tasks: int
    threads: int


@dataclass(slots=True)
class Outage:
    """Of a process that was killed."""

    name: str
    since: float
    until: float = float("inf")


class Broken(Exception):
    """The fleet is not as it should be."""


@dataclass(slots=True)
class SoakFleet:
    tmp: Path
    engines: Sequence[str]
    model: Path
    weights: Path
    outages: list[Outage] = field(default_factory=list)
    committed: dict[tuple[str | None, Version], Weights] = field(default_factory=dict)
    """(adapter, version) → its weights, as the history tells it."""
    worker_ids: list[str] = field(default_factory=list)
    frontends: list[str] = field(default_factory=lambda: [f"frontend-{number}" for number in range(FRONTENDS)])
    _nats: NatsServer = field(init=False)
    _supervisor: Supervisor = field(init=False)
    _printer: Printer = field(default_factory=Printer)
    _http: httpx.AsyncClient = field(init=False)

    # ---- its life ----

    async def start(self) -> None:
        for name in ("scratch", "counts"):
            (self.tmp / name).mkdir()
        self._http = httpx.AsyncClient(timeout=httpx.Timeout(CALL_S), trust_env=False)
        self._nats = NatsServer(store=self.tmp / "store")
        self._nats.start()
        self._supervisor = Supervisor(
            self._printer, self._event, self._line, lambda restarts: FIRST_PAUSE_S, fork_rl_plane
        )
        bus = ("--nats-url", self._nats.url, "--namespace", "soak", "--json")
        for name in self.frontends:
            kept = self._keep(name, "frontend", *bus, "--rl-port", "0", "--http-port", "0")
            kept.on_ready = lambda kept=kept: self._keep_ports(kept, bus)  # type: ignore[misc]
        for engine in self.engines:
            instance_id = secrets.token_hex(8)
            self.worker_ids.append(instance_id)
            model = ("--model", str(self.model), "--weight-root", str(self.weights))
            own = ("--instance-id", instance_id, "--engine", engine, "--device", "cpu", "--drain-s", "1")
            self._keep(instance_id, "worker", *bus, *model, *own, *_ENGINE_FLAGS.get(engine, ()))
        try:
            async with asyncio.timeout(START_S):
                for kept in self._supervisor.kept.values():
                    await kept.ready.wait()
        except TimeoutError:
            slow = [kept.name for kept in self._supervisor.kept.values() if not kept.ready.is_set()]
            raise Broken(f"{', '.join(slow)} did not start within {START_S:g} s") from None
        await self.whole()
        await self.learn_committed()

    def _keep(self, name: str, *arguments: str) -> Kept:
        environment = child_environment(self.tmp / "scratch") | {COUNTS_DIR: str(self.tmp / "counts")}
        kept = Kept(name, python("tests.soak.probe", *arguments), environment, restart=True)
        self._supervisor.keep(kept)
        return kept

    def _keep_ports(self, kept: Kept, bus: Sequence[str]) -> None:
        """The next process takes the ports that the first one found."""
        ports = [str(urlsplit(kept.facts[url]).port) for url in ("rl_url", "http_url")]
        own = ("--rl-port", ports[0], "--http-port", ports[1])
        kept.argv = python("tests.soak.probe", "frontend", *bus, *own)

    async def close(self) -> None:
        await self._http.aclose()
        self._supervisor.end.set()
        self._supervisor.kill()
        await self._supervisor.stop([(list(self._supervisor.kept), 1.0)])
        self._nats.stop()
        self._printer.flush()

    def _line(self, name: str, line: bytes, fd: int) -> None:
        with (self.tmp / f"{name}.log").open("ab") as log:
            log.write(f"{time.strftime('%H:%M:%S')} ".encode() + line + b"\n")

    def _event(self, words: str, **facts: Any) -> None:
        self._line("supervisor", words.encode(), 0)
        if facts.get("event") == "back":
            for outage in self.outages:
                if outage.name == facts["name"] and outage.until == float("inf"):
                    outage.until = time.monotonic()

    def note(self, words: str) -> None:
        self._event(words)

    # ---- its processes ----

    def url(self, name: str, which: str = "http_url") -> str:
        return str(self._supervisor.kept[name].facts[which]).rstrip("/")

    def pid(self, name: str) -> int:
        return int(self._supervisor.kept[name].facts["pid"])

    def kill(self, name: str) -> None:
        self.note(f"the soak kills {name}")
        self.outages.append(Outage(name, time.monotonic()))
        with suppress(ProcessLookupError):  # it has not come back from its last death
            os.kill(self.pid(name), signal.SIGKILL)

    def is_down(self, name: str) -> bool:
        return any(one.name == name and one.until == float("inf") for one in self.outages)

    def was_down(self, frontend: int | None, since: float) -> bool:
        """Whether this frontend, or for None any worker, was down after `since`, or had just come back then."""
        names = self.worker_ids if frontend is None else [self.frontends[frontend]]
        return any(one.name in names and one.until + EXCUSE_S > since for one in self.outages)

    async def counts(self) -> dict[str, Counts]:
        """Of each process of the plane."""
        return {name: await self._counts(name) for name in self._supervisor.kept}

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
        """POST with a body, else GET."""
        url = f"{self.url(frontend, 'rl_url')}/v1/rl/{op}"
        headers = {"Idempotency-Key": key} if key else {}
        try:
            response = await self._http.request("GET" if body is None else "POST", url, json=body, headers=headers)
            return Answer(response.status_code, response.json())
        except (httpx.TransportError, ValueError) as error:
            return Answer(None, {"error": {"code": "lost", "message": f"{type(error).__name__}: {error}"}})

    async def learn_committed(self) -> None:
        """The history, of which nothing that was told before may change."""
        answer = await self.call(self._up(), "updates?limit=256")
        if answer.status != 200:
            raise Broken(f"the history can't be read: {answer}")
        for entry in answer.body["updates"]:
            version, target = entry.get("version"), entry.get("target") or {}
            if version is None or target.get("op") == "unload":
                continue
            key = target.get("name"), (version["run"], version["sequence"])
            weights = version["label"], version["digest"]
            if self.committed.setdefault(key, weights) != weights:
                raise Broken(f"the history has changed: {key} was {self.committed[key]}, now {weights}")

    def _up(self) -> str:
        return next(name for name in self.frontends if not self.is_down(name))

    async def whole(self) -> dict[str, Any]:
        """Its state, once every worker serves what is committed and every frontend tells the same."""
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
        """Once no request is left, in any engine or frontend."""
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
        return [one for one in found if not one.endswith(" 0")] if state.status == 200 else [str(state)]

    def tail(self, lines: int = 12) -> str:
        parts = []
        for log in sorted(self.tmp.glob("*.log")):
            with suppress(OSError):
                parts += [f"---- {log.stem}", *log.read_text(errors="replace").splitlines()[-lines:]]
        return "\n".join(parts)


_IN_FLIGHT = "rl_plane_generation_in_flight "
_ENGINE_FLAGS = {
    "vllm": ("--engine-arg", "max_model_len=2048", "--engine-arg", "max_lora_rank=64"),
    "sglang": ("--engine-arg", "context_length=2048"),
}


async def _until(look: Any, bound_s: float) -> list[str]:
    """What is missing in the end: nothing, or what still is after the bound."""
    give_up = time.monotonic() + bound_s
    while missing := await look():
        if time.monotonic() > give_up:
            return list(missing)
        await asyncio.sleep(POLL_S)
    return []
