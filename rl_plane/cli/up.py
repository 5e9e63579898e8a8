"""`rl-plane up` runs nats-server, N workers of each engine, and a frontend. One Ctrl-C ends all."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import click

from rl_plane._util.log_format import json_line, set_up_logging
from rl_plane._util.tasks import end_tasks
from rl_plane.bus.key_folder import KeyFolder
from rl_plane.bus.server import CONFIG, NatsServer
from rl_plane.cli.children import ERR, OUT, Printer, python, run_child
from rl_plane.cli.exit_notices import tell_exit
from rl_plane.cli.keys import credentials
from rl_plane.cli.output import READY, counted, one_line
from rl_plane.cli.serve import BUS, ENGINE, FRONTEND, LISTENERS, LOG, METRICS, NODES, WORKER, check_engine
from rl_plane.cli.settings import Command, command, for_child
from rl_plane.cli.span_export import OTEL, check_extra
from rl_plane.cli.start_display import StartProgress, start_shown
from rl_plane.cli.supervisor import SupervisedProcess, Supervisor
from rl_plane.cli.wait_display import STATE_BODY, STATE_S
from rl_plane.errors import DeadlineExceeded, PlaneError
from rl_plane.fleet.http_client import call_facade
from rl_plane.protocol.subjects import Subjects

if TYPE_CHECKING:
    from rich.console import RenderableType

ERROR_OBJECT = b'{"status": "error"'
"""The beginning of the error of a child with --json."""
FRONTEND_STOP_S = 5.0
"""Seconds for a frontend to close after its drain."""

HERE = tuple(name for name in WORKER if name not in (*NODES, *METRICS))
"""The settings that all workers of one host may share."""

UP_LOGGER = "rl_plane.up"

SETTINGS = (
    "engines",
    "workers",
    "restart",
    *ENGINE,
    "drain_s",
    "store",
    "up_nats_port",
    "keys",
    *BUS,
    *LISTENERS,
    "record",
    "record_files",
    "start_timeout_s",
    *OTEL,
    *LOG,
    "json",
)


def commands() -> list[click.Command]:
    return [command("up", "Bring up a whole fleet on this machine.", run_up, SETTINGS)]


def run_up(given: Command) -> int:
    """Runs a fleet until a signal."""
    values = dict(given.values)
    if values["log_format"] == "json":
        set_up_logging(values["log_level"], "json")  # of its own errors; children have their own
    check_extra(values)
    values["engines"] = [check_engine(name) for name in values["engines"] or ("hf",)]
    up = Up(values)
    try:
        asyncio.run(up.until_a_signal())
    finally:
        up.printer.flush()
    return 0


def log_line(name: str, line: bytes) -> str:
    """A child's line as a JSON object: its own object with the child's name, or an object around a line of text."""
    text = line.decode(errors="replace")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if isinstance(found, dict) and {"time", "level", "logger", "message"} <= found.keys():
        return json.dumps({**found, "process": name})
    return json_line("info", UP_LOGGER, text, time.time(), {"process": name})


class Up:
    """The fleet of one `rl-plane up`."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values
        self.printer = Printer()
        self._json: bool = values["json"]
        self._logs_json = values["log_format"] == "json"
        self._nats: NatsServer | None = None
        self._workers: list[str] = []
        self._known_as: dict[str, tuple[str, str]] = {}
        """Name of a worker → its instance id and its engine."""
        self._telling: set[asyncio.Task[None]] = set()
        """The notices that are being sent, one for each death."""

    async def until_a_signal(self) -> None:
        """Runs the fleet until a signal. PlaneError if it can't be brought up."""
        supervisor = self._supervisor = Supervisor(self.printer, self._event, self._line)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, supervisor.signalled)
        bring_up = asyncio.create_task(self._bring_up())
        ended = asyncio.create_task(supervisor.end.wait())
        try:
            bound = self.values["start_timeout_s"]
            with self._shown():
                done, _ = await asyncio.wait((bring_up, ended), timeout=bound, return_when=asyncio.FIRST_COMPLETED)
            if bring_up in done:
                bring_up.result()
                self._print_ready()
            elif not done:
                raise DeadlineExceeded(
                    f"the fleet was not ready within {bound:g} s", fix="see the lines above, or --start-timeout-s"
                )
            await ended
        finally:
            bring_up.cancel()
            ended.cancel()
            await asyncio.wait((bring_up, ended))
            drain_s = self.values["drain_s"]
            await end_tasks(self._telling)
            await supervisor.stop([(["frontend"], drain_s + FRONTEND_STOP_S), (self._workers, drain_s)])
        if supervisor.failed is not None:
            raise supervisor.failed
        self._event("all ended", event="ended")

    def _shown(self) -> AbstractContextManager[None]:
        """Shows at a terminal how far the start is."""
        values, supervisor = self.values, self._supervisor
        if self._json or self._logs_json:
            return nullcontext()
        progress = StartProgress(len(values["engines"]) * values["workers"] + 1)

        def draw() -> RenderableType:
            processes = list(supervisor.processes.values())
            return progress.drawing(
                [(each.name, self._known_as.get(each.name, ("",))[0], each.ready.is_set()) for each in processes]
            )

        def read_phases() -> None:
            frontend = supervisor.processes.get("frontend")
            if frontend is not None and (url := frontend.facts.get("rl_url")) is not None:
                progress.learn(call_facade(url, values["admin_key"], "state", STATE_BODY, STATE_S))

        return start_shown(self.printer, draw, read_phases)

    async def _bring_up(self) -> None:
        values = self.values
        if values["model"] is None:
            values["model"] = await self._make_model()
        if values["nats_url"] is None:
            self._start_nats()
        each = [name for name in values["engines"] for _ in range(values["workers"])]
        for number, engine in enumerate(each, 1):
            name = f"worker-{number}"
            self._workers.append(name)
            own = {**values, "engine": engine, "instance_id": secrets.token_hex(8), "copies": 1}
            self._known_as[name] = own["instance_id"], engine
            self._supervisor.supervise(self._process(name, "worker", own, HERE, values["restart"]))
        frontend = self._process("frontend", "frontend", values, FRONTEND, restart=True)
        frontend.on_ready = self._keep_ports
        self._supervisor.supervise(frontend)
        for process in self._supervisor.processes.values():
            await process.ready.wait()

    def _process(
        self, name: str, command: str, values: dict[str, Any], names: tuple[str, ...], restart: bool
    ) -> SupervisedProcess:
        own = {key: values[key] for key in names}
        for each in fields(files := credentials(values, "worker" if command == "worker" else "frontend")):
            own[f"nats_{each.name}"] = getattr(files, each.name)
        own["json"] = True
        argv, env = for_child(own, os.environ)
        if command == "worker":
            env.setdefault("OMP_NUM_THREADS", str(self._threads()))
        return SupervisedProcess(name, python("rl_plane.cli.main", command, *argv), env, restart=restart)

    def _threads(self) -> int:
        """The threads of one worker: the workers share the cores of this machine."""
        workers: int = len(self.values["engines"]) * self.values["workers"]
        return max(1, (os.cpu_count() or 1) // max(1, workers))

    async def _make_model(self) -> Path:
        """Makes a model in another process, so that this one stays small, and forks without torch's threads."""
        lines: list[bytes] = []

        def line(text: bytes, fd: int) -> None:
            if fd == OUT:
                lines.append(text)
            else:
                self._line("model", text, fd)

        environment = for_child({}, os.environ)[1]
        code = await run_child(python("rl_plane.cli.models", *self.values["engines"]), environment, line)
        if code != 0 or not lines:
            raise PlaneError(
                "no model is given, and none could be made", fix="see the lines above, or give --model"
            )
        return Path(os.fsdecode(lines[-1]))

    def _start_nats(self) -> None:
        keys = self.values["keys"]
        config = KeyFolder(keys).config if keys is not None else CONFIG
        self._nats = NatsServer(port=self.values["up_nats_port"], store=self.values["store"], config=config)
        self._supervisor.supervise_nats(self._nats)
        self.values["nats_url"] = self._nats.url

    def _keep_ports(self) -> None:
        """Makes a restarted frontend take the ports of the first one."""
        frontend = self._supervisor.processes["frontend"]
        for name, url in (("rl_port", "rl_url"), ("http_port", "http_url")):
            if frontend.facts.get(url):
                self.values[name] = urlsplit(frontend.facts[url]).port
        frontend.argv = self._process("frontend", "frontend", self.values, FRONTEND, restart=True).argv

    # ---- output ----

    def _line(self, name: str, line: bytes, fd: int) -> None:
        if fd == OUT and line.startswith(ERROR_OBJECT):
            return  # its stderr has the same error in words
        shown = log_line(name, line) if self._logs_json else f"{name} | ".encode() + line
        self.printer.line(shown, ERR if self._json else fd)

    def _event(self, words: str, **facts: Any) -> None:
        self._print(words, facts)
        if facts.get("event") == "died" and (known := self._known_as.get(facts["name"])) is not None:
            self._tell_exit(*known, facts["pid"], facts["exit_code"])

    def _print(self, words: str, facts: Mapping[str, Any]) -> None:
        if self._json:
            line = json.dumps(facts)
        elif self._logs_json:
            line = json_line("info", UP_LOGGER, words, time.time(), facts)
        else:
            line = f"rl-plane: {one_line(words)}"
        self.printer.line(line)

    def _tell_exit(self, instance_id: str, engine: str, pid: int, code: int) -> None:
        values = self.values
        subjects = Subjects(values["namespace"], values["component"])
        files = credentials(values, "frontend")
        task = asyncio.create_task(tell_exit(values["nats_url"], files, subjects, instance_id, engine, pid, code))
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    def _print_ready(self) -> None:
        processes, values = self._supervisor.processes, self.values
        frontend = processes["frontend"].facts
        rl_url, http_url = frontend.get("rl_url"), frontend.get("http_url")
        nats_url = one_line(values["nats_url"])
        workers = [
            {
                "name": name,
                "instance_id": processes[name].facts["instance_ids"][0],
                "engine": processes[name].facts["engine"],
                "pid": processes[name].facts["pid"],
            }
            for name in self._workers
        ]
        if self._json or self._logs_json:
            facts = {
                READY: "up",
                "rl_url": rl_url,
                "http_url": http_url,
                "nats_url": nats_url,
                "namespace": values["namespace"],
                "component": values["component"],
                "pid": os.getpid(),
                "nats_pid": self._nats.process.pid if self._nats else None,
                "frontend_pid": frontend.get("pid"),
                "workers": workers,
            }
            self._print(f"rl-plane is up: {counted(len(workers))}", facts)
            return
        lines = [f"rl-plane is up: {values['namespace']}.{values['component']}, {counted(len(workers))}"]
        if rl_url:
            lines.append(f"  steer     {rl_url}/v1/rl/state   (docs: {rl_url}/docs)")
            lines.append(f"  watch     {rl_url}/   (the dashboard, in a browser)")
        if http_url:
            lines.append(f"  generate  {http_url}/v1/completions")
        lines.append(f"  NATS      {nats_url}")
        lines += [f"  {row['name']:<9} {row['instance_id']}  {row['engine']}  pid {row['pid']}" for row in workers]
        if rl_url:
            lines.append(f"  try       rl-plane state --url {rl_url}   (or pause, update DIR, resume)")
        lines.append("  Ctrl-C ends everything")
        for line in lines:
            self.printer.line(line)
