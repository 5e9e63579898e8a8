"""nats-server, frontends and workers under `rl-plane up`'s supervisor: each is brought back when it dies, and what it
writes goes to a log of its own."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rl_plane.bus.server import NatsServer
from rl_plane.cli.children import Printer, python
from rl_plane.cli.supervisor import FIRST_PAUSE_S, SupervisedProcess, Supervisor
from rl_plane.demo.fleet import child_environment
from tests.support.zygote import fork_rl_plane

START_S = 240.0
"""Torch processes, and engines with processes of their own, on two busy cores."""


class Slow(Exception):
    """Raised if a process did not start in time."""


class KeptFleet:
    """`module`: what runs `rl-plane`; `environment`: of its own, beside what a child has; `namespace`: of all of them.
    nats-server is brought back only where `with_nats` says so."""

    def __init__(
        self, tmp: Path, module: str, environment: dict[str, str], namespace: str, *, with_nats: bool
    ) -> None:
        self.tmp = tmp
        self.nats = NatsServer(store=tmp / "store")
        self._module, self._namespace, self._with_nats = module, namespace, with_nats
        (tmp / "scratch").mkdir()
        self._environment = child_environment(tmp / "scratch") | environment
        self._printer = Printer()
        # Who is killed time after time is not to wait longer each time.
        self._supervisor = Supervisor(
            self._printer, self._event, self._line, lambda restarts: FIRST_PAUSE_S, fork_rl_plane
        )

    # ---- its life ----

    def start_nats(self) -> None:
        if self._with_nats:
            self._supervisor.supervise_nats(self.nats)
        else:
            self.nats.start()

    def keep_frontend(self, name: str) -> None:
        kept = self._keep(name, "frontend", "--rl-port", "0", "--http-port", "0")
        kept.on_ready = lambda: self._keep_ports(kept)

    def keep_worker(self, instance_id: str, *flags: str) -> None:
        """Starts a worker. Its engine's processes too have the worker's id in their environment."""
        self._keep(instance_id, "worker", "--drain-s", "1", *flags, RL_PLANE_INSTANCE_ID=instance_id)

    def keep_node(self, instance_id: str, rank: int, *flags: str) -> str:
        """Starts a node of a worker that is not the head, and returns the name of its process, which stands for the
        worker's id in the environment of its engine's processes."""
        name = f"{instance_id}-node{rank}"
        own = ("--instance-id", instance_id, "--node-rank", str(rank))
        self._keep(name, "worker", "--drain-s", "1", *flags, *own, RL_PLANE_INSTANCE_ID=name)
        return name

    def _keep(self, name: str, what: str, *flags: str, **environment: str) -> SupervisedProcess:
        kept = SupervisedProcess(name, self._argv(what, *flags), self._environment | environment, restart=True)
        self._supervisor.supervise(kept)
        return kept

    def _keep_ports(self, kept: SupervisedProcess) -> None:
        """Makes the next process of the frontend take the ports that the first one found, like `up` does."""
        ports = [str(urlsplit(kept.facts[url]).port) for url in ("rl_url", "http_url")]
        kept.argv = self._argv("frontend", "--rl-port", ports[0], "--http-port", ports[1])

    def _argv(self, what: str, *flags: str) -> list[str]:
        bus = ("--nats-url", self.nats.url, "--namespace", self._namespace, "--json")
        return python(self._module, what, *bus, *flags)

    async def ready(self) -> None:
        """Waits until every process is ready. The error Slow names the processes that are not."""
        try:
            async with asyncio.timeout(START_S):
                for kept in self._supervisor.processes.values():
                    await kept.ready.wait()
        except TimeoutError:
            slow = [kept.name for kept in self._supervisor.processes.values() if not kept.ready.is_set()]
            raise Slow(f"{', '.join(slow)} did not start within {START_S:g} s") from None

    async def close(self) -> None:
        self._supervisor.end.set()
        self._supervisor.kill()
        await self._supervisor.stop([(self.names, 1.0)])
        self.nats.stop()
        self._printer.flush()

    # ---- its processes ----

    @property
    def names(self) -> list[str]:
        """The names of the plane's own processes."""
        return list(self._supervisor.processes)

    def pid(self, name: str) -> int:
        return self.nats.process.pid if name == "nats" else int(self._supervisor.processes[name].facts["pid"])

    def url(self, name: str, which: str = "http_url") -> str:
        return str(self._supervisor.processes[name].facts[which]).rstrip("/")

    def back(self, name: str) -> None:
        """Called when a process that had ended is ready again."""

    # ---- its logs ----

    def note(self, words: str) -> None:
        self._line("supervisor", f"{time.time() % 60:06.3f} {words}".encode(), 0)

    def _event(self, words: str, **facts: Any) -> None:
        self.note(words)
        if facts.get("event") == "back":
            self.back(facts["name"])

    def _line(self, name: str, line: bytes, fd: int) -> None:
        with (self.tmp / f"{name}.log").open("ab") as log:
            log.write(f"{time.strftime('%H:%M:%S')} ".encode() + line + b"\n")

    def tail(self, lines: int = 12, head: str = "") -> str:
        parts = []
        for log in sorted(self.tmp.glob("*.log")):
            with suppress(OSError):
                parts += [f"---- {head}{log.stem}", *log.read_text(errors="replace").splitlines()[-lines:]]
        return "\n".join(parts)
