"""A fleet of real processes under a supervisor."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from rl_plane.cli.children import Child
from tests.conftest import lives, stop_process
from tests.kill.checkpoints import MODELS, Checkpoint, Wrong, check
from tests.kill.clients import TRANSIENT, Rollouts, Version, Weights
from tests.kill.held import installed
from tests.support.free_port import free_port
from tests.support.kept_fleet import KeptFleet
from tests.support.paths import ROOT
from tests.support.phase_hooks import VARIABLE as HOLD_DIR

SEED = int(os.environ.get("KILL_SEED", "0"))
"""The seed of the choices: the victim, the coordinator, the worker that waits at a hook, and the policy."""
FRONTENDS = 2
WHOLE_S = 240.0
"""A worker that starts again imports torch, builds an engine and fetches; a stopped one has lost its lease and its
connection."""
REACH_S = 20.0
"""From the call to the last boundary, with a busy machine."""
ANSWER_S = 40.0
"""The bound in seconds of an update: a serving lease, a lock's lease, and the outage of nats-server, each twice."""
CLEAR_S = 60.0
"""The bound in seconds until the repeated call gets an answer other than "try again" or a lost connection."""
GONE_S = 15.0
"""An engine's death is noticed within 2 s; then its worker ends."""
POLL_S = 0.02
VITAL = ("VLLM::", "sglang::", "rl-plane::")
"""The beginnings of the names of the processes that an engine can't run without."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer that the caller of an update got."""

    status: int | None
    """None: the connection was lost, or no answer came."""
    error: dict[str, Any] = field(default_factory=dict)
    body: dict[str, Any] = field(default_factory=dict)

    @property
    def code(self) -> str:
        return str(self.error.get("code", "")) if self.status is not None else str(self.error["lost"])

    @property
    def version(self) -> dict[str, Any] | None:
        """The committed version that it reports."""
        return self.body.get("version") or self.error.get("version")

    @property
    def clear(self) -> bool:
        return self.status is not None and self.status not in TRANSIENT

    def __str__(self) -> str:
        told = self.version and self.version["sequence"]
        return f"{self.status} {self.code or 'ok'} {told} {self.error.get('message', '')}".strip()


def _name(process: psutil.Process) -> str:
    """Returns the name of a process; empty if it has ended meanwhile, as helpers of a starting engine do."""
    with suppress(psutil.NoSuchProcess):
        return str(process.name())
    return ""


