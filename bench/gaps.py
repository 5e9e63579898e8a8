"""Measures how long a client's token stream stands still while the fleet takes a new model, beside a bare copy of its
bytes."""

from __future__ import annotations

import asyncio
import secrets
import statistics
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import numpy as np

from bench.fanout import JOIN_TIMEOUT_S
from bench.peers import hf_worker, peers, start_peer
from bench.phases import phases_seen
from bench.streams import request_of
from rl_plane.client import RlClient
from rl_plane.commit.steps import Phase

SHAPE_500_MB = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
"""The shape for `make_tiny_model`, in float32: few and wide layers."""
COPIES = 5
"""After each update; their median counts."""
TOKENS = 16
"""Before an update, for the usual time between two; and after it."""
MAX_TOKENS = 4000
"""A stream that is left before it ends."""
UPDATE_TIMEOUT_S = 120.0
TOKEN_TIMEOUT_S = 60.0

Way = Literal["staged", "unstaged"]
POLICIES: dict[Way, dict[str, str]] = {
    "staged": {"canary": "off"},
    "unstaged": {"canary": "off", "staging": "none"},
}
"""A canary takes a forward within the pause, which on a CPU is longer than all the rest of it."""


@dataclass(slots=True)
class GapTimes:
    """Seconds, a number for each round."""

    nbytes: int
    copies: dict[Way, list[float]] = field(default_factory=lambda: {way: [] for way in POLICIES})
    gaps: dict[Way, list[float]] = field(default_factory=lambda: {way: [] for way in POLICIES})
    """The longest time between two tokens while the engine is paused, less the usual one just before the update."""
    meanwhile: list[float] = field(default_factory=list)
    """The slowest step while the worker stages the weights. The engine generates meanwhile, with less of the cores."""


@dataclass(frozen=True, slots=True)
class Gap:
    while_paused: float
    while_staged: float


class Copy:
    """Copies so many bytes, between two buffers that are there already; one thread, as the engine has."""

    def __init__(self, nbytes: int) -> None:
        self._source = np.ones(nbytes, dtype=np.uint8)
        self._target = np.ones(nbytes, dtype=np.uint8)

    def __call__(self) -> float:
        start = time.perf_counter()
        np.copyto(self._target, self._source)
        return time.perf_counter() - start


async def _tokens(http_url: str) -> AsyncGenerator[float, None]:
    """The time at which each part of one stream came."""
    where = urlsplit(http_url)
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    request = request_of(
        {
            "prompt": "",
            "prompt_token_ids": [5, 6, 7],
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
    )
    writer.write(request)
    try:
        status = await reader.readline()
        if b" 200 " not in status:
            raise SystemExit(f"POST /v1/completions: {status.decode().strip()}")
        while line := await asyncio.wait_for(reader.readline(), TOKEN_TIMEOUT_S):
            if line.startswith(b"data: "):
                yield time.perf_counter()
    finally:
        writer.close()
        await writer.wait_closed()


async def _gap(client: RlClient, http_url: str, model: Path, way: Way) -> Gap:
    times: list[float] = []
    updating: asyncio.Task[object] | None = None
    left = 0
    body = {"transport": {"backend": "filesystem", "path": str(model)}, "policy": POLICIES[way]}
    with phases_seen() as seen:
        async with asyncio.timeout(UPDATE_TIMEOUT_S), aclosing(_tokens(http_url)) as tokens:
            async for came in tokens:
                times.append(came)
                if len(times) == TOKENS:
                    updating = asyncio.create_task(client.run("update_weights", body))
                elif updating is not None and updating.done():
                    left += 1
                    if left == TOKENS:
                        break
    assert updating is not None
    await updating
    between = list(pairwise(times))
    usual = statistics.median(end - start for start, end in between[1 : TOKENS - 1])  # the first is the prompt's

    def longest(*phases: Phase) -> float:
        start = min(one.start for one in seen if one.phase in phases)
        end = max(one.end for one in seen if one.phase in phases)
        return max(after - before for before, after in between if after > start and before < end) - usual

    return Gap(longest("prepare", "commit") if way == "unstaged" else longest("commit"), longest("prepare"))


async def measure_gaps(models: Sequence[Path], rounds: int) -> GapTimes:
    """One `hf` worker behind a frontend. `models`: two of one shape."""
    nbytes = sum(path.stat().st_size for path in models[0].glob("*.safetensors"))
    times, copy = GapTimes(nbytes), Copy(nbytes)
    namespace = f"gaps{secrets.token_hex(2)}"
    with ExitStack() as stack:
        url, _ = stack.enter_context(hf_worker(namespace, models[0], weight_roots=[str(models[0].parent)]))
        front = start_peer("frontend", nats_url=url, namespace=namespace, http=True)
        (frontend,) = stack.enter_context(peers([front]))
        async with await RlClient.connect(url, namespace) as client:
            await client.wait_for(1, JOIN_TIMEOUT_S)
            count = 0
            for number in range(-1, rounds):  # the first one warms caches
                for way in POLICIES:
                    count += 1
                    gap = await _gap(client, frontend.said["http_url"], models[count % len(models)], way)
                    copied = statistics.median(copy() for _ in range(COPIES))
                    if number >= 0:
                        times.gaps[way].append(gap.while_paused)
                        times.copies[way].append(copied)
                        if way == "staged":
                            times.meanwhile.append(gap.while_staged)
    return times
