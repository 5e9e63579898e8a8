"""The demo's own fleet on this machine: nats-server, a frontend, workers, and the trainer that steers it."""

from __future__ import annotations

import contextlib
import json
import queue
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rl_plane.bus.server import NatsServer
from rl_plane.demo.http_json import call_json
from rl_plane.demo.processes import Child, Processes, wait_for_end, wait_for_line
from rl_plane.errors import PlaneError

START_TIMEOUT_S = 60.0
"""Importing torch takes seconds when the disk is cold."""
NAMESPACE, COMPONENT = "demo", "engine"

_MAKE_MODEL = (
    "import sys; from pathlib import Path; from worker.testing.tiny_model import make_tiny_model; "
    "make_tiny_model(Path(sys.argv[1]), seed=int(sys.argv[2]), dtype='float32')"
)


class DemoFleet:
    """`stop` leaves no process and no temporary folder behind, whatever `start` came to."""

    def __init__(
        self, logs: Path, model: Path | None, seed: int, check: Callable[[], None], engine: str = "hf"
    ) -> None:
        """`check` is called in each wait, and may raise to end it."""
        self._scratch = Path(tempfile.mkdtemp(prefix="rl-plane-demo-"))
        self._nats = NatsServer()
        self._processes = Processes(logs, self._scratch)
        self._given_model = model
        self._seed = seed
        self._check = check
        self._engine = engine
        self._frontend: Child | None = None
        self._trainer: Child | None = None
        self.workers: dict[str, Child] = {}
        """By instance id; those that should be alive."""
        self.rl_url = ""
        self.http_url = ""
        self.events: queue.Queue[dict[str, Any] | None] = queue.Queue()
        """What the trainer says; None is its end."""

    @property
    def weights(self) -> Path:
        return self._scratch / "weights"

    @property
    def model(self) -> Path:
        return self._given_model or self._scratch / "tiny-qwen3"

    def start(self, workers: int, trainer_arguments: list[str]) -> None:
        """Everything is started when this returns; the trainer waits for the workers by itself."""
        give_up = time.monotonic() + START_TIMEOUT_S
        self.weights.mkdir()
        self._nats.start()
        self._frontend = self._processes.rl_plane(
            "frontend", "frontend", *self._bus_arguments(), "--rl-port", "0", "--http-port", "0", "--json"
        )
        if self._given_model is None:
            model = self._processes.python("model", "-c", _MAKE_MODEL, str(self.model), str(self._seed))
            wait_for_end(model, give_up, self._check)
        for _ in range(workers):
            self.add_worker()
        urls = json.loads(wait_for_line(self._frontend, give_up, self._check))
        self.rl_url, self.http_url = urls["rl_url"].rstrip("/"), urls["http_url"].rstrip("/")
        self._start_trainer(trainer_arguments)

    def add_worker(self) -> str:
        instance_id = secrets.token_hex(8)
        self.workers[instance_id] = self._processes.rl_plane(
            f"worker-{instance_id}", "worker", *self._bus_arguments(), "--engine", self._engine,
            "--model", str(self.model), "--weight-root", str(self.weights), "--dtype", "float32",
            "--instance-id", instance_id,
        )  # fmt: skip
        return instance_id

    def kill_worker(self, instance_id: str) -> None:
        self.workers.pop(instance_id).kill()

    def in_flight(self, instance_id: str) -> int:
        """Requests that the worker runs now; 0 when it can't say."""
        try:
            rows = self._rows(f"workers={instance_id}")
        except PlaneError:
            return 0
        return sum(int(row.get("running", 0)) for row in rows)

    def members(self) -> list[dict[str, Any]]:
        """A row of each worker that is in the fleet."""
        return self._rows("min_workers=0")

    def check(self) -> None:
        """Raises for a process that should be there and is not."""
        if self._nats.process.poll() is not None:
            raise PlaneError(f"nats-server ended with {self._nats.process.returncode}")
        children = [*self.workers.values(), *filter(None, [self._frontend])]
        for child in children:
            if not child.running:
                raise PlaneError(child.last_words())

    def trainer_words(self) -> str:
        assert self._trainer is not None
        self._trainer.process.wait(START_TIMEOUT_S)
        return self._trainer.last_words()

    def stop(self) -> None:
        self._processes.stop()
        self._nats.stop()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _bus_arguments(self) -> list[str]:
        return ["--nats-url", self._nats.url, "--namespace", NAMESPACE, "--component", COMPONENT]

    def _rows(self, query: str) -> list[dict[str, Any]]:
        return list(call_json(f"{self.rl_url}/v1/rl/workers?{query}")["workers"])

    def _start_trainer(self, arguments: list[str]) -> None:
        self._trainer = self._processes.python(
            "trainer", "-m", "rl_plane.demo.trainer", "--model", str(self.model), "--weights", str(self.weights),
            "--rl-url", self.rl_url, "--http-url", self.http_url, "--seed", str(self._seed), *arguments, pipe=True,
        )  # fmt: skip
        threading.Thread(target=self._listen, args=(self._trainer,), daemon=True, name="trainer").start()

    def _listen(self, trainer: Child) -> None:
        assert trainer.process.stdout is not None
        try:
            for line in trainer.process.stdout:
                with contextlib.suppress(ValueError):  # it was cut off, or is not the trainer's
                    self.events.put(json.loads(line))
        except ValueError:
            pass  # the pipe was closed under us: its end says the rest
        finally:
            self.events.put(None)
