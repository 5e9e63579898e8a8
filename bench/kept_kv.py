"""`python -m bench.kept_kv`: what an update costs the streams of a `vllm` worker that have long contexts, without NATS.

All streams generate throughout. A window with an update whose policy is `kv: keep` stands beside a window without one.
Then one update makes all streams compute their KV again, and vLLM's own pause and reload does the same: the time until
each stream has its next token stands beside the time that the first prefill of all contexts took.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from bench.staged import from_files, stage
from rl_plane.protocol.generation import GenerateRequest
from rl_plane.protocol.versions import WeightVersion
from worker.engines.base import EngineOptions
from worker.engines.vllm.adapter import VllmEngine
from worker.testing.tiny_model import VOCAB_SIZE, make_tiny_model

KV_BYTES = 2 << 30
WAIT_S = 900.0
"""A prefill of all contexts on two cores takes minutes."""

Change = Callable[[], Awaitable[Any]]


class Streams:
    """Streams with contexts of their own, so that none finds another one's prefix."""

    def __init__(self, engine: VllmEngine, count: int, context: int, new_tokens: int) -> None:
        self._engine = engine
        self.tokens = [0] * count
        self._moved = asyncio.Event()
        self._tasks = [asyncio.create_task(self._read(number, context, new_tokens)) for number in range(count)]

    async def _read(self, number: int, context: int, new_tokens: int) -> None:
        prompt = [1 + (number + 7 * place * (number + 1)) % (VOCAB_SIZE - 1) for place in range(context)]
        request = GenerateRequest(
            id=f"stream-{number}", prompt_token_ids=prompt, max_tokens=new_tokens, temperature=0.0, ignore_eos=True
        )
        async for delta in self._engine.generate(request):
            self.tokens[number] += len(delta.token_ids)
            self._moved.set()
        raise SystemExit(f"stream {number} has ended: lower --window-s, or --context")

    async def all_move(self) -> float:
        """Seconds until each stream has one more token."""
        start, before = time.perf_counter(), list(self.tokens)
        async with asyncio.timeout(WAIT_S):
            while any(now == then for now, then in zip(self.tokens, before, strict=True)):
                self._check()
                self._moved.clear()
                await self._moved.wait()
        return time.perf_counter() - start

    async def per_second(self, window_s: float, change: Change | None = None) -> float:
        start, before = time.perf_counter(), sum(self.tokens)
        if change is not None:
            await change()
        await asyncio.sleep(max(0.0, window_s - (time.perf_counter() - start)))
        self._check()
        return (sum(self.tokens) - before) / (time.perf_counter() - start)

    def _check(self) -> None:
        for task in self._tasks:
            if task.done():
                task.result()

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def measure(count: int, context: int, window_s: float, rounds: int, scratch: Path) -> dict[str, Any]:
    room = context + 4096
    models = [
        make_tiny_model(scratch / f"model{seed}", seed, "bfloat16", max_position_embeddings=room)
        for seed in (1, 2)
    ]
    arguments = {
        "max_model_len": str(room),
        "kv_cache_memory_bytes": str(KV_BYTES),
        "max_num_seqs": str(count + 1),
    }
    engine = VllmEngine(EngineOptions(models[0], weight_roots=(scratch,), extra=arguments))
    following, sequences = itertools.cycle([*models[1:], models[0]]), itertools.count(1)

    async def update(keep_kv: bool) -> None:
        number, model = next(sequences), next(following)
        name = f"step_{number}"
        reply = await stage(engine, name, from_files(model))
        await engine.pause("keep", False)
        version = WeightVersion("bench", number, name, reply["digest"])
        if await engine.swap(name, version, keep_kv=keep_kv) is keep_kv:
            raise SystemExit(f"asked to {'keep' if keep_kv else 'drop'} KV, the engine did the other")
        await engine.resume()

    async def reload() -> None:
        """vLLM's own update."""
        llm = engine.process.llm
        await llm.pause_generation(mode="keep", clear_cache=True)
        await llm.collective_rpc("reload_weights", kwargs={"weights_path": str(next(following))})
        await llm.resume_generation()

    await engine.start()
    try:
        engine.set_version(WeightVersion("bench", 0, "initial", "xxh3:" + "0" * 32))
        streams = Streams(engine, count, context, room - context - 1)
        prefill_s = await streams.all_move()
        await streams.per_second(window_s)  # warm
        rates: dict[str, list[float]] = {"none": [], "keep": []}
        for _ in range(rounds):
            rates["none"].append(await streams.per_second(window_s))
            rates["keep"].append(await streams.per_second(window_s, lambda: update(True)))
        after: dict[str, float] = {}
        changes: dict[str, Change] = {"recompute": lambda: update(False), "vllm_reload": reload}
        for name, change in changes.items():
            await change()
            after[name] = await streams.all_move()
        await streams.end()
    finally:
        await engine.close()
    ratios = [kept / none for kept, none in zip(rates["keep"], rates["none"], strict=True)]
    return {
        "streams": count,
        "context": context,
        "window_s": window_s,
        "rounds": rounds,
        "tokens_per_s": round(statistics.median(rates["none"]), 1),
        "keep_to_no_update": round(statistics.median(ratios), 3),
        "prefill_s": round(prefill_s, 2),
        "recompute_to_prefill": round(after["recompute"] / prefill_s, 2),
        "vllm_reload_to_prefill": round(after["vllm_reload"] / prefill_s, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.kept_kv", description=__doc__)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--context", type=int, default=8000, help="tokens of each prompt")
    parser.add_argument("--window-s", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        found = asyncio.run(
            measure(arguments.streams, arguments.context, arguments.window_s, arguments.rounds, Path(scratch))
        )
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