class RealFleet(KeptFleet):
    """Two frontends, three workers, and clients."""

    def __init__(self, name: str, tmp: Path, engine: str) -> None:
        self.weights = tmp / "weights"
        self.holds = tmp / "holds"
        for directory in (self.weights, self.holds):
            directory.mkdir(parents=True)
        paths = {"PYTHONPATH": os.pathsep.join(map(str, (installed(tmp / "site"), ROOT)))}
        super().__init__(tmp, "tests.kill.held_main", {HOLD_DIR: str(self.holds), **paths}, "kill", with_nats=True)
        self.name = name
        self.models = MODELS[engine](self.weights)
        self.worker_ids = [secrets.token_hex(8) for _ in self.models.workers]
        """The ids of the workers. Where engines differ, the first worker has the engine that the fleet tests."""
        self.node = ""
        """The name of the process of the first worker's second node, if its engine has nodes."""
        self.frontends = [f"frontend-{number}" for number in range(FRONTENDS)]
        self.committed: dict[Version, Weights] = {}
        self.updates = 0
        self.own = Checkpoint(Path(), "")
        """The checkpoint that its workers start with."""
        self.ended: dict[str, int] = {}
        """The exit code of the last ended process, by name."""
        self._made = 0
        self._doomed: list[psutil.Process] = []
        """The processes of a worker that the test has killed, or whose engine it has: the worker and its engine's
        processes."""
        self._http = httpx.AsyncClient(timeout=httpx.Timeout(ANSWER_S), trust_env=False)
        self._rollouts: Rollouts | None = None

    # ---- its life ----

    async def start(self) -> None:
        self.own = await self.checkpoint()
        self.start_nats()
        for name in self.frontends:
            self.keep_frontend(name)
        common = ("--model", str(self.own.path), "--weight-root", str(self.weights))
        nodes: tuple[str, ...] = ()
        if self.models.nodes > 1:
            nodes = ("--nnodes", str(self.models.nodes), "--dist-init-addr", f"127.0.0.1:{free_port()}")
            self.node = self.keep_node(self.worker_ids[0], 1, *common, *self.models.workers[0], *nodes)
        for instance_id, flags in zip(self.worker_ids, self.models.workers, strict=True):
            self.keep_worker(instance_id, *common, *flags, *nodes)
            nodes = ()
        await self.ready()
        version = (await self.whole())["version"]
        self.committed[version["run"], version["sequence"]] = (version["label"], version["digest"])
        urls = [self.url(name) for name in self.frontends]
        self._rollouts = Rollouts(self.models, urls, f"{SEED} {self.name}")

    async def close(self) -> None:
        if self._rollouts is not None:
            await self._rollouts.close()
        await self._http.aclose()
        await super().close()

    @property
    def rollouts(self) -> Rollouts:
        assert self._rollouts is not None
        return self._rollouts

    # ---- its processes ----

    def kill(self, name: str) -> None:
        """It may be starting."""
        self.note(f"the test kills {name}")
        pid = self.pid(name) if name == "nats" else self._child(name).pid
        self._doom(pid)
        os.kill(pid, signal.SIGKILL)

    def _child(self, name: str) -> Child:
        child = self._supervisor.processes[name].running
        assert child is not None
        return child

    def _doom(self, pid: int) -> None:
        """Notes the processes that end with this one. A node takes the whole engine with it."""
        ends = [psutil.Process(pid)]
        if self.node and pid == self._child(self.node).pid:
            ends.append(psutil.Process(self._child(self.worker_ids[0]).pid))
        self._doomed = [one for end in ends for one in (end, *end.children(recursive=True))]

    def _of_engine(self, name: str, child: str) -> psutil.Process:
        """The process of an engine that has this name. `name`: the worker or the node, which may be starting."""
        named = tuple(prefix + child for prefix in VITAL)
        family = psutil.Process(self._child(name).pid).children(recursive=True)
        (found,) = [one for one in family if _name(one).startswith(named)]
        return found

    def kill_engine(self, name: str, child: str) -> None:
        self._doom(self._child(name).pid)
        victim = self._of_engine(name, child)
        self.note(f"the test kills {victim.name()} ({victim.pid}) of {name}")
        victim.kill()

    @contextmanager
    def engine_stopped(self, name: str, child: str) -> Iterator[None]:
        victim = self._of_engine(name, child)
        self.note(f"the test stops {victim.name()} ({victim.pid}) of {name}")
        victim.suspend()
        try:
            yield
        finally:
            with suppress(psutil.NoSuchProcess):  # its worker has ended
                victim.resume()

    @contextmanager
    def stopped(self, name: str) -> Iterator[None]:
        """A node stops with all of its processes, as a host does that hangs."""
        self.stop(name)
        others = psutil.Process(self.pid(name)).children(recursive=True) if name == self.node else []
        for other in others:
            other.suspend()
        try:
            yield
        finally:
            for other in others:
                with suppress(psutil.NoSuchProcess):
                    other.resume()
            self.go_on(name)

    async def gone(self) -> None:
        """Waits until no process of the last kill is left."""
        give_up = time.monotonic() + GONE_S
        while orphans := [str(process) for process in self._doomed if lives(process)]:
            check(time.monotonic() < give_up, f"they live after {GONE_S:g} s: {orphans}")
            await asyncio.sleep(POLL_S)

    def _event(self, words: str, **facts: Any) -> None:
        super()._event(words, **facts)
        if "exit_code" in facts:
            self.ended[facts["name"]] = facts["exit_code"]

    def stop(self, name: str) -> None:
        pid = self.pid(name)
        stop_process(pid)
        self.note(f"{name} was stopped")

    def go_on(self, name: str) -> None:
        self.note(f"{name} continues")
        os.kill(self.pid(name), signal.SIGCONT)

    def seen(self) -> str:
        if (seen := self._rollouts) is None:
            return "not started"
        return (
            f"{sum(seen.answers.values())} completions, {seen.crossed} kept over an update, {dict(seen.trouble)}"
        )

    # ---- what is asked of it ----

    async def get(self, frontend: str, path: str) -> dict[str, Any]:
        """TransportError or Wrong when it can't be had."""
        response = await self._http.get(f"{self.url(frontend, 'rl_url')}/v1/rl/{path}", timeout=15.0)
        check(
            response.status_code == 200, f"{frontend} {path}: HTTP {response.status_code}: {response.text[:500]}"
        )
        found: dict[str, Any] = response.json()
        return found

    async def checkpoint(self) -> Checkpoint:
        made = await self.models.make(self._made)
        self._made += 1
        return made

    async def update(self, frontend: str, body: dict[str, Any], key: str) -> Answer:
        url = f"{self.url(frontend, 'rl_url')}/v1/rl/update_weights"
        try:
            response = await self._http.post(url, json=body, headers={"Idempotency-Key": key})
            told = response.json()
        except (httpx.TransportError, ValueError) as error:
            return Answer(None, {"lost": type(error).__name__})
        if response.status_code == 200:
            # From here on: a request that begins now is answered by this version or a newer one.
            self.rollouts.floor = max(self.rollouts.floor, told["version"]["sequence"])
            return Answer(200, body=told)
        return Answer(response.status_code, told["error"])

    async def clear_answer(self, frontend: str, body: dict[str, Any], key: str) -> Answer:
        """Repeats the call under its id until the answer says how the update ended."""
        give_up = time.monotonic() + CLEAR_S
        while True:
            answer = await self.update(frontend, body, key)
            self.note(f"repeated at {frontend}: {answer}")
            if answer.clear:
                return answer
            check(time.monotonic() < give_up, f"no clear answer at {frontend} in {CLEAR_S:g} s: {answer}")
            await asyncio.sleep(0.2)

    async def whole(self) -> dict[str, Any]:
        """Waits until every worker serves the committed version, and no frontend reports a part of any update."""
        give_up = time.monotonic() + WHOLE_S
        while True:
            try:
                states = [await self.get(name, "state?min_workers=0") for name in self.frontends]
                missing = [words for state in states for words in self._missing(state)]
                if len({json.dumps(state["version"]) for state in states}) > 1:
                    missing.append("the frontends know different versions")
                if not missing:
                    for name in self.frontends:
                        await self.get(name, f"ready?min_workers={len(self.worker_ids)}")
                    return states[0]
            except (httpx.TransportError, Wrong) as error:
                missing = [f"{type(error).__name__}: {error}"]
            check(time.monotonic() < give_up, f"the fleet is not whole after {WHOLE_S:g} s: {missing}")
            await asyncio.sleep(0.1)

    def _missing(self, state: dict[str, Any]) -> list[str]:
        rows = {row["instance_id"]: row for row in state["workers"]}
        found = [] if set(rows) == set(self.worker_ids) else [f"the members are {sorted(rows)}"]
        if not state["ready"]:
            found.append("not ready")
        for instance_id, row in rows.items():
            due = {
                "status": "ok",
                "pause_state": "running",
                "version": state["version"],
                "staged": None,
                "draining": False,
                "admission": {"open": True, "reasons": []},
            }
            found += [
                f"{instance_id} has {key} {row.get(key)}" for key, value in due.items() if row.get(key) != value
            ]
        return found

    async def learn_committed(self) -> None:
        """The history, in which no earlier entry may change."""
        told = (await self.get(self.frontends[0], "updates?limit=256"))["updates"]
        for entry in told:
            if entry["outcome"] == "committed":
                version = entry["version"]
                key, weights = (version["run"], version["sequence"]), (version["label"], version["digest"])
                check(
                    self.committed.setdefault(key, weights) == weights, f"{key} was {self.committed[key]}: {entry}"
                )

    async def outcome_of(self, update_id: str) -> list[str]:
        told = (await self.get(self.frontends[-1], "updates?limit=256"))["updates"]
        return [entry["outcome"] for entry in told if entry["update_id"] == update_id]

    # ---- holds ----

    def hold(self, point: str, instance_ids: Sequence[str], update_id: str) -> None:
        """Makes the workers stop at the point of this update alone. A coordinator may begin by finishing the update
        before."""
        for instance_id in instance_ids:
            made = self.holds / f"new.{instance_id}"
            made.write_text(update_id)
            made.rename(self.holds / f"{point}.{instance_id}")

    def release(self) -> None:
        for file in self.holds.iterdir():
            file.unlink()

    async def begun(
        self, point: str, instance_ids: Sequence[str], call: Callable[[], Coroutine[Any, Any, Answer]]
    ) -> asyncio.Task[Answer]:
        """Starts an update and waits until it stands at this point. It is repeated if it finds the lock of the case
        before."""
        give_up = time.monotonic() + REACH_S
        update = asyncio.create_task(call())
        while not self._reached(point, instance_ids):
            check(time.monotonic() < give_up, f"{point} was not reached within {REACH_S:g} s")
            if update.done():
                check(update.result().code == "locked", f"{point} was never reached: {update.result()}")
                update = asyncio.create_task(call())
            await asyncio.sleep(POLL_S)
        return update

    def _reached(self, point: str, instance_ids: Sequence[str]) -> bool:
        return all((self.holds / f"reached.{point}.{instance_id}").exists() for instance_id in instance_ids)

    async def started_to(self, point: str, instance_id: str) -> None:
        """Waits until a starting worker stands at this point."""
        give_up = time.monotonic() + WHOLE_S
        while not self._reached(point, [instance_id]):
            check(time.monotonic() < give_up, f"{point} was not reached within {WHOLE_S:g} s")
            await asyncio.sleep(POLL_S)
