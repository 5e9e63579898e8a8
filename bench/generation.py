"""Streams of tokens through frontends, beside the same engine without the plane.

(a) The `fake` engine, called in this process: what is left is the plane's. *Paced*, it makes a token every 20 ms, as a
real model does, and what counts is how much later a client has its tokens; *unpaced*, it is as fast as it can be.
Beside it the bare path: the same processes with nothing in them.
(b) vLLM's own OpenAI server, on the same tiny model with the same arguments.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import secrets
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.fanout import JOIN_TIMEOUT_S
from bench.peers import await_ready, start_peer, stop_peers
from bench.streams import Heard, Round, Streams
from rl_plane._util.processes import die_with_parent
from rl_plane.bus.server import NatsServer
from rl_plane.client import RlClient
from rl_plane.protocol.generation import GenerateRequest
from worker.engines.base import EngineOptions
from worker.engines.fake.adapter import FakeEngine

PACE_S = 0.02
"""Between two tokens of a paced stream."""
TOKENS, QUICK_TOKENS = 64, 8
"""The tokens of each stream."""
WARM_UP = 1
"""Rounds that do not count."""
PROMPT = [11, 12, 13]
SERVER_START_S = 240.0
"""vLLM's server imports torch three times, on cores that are busy."""
VLLM_ARGUMENTS = {"max_model_len": "2048", "max_num_seqs": "256", "kv_cache_memory_bytes": str(256 << 20)}
"""The arguments of our worker and of vLLM's own server."""
FRONTEND, NATS_SERVER, WORKER, VLLM_SERVER = "a frontend", "nats-server", "a worker", "vLLM's server"
PROCESSES = FRONTEND, NATS_SERVER, WORKER
"""The processes whose CPU time is reported. What runs a model beside the worker, or beside vLLM's server, is not: it
does the same."""
BODY: dict[str, Any] = {"prompt": PROMPT, "temperature": 0, "ignore_eos": True, "stream": True}


@dataclass(slots=True)
class StreamTimes:
    """Rounds of so many streams, side by side: way → its rounds."""

    streams: int
    rounds: dict[str, list[Round]] = field(default_factory=dict)

    def firsts(self, way: str) -> list[float]:
        return [statistics.median(one.first_s for one in each.streams) for each in self.rounds[way]]

    def per_thousand(self, way: str) -> list[float]:
        return [each.per_thousand_s for each in self.rounds[way]]

    def cpu_per_thousand(self, way: str, *names: str) -> list[float]:
        return [each.cpu_per_thousand_s(*names) for each in self.rounds[way]]


@dataclass(frozen=True, slots=True)
class Fleet:
    """One worker behind frontends."""

    urls: list[str]
    processes: dict[str, int]
    """Their names, PROCESSES, and pids; of the frontends the first one."""
    rl_url: str
    """The facade of the first frontend."""


async def direct_round(engine: FakeEngine, count: int, tokens: int) -> Round:
    """The engine's streams, read in this process."""

    async def one(number: int) -> Heard:
        request = GenerateRequest(
            id=secrets.token_hex(8), prompt_token_ids=[*PROMPT, 3 + number], max_tokens=tokens, temperature=0.0
        )
        start, first, made = time.perf_counter(), 0.0, 0
        async with aclosing(engine.generate(request)) as deltas:  # type: ignore[type-var]
            async for delta in deltas:
                first = first or time.perf_counter()
                made += len(delta.token_ids)
        return Heard(first - start, made)

    start = time.perf_counter()
    heard = await asyncio.gather(*(one(number) for number in range(count)))
    return Round(heard, time.perf_counter() - start)


async def measure_fake(model: Path, sizes: Sequence[int], rounds: int, tokens: int) -> list[StreamTimes]:
    """Ways: `direct`, `bare` and `plane`, paced, and `whole`, likewise without a stream; `unpaced` and `two frontends`,
    as fast as they can."""
    found = []
    async with (
        fleet(model, "fake", {"token_delay_s": str(PACE_S)}, 1) as paced,
        fleet(model, "fake", {}, 2) as fast,
        _bare_path(tokens) as bare_url,
    ):
        engine = FakeEngine(EngineOptions(model, extra={"token_delay_s": str(PACE_S)}), {})
        await engine.start()
        body = {**BODY, "max_tokens": tokens}
        one, bare = Streams(paced.urls, paced.processes), Streams([bare_url])
        quick, two = Streams(fast.urls[:1], fast.processes), Streams(fast.urls)
        for size in sizes:
            times = StreamTimes(
                size, {name: [] for name in ("direct", "bare", "plane", "whole", "unpaced", "two frontends")}
            )
            for number in range(-WARM_UP, rounds):
                measured = {
                    "direct": await direct_round(engine, size, tokens),
                    "bare": await bare.run(size, body, tokens),
                    "plane": await one.run(size, body, tokens),
                    "whole": await one.run(size, {**body, "stream": False}, tokens),
                    "unpaced": await quick.run(size, body, tokens),
                    "two frontends": await two.run(size, body, tokens),
                }
                keep(times, measured, number)
            found.append(times)
        await engine.close()
    return found


