"""`python -m bench.engine_paths [--engine vllm|sglang] [--quick]`: one engine's update by `filesystem`, beside how that
engine reads a checkpoint by itself: vLLM's `reload_weights`, SGLang's `update_weights_from_disk`. And with SGLang what
`engine_pushes` has: a publication from a trainer's memory, beside SGLang's own ways.

Both run in one engine, in turns, on the same files or tensors. What the engine does by itself checks no digest, stages
nothing and holds generation all the while; ours holds it for the swap alone.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from bench.engine_pushes import OWN as PUSHES
from bench.engine_pushes import measure_pushed
from bench.report import Row, compared, ratio_table
from bench.staged import from_files, stage
from bench.stored import SHAPE_1_GB
from rl_plane._util.processes import die_with_parent
from rl_plane.protocol.versions import WeightVersion
from worker.engines.base import EngineAdapter, EngineOptions
from worker.testing.tiny_model import make_tiny_model

ROUNDS, QUICK_ROUNDS = 9, 2
PROCESS_TIMEOUT_S = 900.0
"""To start an engine and run the rounds, on a busy machine."""
ARGUMENTS = {
    "vllm": {"kv_cache_memory_bytes": str(32 << 20), "max_model_len": "512"},
    "sglang": {"context_length": "512"},
}
_names = (f"bench-{number}" for number in itertools.count())


class OwnWay(Protocol):
    """Measures the engine's own way, with generation held and the prefix cache dropped."""

    async def __call__(self, engine: Any, path: Path) -> None: ...


async def _vllm(engine: Any, path: Path) -> None:
    llm = engine.process.llm
    await llm.pause_generation(mode="keep", clear_cache=True)
    await llm.collective_rpc("reload_weights", kwargs={"weights_path": str(path)})
    await llm.reset_prefix_cache()
    await llm.resume_generation()


async def _sglang(engine: Any, path: Path) -> None:
    from sglang.srt.managers.io_struct import (
        ContinueGenerationReqInput,
        PauseGenerationReqInput,
        UpdateWeightFromDiskReqInput,
    )

    manager = engine.process.manager
    await manager.pause_generation(PauseGenerationReqInput(mode="retract"))
    request = UpdateWeightFromDiskReqInput(model_path=str(path), flush_cache=True)
    done, why, *_ = await manager.update_weights_from_disk(request)
    if not done:
        raise SystemExit(f"SGLang did not load {path}: {why}")
    await manager.continue_generation(ContinueGenerationReqInput())


OWN: dict[str, tuple[str, OwnWay]] = {
    "vllm": ("reload_weights", _vllm),
    "sglang": ("update_weights_from_disk", _sglang),
}
Found = dict[str, dict[str, list[float]]]
"""The engine's own way → seconds of each round: of its `own`, of our `update`, and for which generation was `held` in
ours."""


async def _ours(engine: EngineAdapter, path: Path) -> tuple[float, float]:
    """Returns the seconds of the whole update, and the seconds for which generation was paused."""
    staging = next(_names)
    start = time.perf_counter()
    reply = await stage(engine, staging, from_files(path))
    held = time.perf_counter()
    await engine.pause("keep", False)
    await engine.swap(staging, WeightVersion("run", 0, path.name, reply["digest"]))
    await engine.resume()
    end = time.perf_counter()
    return end - start, end - held


async def measure(kind: str, models: Sequence[Path], rounds: int) -> Found:
    """In this process, which must have no other engine."""
    from worker.engines.sglang import adapter as sglang
    from worker.engines.vllm import adapter as vllm

    build = {"vllm": vllm.build, "sglang": sglang.build}[kind]
    options = EngineOptions(
        models[0], device="cpu", extra=ARGUMENTS[kind], weight_roots=tuple(path.parent for path in models)
    )
    engine = build(options)
    name, load = OWN[kind]
    found: Found = {name: {"update": [], "held": [], "own": []}}
    info = await engine.start()
    try:
        for number in range(rounds + 1):
            path = models[number % 2]
            start = time.perf_counter()
            await load(engine, path)
            own = time.perf_counter() - start
            update, held = await _ours(engine, path)
            if number:  # the first brings files and memory in
                for what, seconds in (("own", own), ("update", update), ("held", held)):
                    found[name][what].append(seconds)
        if kind == "sglang":
            found |= await measure_pushed(engine, info, models[0], rounds)
    finally:
        await engine.close()
    return found


def rows(kind: str, nbytes: int, found: Found) -> list[Row]:
    size = f"{nbytes / 1e6:,.0f} MB"
    table = []
    for own, seconds in found.items():
        ours = f"publish by {PUSHES[own][0]}" if own in PUSHES else "filesystem"
        for what, way in ((f"{ours}, {size}", "update"), ("generation held", "held")):
            table.append(compared(f"{kind}, {what}", 1, seconds[way], own, seconds["own"]))
    return table


def _in_a_process(kind: str, models: Sequence[Path], rounds: int) -> Found:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "bench.engine_paths",
            "--measure",
            kind,
            "--rounds",
            str(rounds),
            *map(str, models),
        ],
        capture_output=True,
        text=True,
        timeout=PROCESS_TIMEOUT_S,
        preexec_fn=die_with_parent(),
    )
    if done.returncode:
        raise SystemExit(f"{done.stderr}\n{kind} could not be measured: exit code {done.returncode}")
    found: Found = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.engine_paths", description=__doc__)
    parser.add_argument("--engine", choices=[*OWN], help="default: each that is installed")
    parser.add_argument("--quick", action="store_true", help="two rounds of a tiny model: to see that it runs")
    parser.add_argument("--measure", choices=[*OWN], help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=argparse.SUPPRESS)
    parser.add_argument("models", type=Path, nargs="*", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        print(json.dumps(asyncio.run(measure(given.measure, given.models, given.rounds))))
        return
    wanted = [given.engine] if given.engine else [*OWN]
    kinds = [kind for kind in wanted if importlib.util.find_spec(kind) is not None]
    for kind in set(wanted) - set(kinds):
        print(f"{kind} is not installed, so it is not measured: make engines", file=sys.stderr)
    shape, rounds = ({}, QUICK_ROUNDS) if given.quick else (SHAPE_1_GB, ROUNDS)
    with tempfile.TemporaryDirectory(prefix="rl-plane-bench-") as scratch:
        models = [make_tiny_model(Path(scratch) / f"m{seed}", seed, "bfloat16", **shape) for seed in range(2)]
        nbytes = sum(file.stat().st_size for file in models[0].glob("*.safetensors"))
        table = [row for kind in kinds for row in rows(kind, nbytes, _in_a_process(kind, models, rounds))]
    if table:
        print(ratio_table(table))


if __name__ == "__main__":
    main()
