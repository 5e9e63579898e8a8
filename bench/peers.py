"""The processes that a benchmark measures: the workers, frontends, and what they are compared with.

`python -m bench.peers '{"role": …}'` runs one, and prints one line of JSON when it is ready.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nats
from nats.aio.msg import Msg

from bench.bare_path import serve_engine, serve_http
from rl_plane._util.processes import die_with_parent, spare_collector
from rl_plane.bus.server import NatsServer
from rl_plane.protocol.versions import DEFAULT_ALGORITHM, DigestAlgorithm
from rl_plane.weights.hashed_copy import copy
from rl_plane.weights.safetensors_file import SafetensorsFile

STOP_TIMEOUT_S = 10.0
"""A process with 1,000 workers leaves within a second; later it is killed."""

SIZE_DIGITS = 6
MAX_REPLY_BYTES = 10**SIZE_DIGITS - 1

Ready = Callable[[dict[str, Any]], None]


# ---- the parent's side ----


@dataclass(frozen=True, slots=True)
class Peer:
    """A child process that is ready, and what it said of itself."""

    process: subprocess.Popen[str]
    said: dict[str, Any]


def start_peer(role: str, **arguments: Any) -> subprocess.Popen[str]:
    """Starts it without waiting, so that several may start at once."""
    return subprocess.Popen(
        [sys.executable, "-m", "bench.peers", json.dumps({"role": role, **arguments})],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=die_with_parent(),
    )


def await_ready(process: subprocess.Popen[str]) -> Peer:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise SystemExit(f"{process.args!r} ended with {process.wait()} before it was ready")
    return Peer(process, json.loads(line))


@contextmanager
def peers(started: list[subprocess.Popen[str]]) -> Iterator[list[Peer]]:
    """Waits until all are ready; ends them at the end."""
    try:
        yield [await_ready(process) for process in started]
    finally:
        stop_peers(started)


def stop_peers(started: list[subprocess.Popen[str]]) -> None:
    for process in started:
        process.terminate()
    for process in started:
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


@contextmanager
def hf_worker(namespace: str, model: Path, **arguments: Any) -> Iterator[tuple[str, Peer]]:
    """One, and a NATS server of its own, whose URL this gives first."""
    server = NatsServer()
    server.start()
    try:
        how = {"nats_url": server.url, "namespace": namespace, "model": str(model), "copies": 1, "engine": "hf"}
        with peers([start_peer("workers", **how, **arguments)]) as (worker,):
            yield server.url, worker
    finally:
        server.stop()


# ---- the roles ----


def unhashed(data: memoryview, algorithm: DigestAlgorithm = DEFAULT_ALGORITHM) -> str:
    """For a tensor's digest: its first bytes, so that versions differ and are swapped all the same."""
    return bytes(data[:16]).hex().ljust(32, "0")


def copied_unhashed(place: memoryview, data: memoryview, algorithm: DigestAlgorithm) -> str:
    """For a copy that is hashed: only the copy."""
    copy(place, data)
    return unhashed(place)


def filled_unhashed(place: memoryview, read: Callable[[int, memoryview], None], algorithm: DigestAlgorithm) -> str:
    """For a read that is hashed: only the read."""
    read(0, place)
    return unhashed(place)


def _read_unhashed(
    file: SafetensorsFile, offset: int, pieces: Iterable[memoryview], algorithm: DigestAlgorithm
) -> str:
    digest = unhashed(memoryview(b""))
    for number, piece in enumerate(pieces):
        file.read_into(offset, piece)
        offset += len(piece)
        if not number:
            digest = unhashed(piece)
    return digest


