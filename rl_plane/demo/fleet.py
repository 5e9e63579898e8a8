"""The demo's fleet on this machine: nats-server, a frontend, workers, and the trainer that steers it."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, BinaryIO

from rl_plane.bus.server import NatsServer
from rl_plane.cli.children import OUT, Printer, python, run_child
from rl_plane.cli.settings import for_child
from rl_plane.cli.supervisor import SupervisedProcess, Supervisor
from rl_plane.errors import PlaneError
from rl_plane.fleet.http_client import call_facade

START_TIMEOUT_S = 60.0
"""Importing torch takes seconds when the disk is cold."""
CALL_TIMEOUT_S = 10.0
STOP_S = 5.0
"""Seconds for all processes to end after SIGTERM."""
NAMESPACE, COMPONENT = "demo", "engine"
TAIL_CHARS = 300


def child_environment(scratch: Path) -> dict[str, str]:
    """This process's environment for the demo's children: without settings for another fleet, with one thread for each
    process, and with `scratch` for the temporary files of torch and others."""
    inherited = for_child({}, os.environ)[1]
    own = {"TMPDIR": str(scratch), "HF_HUB_OFFLINE": "1"}
    return {"OMP_NUM_THREADS": "1", **inherited, **own}


class DemoFleet:
    """Starts the processes of the demo. `stop` leaves no process and no temporary folder behind."""

    def __init__(self, logs: Path, model: Path | None, seed: int, engine: str = "hf") -> None:
        self._scratch = Path(tempfile.mkdtemp(prefix="rl-plane-demo-"))
        self._environment = child_environment(self._scratch)
        self._nats = NatsServer()
        self._supervisor = Supervisor(Printer(), self._event, self._log)
        self._logs, self._files = logs, dict[tuple[str, int], BinaryIO]()
        self._last_words: dict[str, str] = {}
        self._model, self._seed, self._engine = model, seed, engine
        self.workers: list[str] = []
        """The instance ids of the workers that should be alive."""
        self.events: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        """The trainer's events."""
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Has an error once a process has ended too early."""

    @property
    def weights(self) -> Path:
        return self._scratch / "weights"

    @property
    def model(self) -> Path:
        return self._model or self._scratch / "tiny-qwen3"

    @property
    def urls(self) -> dict[str, str]:
        """The frontend's `rl_url` and `http_url`."""
        facts = self._supervisor.processes["frontend"].facts
        return {name: facts[name].rstrip("/") for name in ("rl_url", "http_url")}

    async def start(self, workers: int, trainer_arguments: list[str]) -> None:
        """Starts everything. The trainer waits for the workers by itself."""
        self.weights.mkdir()
        self._nats.start()
        frontend = self._rl_plane("frontend", "--rl-port", "0", "--http-port", "0")
        if self._model is None:
            await self.unless_failed(self._make_model(), START_TIMEOUT_S)
        for _ in range(workers):
            self.add_worker()
        await self.unless_failed(frontend.ready.wait(), START_TIMEOUT_S)
        arguments = ["--model", str(self.model), "--weights", str(self.weights), "--seed", str(self._seed)]
        arguments += ["--rl-url", self.urls["rl_url"], "--http-url", self.urls["http_url"], *trainer_arguments]
        self._supervise("trainer", python("rl_plane.demo.trainer", *arguments))

    def add_worker(self) -> str:
        """Starts a worker, and returns its instance id."""
        instance_id = secrets.token_hex(8)
        self.workers.append(instance_id)
        self._rl_plane(
            "worker", "--engine", self._engine, "--model", str(self.model), "--weight-root", str(self.weights),
            "--dtype", "float32", "--instance-id", instance_id, name=f"worker-{instance_id}",
        )  # fmt: skip
        return instance_id

    def kill_worker(self, instance_id: str) -> None:
        """Kills a worker with SIGKILL."""
        self.workers.remove(instance_id)
        self._supervisor.processes[f"worker-{instance_id}"].kill()

    async def in_flight(self, instance_id: str) -> int:
        """The number of requests that the worker runs now; 0 if it does not answer."""
        try:
            rows = await self._rows({"workers": instance_id})
        except PlaneError:
            return 0
        return sum(int(row.get("running", 0)) for row in rows)

    async def members(self) -> list[dict[str, Any]]:
        """A row for each worker in the fleet."""
        return await self._rows({"min_workers": 0})

    async def unless_failed(self, work: Coroutine[Any, Any, Any], bound_s: float) -> Any:
        """The result of `work`. Raises the error of a process that ends too early. TimeoutError after `bound_s`."""
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait((task, self.failed), timeout=bound_s, return_when=asyncio.FIRST_COMPLETED)
            if self.failed.done():
                self.failed.result()
            if not task.done():
                raise TimeoutError
            return task.result()
        finally:
            task.cancel()

    async def stop(self) -> None:
        """Ends all processes, and removes their files."""
        try:
            await self._supervisor.stop([(list(self._supervisor.processes), STOP_S)])
            self._nats.stop()
        finally:
            shutil.rmtree(self._scratch, ignore_errors=True)
            for file in self._files.values():
                file.close()

    # ---- processes ----

    def _rl_plane(self, command: str, *arguments: str, name: str = "") -> SupervisedProcess:
        bus = ["--nats-url", self._nats.url, "--namespace", NAMESPACE, "--component", COMPONENT]
        return self._supervise(name or command, python("rl_plane.cli.main", command, *bus, *arguments, "--json"))

    def _supervise(self, name: str, argv: list[str]) -> SupervisedProcess:
        process = SupervisedProcess(name, argv, self._environment, restart=False)
        process.on_ready = lambda: self._log(name, json.dumps(process.facts).encode(), OUT)
        self._log(name, b"", OUT)  # the log of a process is there as soon as the process
        self._supervisor.supervise(process)
        return process

    async def _make_model(self) -> None:
        argv = python("worker.testing.tiny_model", str(self.model), "--seed", str(self._seed))
        if await run_child(argv, self._environment, lambda line, fd: self._log("model", line, fd)) != 0:
            raise PlaneError(f"no model could be made: {self._last_words.get('model', '')}")

    def _log(self, name: str, line: bytes, fd: int) -> None:
        """Writes a line of a process to its log, and takes in the trainer's events."""
        if (name, fd) not in self._files:
            self._files[name, fd] = (self._logs / f"{name}.{'out' if fd == OUT else 'log'}").open("wb", 0)
        self._files[name, fd].write(line + b"\n" if line else b"")
        if fd != OUT:
            self._last_words[name] = line.decode(errors="replace")[-TAIL_CHARS:]
        elif name == "trainer" and line.startswith(b'{"event"'):
            self.events.put_nowait(json.loads(line))

    def _event(self, words: str, **facts: Any) -> None:
        """Takes in a process's end. The killed worker's and, after its last event, the trainer's are expected."""
        name = facts.get("name", "")
        expected = name.startswith("worker-") and name.removeprefix("worker-") not in self.workers
        if facts.get("event") == "died" and not expected and not self.failed.done():
            last = self._last_words.get(name)
            self.failed.set_exception(PlaneError(words + (f": {last}" if last else "")))

    async def _rows(self, select: dict[str, Any]) -> list[dict[str, Any]]:
        reply = await asyncio.to_thread(call_facade, self.urls["rl_url"], None, "workers", select, CALL_TIMEOUT_S)
        return list(reply["workers"])
