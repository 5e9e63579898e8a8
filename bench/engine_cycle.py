"""`python -m bench.engine_cycle [--device cuda] [--gb 4]`: an engine's whole update cycle on one device, without NATS.

One `hf` engine generates a stream of tokens while it takes one model after the other. It receives, checks and hashes a
model in host memory while it generates. Then it pauses, swaps and resumes. The benchmark checks that every token is of
the weights that its span names. Beside the pause it reports two copies of as many bytes: between two buffers on the
device, and from the host. No update from host memory can be faster than the copy from the host.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from bench.staged import from_files, stage
from rl_plane.protocol.generation import GenerateDelta, GenerateRequest
from rl_plane.protocol.versions import WeightVersion
from worker.engines.base import EngineAdapter, EngineOptions
from worker.engines.capabilities import CanCheckWeights, require
from worker.engines.hf.adapter import build
from worker.testing.tiny_model import make_witness_model, witness_next_token

SEEDS = (1, 2)
"""Two models of one shape, whose greedy tokens tell them apart."""
LAYER = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
LAYER_BYTES = 2 * (2048 * 128 * (16 + 8 + 8 + 16) + 3 * 2048 * 8192)
"""In bfloat16."""
SMALL = {"num_hidden_layers": 2}
COPIES = 10
WAIT_S = 120.0


@dataclass(slots=True)
class Times:
    """Seconds, one for each round."""

    staged: list[float] = field(default_factory=list)
    paused: list[float] = field(default_factory=list)
    overwritten: list[float] = field(default_factory=list)


class Reader:
    """One endless stream; each token is compared with what the weights that made it say."""

    def __init__(self, engine: EngineAdapter) -> None:
        self.tokens = 0
        self.versions: set[str] = set()
        self._last = 7
        self._engine = engine
        self._span: dict[str, Any] = {}

    async def read(self, max_tokens: int) -> None:
        request = GenerateRequest(
            id="stream", prompt_token_ids=[self._last], max_tokens=max_tokens, temperature=0.0, ignore_eos=True
        )
        async for delta in self._engine.generate(request):
            self._take(delta)

    def _take(self, delta: GenerateDelta) -> None:
        start = self.tokens
        spans = {position: span for span in delta.spans or () for position in range(span.start, span.end)}
        for position, token in enumerate(delta.token_ids, start):
            span = spans.get(position)
            self._span = {"version": span.version} if span is not None else self._span
            label = self._span["version"]
            wanted = witness_next_token(int(label), self._last)
            if token != wanted:
                raise SystemExit(f"token {position} is {token}: the weights {label} say {wanted}")
            self.versions.add(label)
            self._last = token
        self.tokens += len(delta.token_ids)

    async def until_more(self, reading: asyncio.Task[None], tokens: int = 5) -> None:
        wanted, give_up = self.tokens + tokens, time.monotonic() + WAIT_S
        while self.tokens < wanted:
            if reading.done():
                await reading
                raise SystemExit("the stream has ended")
            if time.monotonic() > give_up:
                raise SystemExit("no tokens come")
            await asyncio.sleep(0.005)


async def cycle(device: str, models: dict[int, Path], rounds: int) -> tuple[Times, dict[str, Any]]:
    root = models[SEEDS[0]].parent
    engine = build(EngineOptions(models[SEEDS[0]], device=device, weight_roots=(root,)))
    info = await engine.start()
    times, names = Times(), (f"staging-{number}" for number in itertools.count())
    sequences = itertools.count(1)

    def version(seed: int, digest: str) -> WeightVersion:
        return WeightVersion("bench", next(sequences), str(seed), digest)

    async def staged(seed: int) -> tuple[str, WeightVersion]:
        staging = next(names)
        reply = await stage(engine, staging, from_files(models[seed]))
        return staging, version(seed, reply["digest"])

    try:
        if "filesystem" not in info.transports:
            raise SystemExit("rl_plane is not installed, only unpacked: bench/README.md says how, offline too")
        engine.set_version(version(SEEDS[0], "own"))
        reader = Reader(engine)
        reading = asyncio.create_task(reader.read(info.max_model_len - 1))
        await reader.until_more(reading)
        checksums: dict[str, Any] = {}
        for number in range(rounds):
            seed = SEEDS[(number + 1) % 2]
            start = time.perf_counter()
            name, made = await staged(seed)
            times.staged.append(time.perf_counter() - start)
            start = time.perf_counter()
            await engine.pause("keep", False)
            await engine.swap(name, made)
            await engine.resume()
            times.paused.append(time.perf_counter() - start)
            await reader.until_more(reading)
            checksum = (await require(engine, CanCheckWeights).check_weights("checksum"))[0]["checksum"]
            if checksums.setdefault(str(seed), checksum) != checksum:
                raise SystemExit(f"the weights {seed} have another checksum than before")
            if len(set(checksums.values())) != len(checksums):
                raise SystemExit("two models have one checksum")
        await engine.abort(None)
        await reading
        await engine.pause("keep", False)
        start = time.perf_counter()
        reply = await stage(engine, next(names), from_files(models[SEEDS[0]]), staging="none")
        engine.set_version(version(SEEDS[0], reply["digest"]))
        await engine.resume()
        times.overwritten.append(time.perf_counter() - start)
        if (await require(engine, CanCheckWeights).check_weights("checksum"))[0]["checksum"] != checksums.get(
            str(SEEDS[0])
        ):
            raise SystemExit("written over the served weights, they have another checksum")
        nbytes = sum(spec.nbytes for spec in engine.receiver.weight_spec().values())
        return times, {"tokens": reader.tokens, "versions": len(reader.versions), "nbytes": nbytes}
    finally:
        await engine.close()


def copy_s(target: torch.Tensor, source: torch.Tensor, settle: Callable[[], None]) -> float:
    """Seconds to copy one buffer over the other; the median of some."""
    times = []
    for _ in range(COPIES + 1):
        settle()
        start = time.perf_counter()
        target.copy_(source)
        settle()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.engine_cycle", description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--gb", type=float, default=4.0, help="size of the model; 0: a tiny one")
    parser.add_argument("--rounds", type=int, default=6)
    arguments = parser.parse_args()
    on_gpu = arguments.device.startswith("cuda")
    layers = round(arguments.gb * 1e9 / LAYER_BYTES)
    shape = {**LAYER, "num_hidden_layers": layers} if layers else SMALL
    with tempfile.TemporaryDirectory() as scratch:
        models = {
            seed: make_witness_model(Path(scratch) / f"model{seed}", seed, "bfloat16", **shape) for seed in SEEDS
        }
        times, seen = asyncio.run(cycle(arguments.device, models, arguments.rounds))

    def settle() -> None:
        if on_gpu:
            torch.cuda.synchronize()

    nbytes = seen["nbytes"]
    here = torch.ones(nbytes, dtype=torch.uint8, device=arguments.device)
    device_copy = copy_s(torch.empty_like(here), here, settle)
    host_copy = copy_s(here, torch.ones(nbytes, dtype=torch.uint8), settle)
    paused = statistics.median(times.paused)
    print(
        json.dumps(
            {
                "device": torch.cuda.get_device_name() if on_gpu else platform.processor() or "cpu",
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "gb": round(nbytes / 1e9, 3),
                "rounds": arguments.rounds,
                "tokens_checked": seen["tokens"],
                "staged_s": round(statistics.median(times.staged), 4),
                "pause_ms": round(paused * 1e3, 3),
                "unstaged_pause_s": round(statistics.median(times.overwritten), 4),
                "device_copy_ms": round(device_copy * 1e3, 3),
                "host_copy_ms": round(host_copy * 1e3, 3),
                "pause_to_device_copy": round(paused / device_copy, 2),
                "pause_to_host_copy": round(paused / host_copy, 2),
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
