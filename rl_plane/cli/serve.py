"""`rl-plane nats`, `worker` and `frontend`, each alone in the foreground, and `demo`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import subprocess
from typing import Any

import click

from rl_plane._util.descriptors import raise_open_limit
from rl_plane._util.log_format import set_up_logging
from rl_plane._util.plugins import ENGINES, plugins
from rl_plane._util.processes import spare_collector
from rl_plane.bus.key_folder import KeyFolder
from rl_plane.bus.server import CONFIG, LOOK_S, NatsServer
from rl_plane.cli.end_signals import ended_by_signals
from rl_plane.cli.keys import NATS_FILES, credentials_as
from rl_plane.cli.models import default_model
from rl_plane.cli.output import BadSetting, note, one_line, say_ready
from rl_plane.cli.settings import NO_DIALECT, OFF, Command, command, pairs
from rl_plane.cli.span_export import OTEL, spans_of
from rl_plane.errors import BusUnreachable
from rl_plane.protocol.subjects import DEFAULT_NATS_URL

BUS = ("nats_url", *NATS_FILES, "namespace", "component")
ENGINE = (
    "model",
    "model_name",
    "task",
    "logprobs_mode",
    "weight_roots",
    "weight_urls",
    "dtype",
    "device",
    "engine_args",
    "engine_args_file",
    "deterministic",
    "enable_memory_saver",
    "engine_hang_s",
)
LOG = ("log_level", "log_format")
METRICS = ("metrics_port", "metrics_host", "metrics_key")
NODES = ("nnodes", "node_rank", "dist_init_addr", "node_wait_s")
WORKER = (
    *BUS,
    "engine",
    *ENGINE,
    *NODES,
    *METRICS,
    "liveness_timeout_s",
    "drain_s",
    "instance_id",
    "copies",
    *OTEL,
    *LOG,
    "json",
)
LISTENERS = (
    "also_serve",
    "host",
    "rl_port",
    "http_port",
    "admin_key",
    "api_key",
    "keys_file",
    "insecure",
    "allowed_hosts",
    "https_cert",
    "https_key",
    "dialects",
    "part_timeout_s",
    "expect",
    "liveness_timeout_s",
)
FRONTEND = (*BUS, *LISTENERS, "record", "record_files", "drain_s", *OTEL, *LOG, "json")

LOOPBACK = ("127.0.0.1", "::1", "localhost")


def commands() -> list[click.Command]:
    nats = "Run the embedded nats-server in the foreground."
    return [
        command("nats", nats, run_nats, ("nats_port", "nats_host", "store", "keys", "json")),
        command("worker", "Run one engine, and register it in the fleet.", run_worker, WORKER),
        command("frontend", "Serve /v1/rl/* and generation over HTTP.", run_frontend, FRONTEND),
    ]


def demo_command() -> click.Command:
    doc = "Train a tiny policy with a fleet. In the middle a worker dies, and another joins."
    return command("demo", doc, run_demo, ("out", "steps", "seed", "model", "engine"))


def check_engine(name: str | None) -> str:
    """The name of an installed engine. BadSetting lists the engines that are installed."""
    known = sorted(plugins(ENGINES))
    if name is None:
        raise BadSetting("no engine is named", field="--engine", fix=f"--engine with one of {', '.join(known)}")
    if name not in known:
        raise BadSetting(
            f"there is no engine {name[:64]!r}", field="--engine", fix=f"use one of {', '.join(known) or 'none'}"
        )
    return name


def run_nats(given: Command) -> int:
    """Runs nats-server until a signal."""
    values = given.values
    config = KeyFolder(values["keys"]).config if values["keys"] is not None else CONFIG
    if values["nats_host"] not in LOOPBACK and values["keys"] is None:
        note(
            f"rl-plane: any host that reaches {values['nats_host']} may use this server: use a private network, "
            "or --keys"
        )
    with ended_by_signals():
        server = NatsServer(
            host=values["nats_host"], port=values["nats_port"], store=values["store"], config=config
        )
        try:
            server.start()
            url = server.url
            say_ready(values["json"], "nats", f"nats-server is ready: {url}", nats_url=url, pid=server.process.pid)
            code = _watch_nats(server)
            raise BusUnreachable(f"nats-server ended with exit code {code}", fix="start it again")
        finally:
            server.stop()
    return 0


def _watch_nats(server: NatsServer) -> int:
    """Passes the server's errors on, and restarts it when that helps. Returns the code with which it has ended."""
    while True:
        code: int | None = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = server.process.wait(LOOK_S)
        for line in server.new_errors():
            note(f"rl-plane: nats-server: {one_line(line)}")
        if code is not None:
            return code
        if server.needs_restart:
            note("rl-plane: the disk has room again: nats-server starts again")
            server.restart()


