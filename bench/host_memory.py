"""`python -m bench.host_memory`: how much host memory an update adds to a worker of vLLM or SGLang, by its ranks.

The worker's process, its host agent and all processes of the engine count, each with its PSS: memory that several
processes map counts once. The benchmark compares these moments with the state before the first staged update:

* The new weights are staged beside the served ones.
* The new weights are swapped in, and their memory waits for the next update.
* The worker keeps a copy of the version for deltas and healing.

With `--hosts` the ranks are on two nodes of one engine, each measured by itself; both are on this machine, so what they
share counts half for each.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import re
import socket
import tempfile
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil

from bench.gaps import SHAPE_500_MB
from bench.peers import peers, start_peer
from bench.staged import from_files, stage
from rl_plane.bus.server import NatsServer
from rl_plane.client import RlClient
from rl_plane.protocol.update_requests import UpdatePolicy
from rl_plane.protocol.versions import WeightVersion
from worker.engines.base import EngineOptions
from worker.testing.tiny_model import make_tiny_model

ARGUMENTS = {
    "vllm": {"kv_cache_memory_bytes": str(32 << 20), "max_model_len": "512"},
    "sglang": {"context_length": "512"},
}
RANKS = {"vllm": "tensor_parallel_size", "sglang": "tp_size"}
NODES = 2
NAMESPACE = "host-memory"
HEAD = ("engine, ranks", "staged MB", "÷ model", "after the swap MB", "÷ model", "kept MB", "÷ model")
_names = (f"bench-{number}" for number in itertools.count())
_PSS = re.compile(r"^Pss: +(\d+) kB$", re.MULTILINE)


def pss(pids: Iterable[int]) -> int:
    """The memory of these processes in bytes, with what they share counted once."""
    total = 0
    for pid in pids:
        found = _PSS.search(Path(f"/proc/{pid}/smaps_rollup").read_text())
        assert found is not None, "Linux 4.14 has it"
        total += int(found.group(1)) << 10
    return total


class Worker:
    """An engine in this process, without NATS."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def memory(self) -> int:
        return pss([os.getpid(), *self._engine.process.pids()])

    async def stage(self, model: Path, **more: Any) -> str:
        name = next(_names)
        await stage(self._engine, name, from_files(model), **more)
        return name

    async def overwrite(self, model: Path) -> None:
        await self._engine.pause("keep", False)
        await self.stage(model, staging="none")
        await self._engine.resume()

    async def swap(self, name: str) -> None:
        await self._engine.pause("keep", False)
        await self._engine.swap(name, WeightVersion("bench", next(_numbers), name, "xxh3:" + "0" * 32))
        await self._engine.resume()


_numbers = itertools.count(1)


async def measure(kind: str, ranks: int, models: list[Path]) -> tuple[int, int, int]:
    """Bytes beyond those before the update: staged, swapped in with nothing kept, and kept."""
    extra = {**ARGUMENTS[kind], RANKS[kind]: str(ranks)}
    engine: Any = import_module(f"worker.engines.{kind}.adapter").build(
        EngineOptions(models[0], extra=extra, weight_roots=(models[0].parent,))
    )
    await engine.start()
    try:
        worker = Worker(engine)
        await worker.overwrite(models[1])  # the first update loads libraries, too
        before = worker.memory()
        name = await worker.stage(models[0])
        staged = worker.memory() - before
        await worker.swap(name)
        swapped = worker.memory() - before
        await worker.swap(await worker.stage(models[1], keep_staged=True))
        return staged, swapped, worker.memory() - before
    finally:
        await engine.close()


async def measure_hosts(kind: str, models: list[Path]) -> list[tuple[int, int]]:
    """Bytes of each of two nodes with a rank each, beyond those before the update: swapped in, and kept."""
    server = NatsServer()
    server.start()
    try:
        with socket.create_server(("127.0.0.1", 0)) as free:
            address = f"127.0.0.1:{free.getsockname()[1]}"
        started = [
            start_peer(
                "workers",
                nats_url=server.url,
                namespace=NAMESPACE,
                model=str(models[0]),
                copies=1,
                engine=kind,
                engine_args={**ARGUMENTS[kind], RANKS[kind]: str(NODES)},
                weight_roots=[str(models[0].parent)],
                nodes={"count": NODES, "rank": rank, "address": address},
            )
            for rank in range(NODES)
        ]
        with peers(started) as nodes:
            async with await RlClient.connect(server.url, NAMESPACE) as client:
                return await _measured_updates(client, models, [node.process.pid for node in nodes])
    finally:
        server.stop()


async def _measured_updates(client: RlClient, models: list[Path], pids: list[int]) -> list[tuple[int, int]]:
    async def update(number: int, policy: UpdatePolicy) -> list[int]:
        await client.update_weights(from_files(models[number % 2]), policy=policy)
        return [pss([pid, *(one.pid for one in psutil.Process(pid).children(recursive=True))]) for pid in pids]

    before = await update(1, UpdatePolicy(staging="none"))  # the first update loads libraries, too
    swapped, kept = await update(2, UpdatePolicy()), await update(3, UpdatePolicy(keep_staged=True))
    return [(one - first, other - first) for first, one, other in zip(before, swapped, kept, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.host_memory", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tiny model: to see that it runs")
    parser.add_argument("--engine", choices=sorted(RANKS), help="one engine")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--ranks", type=int, help="one number of ranks")
    which.add_argument("--hosts", action="store_true", help="only two ranks on two nodes")
    arguments = parser.parse_args()
    numbers = [arguments.ranks] if arguments.ranks else [1, 2]
    if arguments.hosts:
        numbers = []
    print("| " + " | ".join(HEAD) + " |\n" + "|---" * len(HEAD) + "|")
    with tempfile.TemporaryDirectory(prefix="rl-plane-bench-") as scratch:
        shape = {} if arguments.quick else SHAPE_500_MB
        parent = Path(scratch) / "models"
        parent.mkdir()
        models = [make_tiny_model(parent / str(seed), seed, "bfloat16", **shape) for seed in range(2)]
        nbytes = (models[0] / "model.safetensors").stat().st_size
        for kind in [arguments.engine] if arguments.engine else sorted(RANKS):
            for ranks in numbers:
                _bind_ranks(ranks)
                _print_row(f"{kind}, {ranks}", nbytes, *asyncio.run(measure(kind, ranks, models)))
            if not arguments.ranks:
                _bind_ranks(NODES)
                for node, found in enumerate(asyncio.run(measure_hosts(kind, models))):
                    _print_row(f"{kind}, {NODES} on {NODES} hosts, node {node}", nbytes, None, *found)


def _bind_ranks(ranks: int) -> None:
    """Gives each rank of an SGLang engine that starts from now on a core of its own, where there are enough."""
    cores = sorted(os.sched_getaffinity(0))
    if ranks <= len(cores):
        os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(map(str, cores[:ranks]))


def _print_row(what: str, nbytes: int, *found: int | None) -> None:
    pairs = [("–", "–") if one is None else (f"{one / 1e6:,.0f}", f"{one / nbytes:.2f}") for one in found]
    print(f"| {what} | " + " | ".join(cell for pair in pairs for cell in pair) + " |", flush=True)


if __name__ == "__main__":
    main()