async def measure_vllm(model: Path, sizes: Sequence[int], rounds: int, tokens: int) -> list[StreamTimes]:
    """Ways: `plane` and `vllm`, its own server, and each with whole replies. Both are up all the time, and are asked in
    turn."""
    found = []
    with _VllmServer(model) as theirs:
        async with fleet(model, "vllm", VLLM_ARGUMENTS, 1) as ours:
            await asyncio.to_thread(theirs.wait)
            body = {**BODY, "max_tokens": tokens}
            one, other = (
                Streams(ours.urls, ours.processes),
                Streams([theirs.url], {VLLM_SERVER: theirs.process.pid}),
            )
            for size in sizes:
                times = StreamTimes(size, {name: [] for name in ("plane", "vllm", "plane whole", "vllm whole")})
                for number in range(-WARM_UP, rounds):
                    ways: list[tuple[str, Streams]] = [("plane", one), ("vllm", other)]
                    if number % 2:
                        ways.reverse()
                    measured = {name: await way.run(size, body, tokens) for name, way in ways}
                    for name, way in ways:
                        measured[f"{name} whole"] = await way.run(size, {**body, "stream": False}, tokens)
                    keep(times, measured, number)
                found.append(times)
    return found


def have_vllm() -> bool:
    return importlib.util.find_spec("vllm") is not None


def keep(times: StreamTimes, measured: dict[str, Round], number: int) -> None:
    """Keeps one round of each way. A round with a negative number is for warming up."""
    if number >= 0:
        for name, one in measured.items():
            times.rounds[name].append(one)


@asynccontextmanager
async def fleet(
    model: Path,
    engine: str,
    arguments: dict[str, str],
    frontends: int,
    *,
    record: Path | None = None,
    metrics_port: int | None = None,
) -> AsyncIterator[Fleet]:
    """Runs a worker, its frontends and a nats-server.

    `record`: the frontends record rollouts there. `metrics_port`: of the
    worker's page of metrics.
    """
    with ExitStack() as stack:
        server = NatsServer()
        server.start()
        stack.callback(server.stop)
        namespace = f"streams{secrets.token_hex(2)}"
        started = [
            start_peer(
                "workers",
                nats_url=server.url,
                namespace=namespace,
                model=str(model),
                copies=1,
                engine=engine,
                engine_args=arguments,
                metrics_port=metrics_port,
            ),
            *(
                start_peer(
                    "frontend",
                    nats_url=server.url,
                    namespace=namespace,
                    http=True,
                    record=str(record) if record is not None else None,
                )
                for _ in range(frontends)
            ),
        ]
        stack.callback(stop_peers, started)
        ready = [await asyncio.to_thread(await_ready, one) for one in started]
        async with await RlClient.connect(server.url, namespace) as client:
            await client.wait_for(1, JOIN_TIMEOUT_S)
            pids = [ready[1].process.pid, server.process.pid, ready[0].process.pid]
            urls = [peer.said["http_url"] for peer in ready[1:]]
            yield Fleet(urls, dict(zip(PROCESSES, pids, strict=True)), ready[1].said["rl_url"])


@asynccontextmanager
async def _bare_path(tokens: int) -> AsyncIterator[str]:
    """The URL at which it takes requests."""
    with ExitStack() as stack:
        server = NatsServer()
        server.start()
        stack.callback(server.stop)
        engine = start_peer("bare_engine", nats_url=server.url, tokens=tokens, pace_s=PACE_S)
        started = [engine, start_peer("bare_frontend", nats_url=server.url)]
        stack.callback(stop_peers, started)
        _, frontend = [await asyncio.to_thread(await_ready, one) for one in started]
        yield frontend.said["http_url"]


class NotUp(Exception):
    """There is nothing to compare with."""


class _VllmServer:
    """A server as `vllm serve` starts it."""

    def __init__(self, model: Path) -> None:
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        flags = [f"--{key.replace('_', '-')}={value}" for key, value in VLLM_ARGUMENTS.items()]
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
                *("--host", "127.0.0.1", "--port", str(port), "--enforce-eager", "--disable-log-stats"),
                *("--uvicorn-log-level", "warning", *flags),
            ],
            env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"},
            stdout=subprocess.DEVNULL,
            preexec_fn=die_with_parent(),
        )

    def wait(self) -> None:
        give_up = time.monotonic() + SERVER_START_S
        while True:
            if self.process.poll() is not None or time.monotonic() > give_up:
                raise NotUp(f"vLLM's own server did not start: exit code {self.process.poll()}, see above")
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except OSError:
                time.sleep(0.5)

    def __enter__(self) -> _VllmServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