def run_worker(given: Command) -> int:
    """Runs one worker until a signal or its engine's death."""
    values = given.values
    engine = check_engine(values["engine"])
    _set_up_logging(values)

    from worker.nodes.node_settings import NodeSettings
    from worker.process import run
    from worker.worker_options import WorkerOptions

    nodes = NodeSettings(*(values[name] for name in NODES))
    options = WorkerOptions(
        engine=engine,
        model=values["model"] or default_model([engine]),
        nats_url=values["nats_url"] or DEFAULT_NATS_URL,
        credentials=credentials_as(values, "worker"),
        engine_args=pairs(values["engine_args"]),
        nodes=nodes,
        metrics_port=None if values["metrics_port"] == OFF else values["metrics_port"],
        **_picked(
            values,
            "namespace component model_name task logprobs_mode dtype device engine_args_file weight_roots weight_urls "
            "instance_id copies deterministic enable_memory_saver liveness_timeout_s engine_hang_s drain_s "
            "metrics_host metrics_key",
        ),
    )

    def ready(instance_ids: list[str]) -> None:
        shown = ", ".join(instance_ids) if len(instance_ids) <= 3 else f"{len(instance_ids)} workers"
        part = f"node {nodes.rank} of worker" if nodes.rank else "worker"
        say_ready(
            values["json"],
            "worker",
            f"{part} is ready: {shown} ({engine}, {options.namespace}.{options.component})",
            instance_ids=instance_ids,
            node_rank=nodes.rank,
            engine=engine,
            namespace=options.namespace,
            component=options.component,
            pid=os.getpid(),
        )

    with spans_of(values, "rl_plane.worker", values["instance_id"]):
        return run(options, ready)


def run_frontend(given: Command) -> int:
    """Serves HTTP until a signal."""
    values = given.values
    _set_up_logging(values)
    raise_open_limit()  # the import reads the limit

    from frontend.main import serve
    from frontend.server.options import FrontendOptions

    if NO_DIALECT in values["dialects"]:
        if len(values["dialects"]) > 1:
            raise BadSetting(
                "none is given beside a dialect", field="--dialects", fix="name dialects, or none alone"
            )
        values["dialects"] = ()
    for port in ("rl_port", "http_port"):
        if values[port] == OFF:
            values[port] = None
    options = FrontendOptions(
        nats_url=values["nats_url"] or DEFAULT_NATS_URL,
        credentials=credentials_as(values, "frontend"),
        **_picked(values, f"namespace component drain_s record record_files {' '.join(LISTENERS)}"),
    )

    def ready(urls: dict[str, Any]) -> None:
        rl_url, http_url = urls["rl_url"] or "no port", urls["http_url"] or "no port"
        words = f"frontend is ready: /v1/rl on {rl_url}, generation on {http_url}"
        spare_collector()
        say_ready(values["json"], "frontend", words, **urls, pid=os.getpid())

    with spans_of(values, "rl_plane.frontend"):
        asyncio.run(serve(options, ready))
    return 0


def run_demo(given: Command) -> int:
    """Runs the demo to its end."""
    from rl_plane.demo import run as demo

    engine = check_engine(given.values["engine"] or "hf")
    return demo.run(engine=engine, **_picked(given.values, "out steps seed model"))


def _picked(values: dict[str, Any], names: str) -> dict[str, Any]:
    return {name: values[name] for name in names.split()}


def _set_up_logging(values: dict[str, Any]) -> None:
    set_up_logging(values["log_level"], values["log_format"])
    if values["log_level"] == "info":
        # uvicorn repeats our own lines about the start and the end.
        logging.getLogger("uvicorn").setLevel(logging.WARNING)
