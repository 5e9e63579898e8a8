"""`python -m bench.host_memory`: how much host memory an update adds to a worker of vLLM or SGLang, by its ranks.

The worker's process, its host agent and all processes of the engine count, each with its PSS: memory that several
processes map counts once. Measured beside the state before the first staged update: when the new weights are staged
beside the served ones; when they are swapped in, and their memory waits for the next update; and when the version is
kept for deltas and healing.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import re
import tempfile
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

from bench.gaps import SHAPE_500_MB
from rl_plane._util.tasks import never
from rl_plane.protocol.update_requests import ReceiveRequest, Transport
from rl_plane.protocol.versions import WeightVersion
from worker.engines.base import EngineOptions
from worker.testing.tiny_model import make_tiny_model

ARGUMENTS = {
    "vllm": {"kv_cache_memory_bytes": str(32 << 20), "max_model_len": "512"},
    "sglang": {"context_length": "512"},
}
RANKS = {"vllm": "tensor_parallel_size", "sglang": "tp_size"}
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
        transport = Transport.model_validate({"backend": "filesystem", "path": str(model)})
        request = ReceiveRequest(update_id=name, transport=transport, label=name, **more)
        await asyncio.to_thread(self._engine.open, name, request)
        await asyncio.to_thread(self._engine.receive, name, never)
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


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.host_memory", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tiny model: to see that it runs")
    parser.add_argument("--engine", choices=sorted(RANKS), help="one engine")
    parser.add_argument("--ranks", type=int, help="one number of ranks")
    arguments = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    print("| " + " | ".join(HEAD) + " |\n" + "|---" * len(HEAD) + "|")
    with tempfile.TemporaryDirectory(prefix="rl-plane-bench-") as scratch:
        shape = {} if arguments.quick else SHAPE_500_MB
        parent = Path(scratch) / "models"
        parent.mkdir()
        models = [make_tiny_model(parent / str(seed), seed, "bfloat16", **shape) for seed in range(2)]
        nbytes = (models[0] / "model.safetensors").stat().st_size
        for kind in [arguments.engine] if arguments.engine else sorted(RANKS):
            for ranks in [arguments.ranks] if arguments.ranks else [1, 2]:
                if ranks <= len(cores):
                    os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(map(str, cores[:ranks]))
                found = asyncio.run(measure(kind, ranks, models))
                cells = [cell for one in found for cell in (f"{one / 1e6:,.0f}", f"{one / nbytes:.2f}")]
                print(f"| {kind}, {ranks} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
