"""Measures what the numeric canary costs an update of one `hf` worker, beside the same update without it and beside one
forward of the canary's tokens."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from bench.fanout import JOIN_TIMEOUT_S
from bench.peers import hf_worker
from rl_plane.client import RlClient
from rl_plane.protocol.canary import default_canary

UPDATE_TIMEOUT_S = 120.0
FORWARDS = 3
"""After each pair of updates; their median counts."""

Canary = Literal["off"] | None
CANARIES: tuple[Canary, ...] = (None, "off")


@dataclass(slots=True)
class CanaryTimes:
    """Seconds, a number for each round. None: with the canary that follows from the vocabulary."""

    nbytes: int
    updates: dict[Canary, list[float]] = field(default_factory=lambda: {canary: [] for canary in CANARIES})
    """From the call to its answer."""
    pauses: dict[Canary, list[float]] = field(default_factory=lambda: {canary: [] for canary in CANARIES})
    """The part of these seconds in which the engine is frozen."""
    forwards: list[float] = field(default_factory=list)


class Forward:
    """One forward of the default canary's tokens by transformers alone, in this process."""

    def __init__(self, model: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)  # as the worker has, where OMP_NUM_THREADS says so
        self._torch = torch
        self._model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, local_files_only=True)
        vocab_size = int(self._model.config.get_text_config().vocab_size)
        self._tokens = torch.tensor(default_canary(vocab_size).sequences)

    def __call__(self) -> float:
        start = time.perf_counter()
        with self._torch.no_grad():
            self._model(input_ids=self._tokens, use_cache=False)
        return time.perf_counter() - start


async def _update(client: RlClient, model: Path, canary: Canary) -> tuple[float, float]:
    """(seconds in all, seconds in which the engine is frozen)"""
    body = {"transport": {"backend": "filesystem", "path": str(model)}, "policy": {"canary": canary}}
    start = time.perf_counter()
    async with asyncio.timeout(UPDATE_TIMEOUT_S):
        reply = await client.run("update_weights", body)
    took = time.perf_counter() - start
    (worker,) = reply["workers"]
    if ("canary" in reply) != (canary is None):
        raise SystemExit(f"policy.canary {canary!r}, and the answer has {reply.get('canary')}")
    return took, float(worker["swap_s"])


async def measure_canaries(models: Sequence[Path], rounds: int) -> CanaryTimes:
    """`models`: two of one shape, which follow each other."""
    times = CanaryTimes(sum(path.stat().st_size for path in models[0].glob("*.safetensors")))
    forward = Forward(models[0])
    namespace = f"canaries{secrets.token_hex(2)}"
    following = itertools.cycle([*models[1:], models[0]])
    with ExitStack() as stack:
        url, _ = stack.enter_context(hf_worker(namespace, models[0], weight_roots=[str(models[0].parent)]))
        async with await RlClient.connect(url, namespace) as client:
            await client.wait_for(1, JOIN_TIMEOUT_S)
            for number in range(-1, rounds):  # the first one warms caches
                # In turns, so that what one leaves behind does not always meet the same other one.
                for canary in CANARIES[:: 1 if number % 2 else -1]:
                    took, paused = await _update(client, next(following), canary)
                    if number >= 0:
                        times.updates[canary].append(took)
                        times.pauses[canary].append(paused)
                alone = [await asyncio.to_thread(forward) for _ in range(FORWARDS)]
                if number >= 0:
                    times.forwards.append(statistics.median(alone))
    return times