def workers(
    ready: Ready,
    *,
    nats_url: str,
    namespace: str,
    model: str,
    copies: int,
    engine: str = "fake",
    engine_args: dict[str, str] | None = None,
    weight_roots: tuple[str, ...] = (),
    verify: bool = True,
    metrics_port: int | None = None,
    nodes: dict[str, Any] | None = None,
) -> None:
    """The real thing: worker processes as `rl-plane worker --engine fake --copies N` makes them. `verify` False: no
    tensor that arrives is hashed. `nodes`: the NodeSettings of one node of an engine over several hosts."""
    import rl_plane.transports.nixl.pull
    import rl_plane.transports.trainer_memory
    import rl_plane.weights.checkpoint
    import worker.receive.staging
    from worker.nodes.node_settings import NodeSettings
    from worker.process import run
    from worker.worker_options import WorkerOptions

    if not verify:
        worker.receive.staging.tensor_digest = unhashed  # type: ignore[attr-defined]
        worker.receive.staging.copy_hashed = copied_unhashed  # type: ignore[attr-defined]
        rl_plane.weights.checkpoint._read_hashed = _read_unhashed
        for module in (rl_plane.transports.nixl.pull, rl_plane.transports.trainer_memory):
            module.read_hashed = filled_unhashed  # type: ignore[attr-defined]
    run(
        WorkerOptions(
            engine,
            Path(model),
            nats_url,
            namespace,
            copies=copies,
            engine_args=engine_args or {},
            drain_s=0.0,
            weight_roots=tuple(map(Path, weight_roots)),
            metrics_port=metrics_port,
            nodes=NodeSettings(**(nodes or {})),
        ),
        lambda instance_ids: ready({"instance_ids": instance_ids}),
    )


def subscribers(ready: Ready, *, nats_url: str, prefix: str, copies: int, reply_bytes: int | None = None) -> None:
    """`copies` connections with one subscription each, which answer a constant and do nothing else. `reply_bytes`:
    None, as long as the request's first SIZE_DIGITS digits say."""
    reply = secrets.token_bytes(MAX_REPLY_BYTES if reply_bytes is None else reply_bytes)

    async def serve() -> None:
        subjects = []
        for _ in range(copies):
            subjects.append(f"{prefix}.{secrets.token_hex(8)}")
            await subscribe(subjects[-1])
        ready({"subjects": subjects})
        await asyncio.Event().wait()

    async def subscribe(subject: str) -> None:
        connection = await nats.connect(nats_url)

        async def answer(message: Msg) -> None:
            own = reply if reply_bytes is not None else reply[: int(message.data[:SIZE_DIGITS])]
            await connection.publish(message.reply, own)

        await connection.subscribe(subject, cb=answer)
        await connection.flush()
        await connection.flush()  # the first may overtake the subscription

    _until_terminated(serve)


def frontend(
    ready: Ready, *, nats_url: str, namespace: str, http: bool = False, record: str | None = None
) -> None:
    """The facade; `http`: and the generation API. `record`: a directory for rollout records."""
    from frontend.main import serve
    from frontend.server.options import FrontendOptions

    def say(urls: dict[str, Any]) -> None:
        spare_collector()
        ready(urls)

    options = FrontendOptions(
        nats_url,
        namespace,
        rl_port=0,
        http_port=0 if http else None,
        record=Path(record) if record is not None else None,
    )
    asyncio.run(serve(options, say))


def empty_route(ready: Ready) -> None:
    """Serves an empty route, to measure what the web framework costs by itself: the facade's server with its settings,
    and nothing behind it."""
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    from frontend.server.listeners import Server, bind, url_of

    async def nothing(request: Request) -> Response:
        return Response()

    app = Starlette(routes=[Route("/", nothing)])

    async def serve() -> None:
        listener = bind("rl_port", "127.0.0.1", 0, None, False)
        server = Server(app)
        serving = asyncio.create_task(server.serve([listener]))
        await server.accepting.wait()
        ready({"rl_url": url_of(listener)})
        await serving

    _until_terminated(serve)


def bare_engine(ready: Ready, *, nats_url: str, tokens: int, pace_s: float) -> None:
    async def serve() -> None:
        await serve_engine(nats_url, tokens, pace_s)
        ready({})
        await asyncio.Event().wait()

    _until_terminated(serve)


def bare_frontend(ready: Ready, *, nats_url: str) -> None:
    async def serve() -> None:
        ready(await serve_http(nats_url))
        await asyncio.Event().wait()

    _until_terminated(serve)


def _until_terminated(serve: Callable[[], Coroutine[Any, Any, None]]) -> None:
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    asyncio.run(serve())


def main() -> None:
    roles: dict[str, Callable[..., None]] = {
        "workers": workers,
        "subscribers": subscribers,
        "frontend": frontend,
        "empty_route": empty_route,
        "bare_engine": bare_engine,
        "bare_frontend": bare_frontend,
    }
    arguments = json.loads(sys.argv[1])
    roles[arguments.pop("role")](lambda said: print(json.dumps(said), flush=True), **arguments)


if __name__ == "__main__":
    main()
