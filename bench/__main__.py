"""`python -m bench`: the plane's speed beside its limits (docs/benchmarks.md).

Exit code 0 whenever it could measure: a missed aim is said in the table.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.broadcasts import measure_broadcasts
from bench.canaries import measure_canaries
from bench.commits import measure_commits
from bench.deaths import measure_deaths, measure_joins
from bench.deltas import measure_deltas
from bench.fanout import measure_fan_out
from bench.gaps import SHAPE_500_MB, measure_gaps
from bench.generation import QUICK_TOKENS, TOKENS, NotUp, have_vllm, measure_fake, measure_vllm
from bench.large import LargeSize, large_tables, measure_large
from bench.observers import measure_observed
from bench.published import measure_published
from bench.pulls import measure_pulls
from bench.report import (
    KILL_AIM_S,
    PROBED_KILL_AIM_S,
    Row,
    broadcast_rows,
    canary_rows,
    commit_rows,
    delta_rows,
    fan_out_rows,
    gap_rows,
    ipc_rows,
    observed_rows,
    published_rows,
    pull_rows,
    ratio_table,
    server_rows,
    stored_rows,
    stream_rows,
    time_row,
    times_table,
)
from bench.shared_memory import measure_ipc
from bench.stored import SHAPE_1_GB, measure_stored
from rl_plane.bus.server import NatsServer
from rl_plane.errors import PlaneError
from rl_plane.transports.nixl.wire import have_nixl
from worker.engines.fake.adapter import make_fake_model
from worker.testing.tiny_model import make_tiny_model

ROUNDS = {1: 1000, 8: 1000, 32: 500, 100: 300, 1000: 60}
"""Workers → rounds: some seconds of measuring for each size."""
QUICK_ROUNDS = {1: 20, 8: 20, 32: 10}
UPDATE_ROUNDS = {1: 100, 8: 60, 64: 30, 256: 12, 1024: 6}
QUICK_UPDATE_ROUNDS = {1: 3, 8: 3}
GAP_ROUNDS = 7
CANARY_ROUNDS, QUICK_CANARY_ROUNDS = 15, 2
STORED_ROUNDS, QUICK_STORED_ROUNDS = 5, 1
QUICK_SHARED_BYTES = 64 << 20
SHARED_ROUNDS, QUICK_SHARED_ROUNDS = 9, 2
QUICK_PULLED_BYTES = 32 << 20
PULL_ROUNDS, QUICK_PULL_ROUNDS = 8, 1
QUICK_BROADCAST_BYTES = 64 << 20
BROADCAST_ROUNDS = {1: 8, 2: 5, 4: 3}
"""GiB → rounds: one of 4 GiB to three receivers takes half a minute, and half of that is staging."""
QUICK_DELTA_BYTES = 32 << 20
DELTA_ROUNDS, QUICK_DELTA_ROUNDS = 7, 2
RECEIVERS = (1, 3)
STREAMS, QUICK_STREAMS = (1, 32, 256), (1, 8)
OBSERVED_TOKENS = 512
"""The tokens of each stream, so that a round has several scrapes."""
STREAM_ROUNDS, QUICK_STREAM_ROUNDS = 9, 2
KILLS, PROBED_KILLS, JOINS = 20, 5, 50
QUICK_KILLS, QUICK_PROBED_KILLS, QUICK_JOINS = 2, 1, 3


@dataclass(frozen=True, slots=True)
class Size:
    quick: bool
    gib: int
    """The size of the weights, in the tables that need no engine to hold them."""

    def nbytes(self, quick: int) -> int:
        return quick if self.quick else self.gib << 30


async def fan_outs(scratch: Path, size: Size) -> list[Row]:
    model = make_fake_model(scratch / "model", 0)
    found: list[Row] = []
    for workers, rounds in (QUICK_ROUNDS if size.quick else ROUNDS).items():
        _say(f"fan-out to {workers:,} workers, {rounds} rounds …")
        with _server() as url:
            rows = fan_out_rows(await measure_fan_out(url, model, workers, rounds))
        found += rows
        for row in rows:
            if row.missing:
                _say(f"{row.what}: {row.missing} of {workers * rounds:,} answers did not come in time")
    return found


async def times(scratch: Path, size: Size) -> list[Row]:
    model = make_fake_model(scratch / "model", 0)
    _say("kills and joins …")
    deaths = await measure_deaths(model, QUICK_KILLS if size.quick else KILLS, advisories=True)
    probed = await measure_deaths(model, QUICK_PROBED_KILLS if size.quick else PROBED_KILLS, advisories=False)
    joins = await measure_joins(QUICK_JOINS if size.quick else JOINS)
    return [
        time_row("SIGKILL → gone, our nats.conf", deaths, KILL_AIM_S),
        time_row("SIGKILL → gone, any other NATS server", probed, PROBED_KILL_AIM_S, worst=True),
        time_row("registering → listed", joins),
    ]


async def updates(scratch: Path, size: Size) -> list[Row]:
    tiny = [make_fake_model(scratch / f"fake{seed}", seed) for seed in range(2)]
    found: list[Row] = []
    for workers, rounds in (QUICK_UPDATE_ROUNDS if size.quick else UPDATE_ROUNDS).items():
        _say(f"updates of {workers:,} workers, {rounds} rounds …")
        try:
            with _server() as url:
                commits = await measure_commits(url, tiny, workers, rounds)
        except PlaneError as error:  # hundreds of workers in a starved process are taken for dead
            _say(f"this machine is too busy for {workers:,} workers: {error}")
            continue
        if commits.excluded:
            _say(f"{commits.excluded} of {workers * rounds:,} were excluded: they did not answer in time")
        found += commit_rows(commits)
    if not size.quick:
        _say("updates of 500 MB …")
        large = [make_tiny_model(scratch / f"large{seed}", seed, "float32", **SHAPE_500_MB) for seed in range(2)]
        found += gap_rows(await measure_gaps(large, GAP_ROUNDS))
    return found


async def canaries(scratch: Path, size: Size) -> list[Row]:
    _say("updates with and without the canary …")
    shape = {} if size.quick else SHAPE_500_MB
    models = [make_tiny_model(scratch / f"canary{seed}", seed, "float32", **shape) for seed in range(2)]
    return canary_rows(await measure_canaries(models, QUICK_CANARY_ROUNDS if size.quick else CANARY_ROUNDS))


async def stored(scratch: Path, size: Size) -> list[Row]:
    _say("weights from files and from NATS …")
    shape = {} if size.quick else SHAPE_1_GB
    models = [make_tiny_model(scratch / f"stored{seed}", seed, "float32", **shape) for seed in range(2)]
    return stored_rows(await measure_stored(models, QUICK_STORED_ROUNDS if size.quick else STORED_ROUNDS))


async def deltas(scratch: Path, size: Size) -> list[Row]:
    nbytes = size.nbytes(QUICK_DELTA_BYTES)
    _say(f"deltas of {nbytes / 1e6:,.0f} MB …")
    rounds = QUICK_DELTA_ROUNDS if size.quick else DELTA_ROUNDS
    return delta_rows(await asyncio.to_thread(measure_deltas, scratch, nbytes, rounds))


async def shared_memory(scratch: Path, size: Size) -> list[Row]:
    nbytes = size.nbytes(QUICK_SHARED_BYTES)
    _say(f"shared memory, updates of {nbytes / 1e6:,.0f} MB …")
    return ipc_rows(measure_ipc(nbytes, QUICK_SHARED_ROUNDS if size.quick else SHARED_ROUNDS))


async def pulls(scratch: Path, size: Size) -> list[Row]:
    found: list[Row] = []
    if not have_nixl():
        _say("nixl is not installed, so it is not measured: make engines")
        return found
    nbytes, rounds = size.nbytes(QUICK_PULLED_BYTES), QUICK_PULL_ROUNDS if size.quick else PULL_ROUNDS
    for receivers in RECEIVERS:
        _say(f"pulls by nixl into {receivers}, {rounds} rounds …")
        found += pull_rows(await asyncio.to_thread(measure_pulls, nbytes, receivers, rounds))
    return found


async def broadcasts(scratch: Path, size: Size) -> list[Row]:
    nbytes = size.nbytes(QUICK_BROADCAST_BYTES)
    rounds = QUICK_PULL_ROUNDS if size.quick else BROADCAST_ROUNDS[size.gib]
    found: list[Row] = []
    for receivers in RECEIVERS[:1] if size.quick else RECEIVERS:
        _say(f"broadcasts by gloo to {receivers}, {rounds} rounds …")
        found += broadcast_rows(await asyncio.to_thread(measure_broadcasts, nbytes, receivers, rounds))
    return found


async def large(scratch: Path, size: Size) -> list[Row]:
    rounds = QUICK_PULL_ROUNDS if size.quick else SHARED_ROUNDS
    return await asyncio.to_thread(
        measure_large, LargeSize(scratch, size.nbytes(QUICK_SHARED_BYTES), rounds, size.quick), _say
    )


async def published(scratch: Path, size: Size) -> list[Row]:
    _say("publications into an hf worker …")
    model = make_tiny_model(scratch / "published", 0, "float32", **({} if size.quick else SHAPE_1_GB))
    backends = ["ipc", "gloo", *(["nixl"] if have_nixl() else [])]
    rounds = QUICK_STORED_ROUNDS if size.quick else STORED_ROUNDS
    return published_rows(await measure_published(model, backends, rounds))


async def observed(scratch: Path, size: Size) -> list[Row]:
    sizes = QUICK_STREAMS if size.quick else STREAMS
    rounds, tokens = (QUICK_STREAM_ROUNDS, QUICK_TOKENS) if size.quick else (STREAM_ROUNDS, OBSERVED_TOKENS)
    _say("streams of a fleet with observers …")
    model = make_fake_model(scratch / "model", 0)
    return [
        row
        for times in await measure_observed(model, scratch, sizes, rounds, tokens)
        for row in observed_rows(times)
    ]


async def generation(scratch: Path, size: Size) -> list[Row]:
    sizes = QUICK_STREAMS if size.quick else STREAMS
    rounds, tokens = (QUICK_STREAM_ROUNDS, QUICK_TOKENS) if size.quick else (STREAM_ROUNDS, TOKENS)
    _say("streams of the fake engine …")
    model = make_fake_model(scratch / "model", 0)
    found = [row for times in await measure_fake(model, sizes, rounds, tokens) for row in stream_rows(times)]
    if size.quick or not have_vllm():
        _say(
            "vLLM is not measured: " + ("it takes minutes" if size.quick else "it is not installed, make engines")
        )
        return found
    _say("streams of vLLM …")
    tiny = make_tiny_model(scratch / "streams", 0, "bfloat16")
    try:
        found += [row for times in await measure_vllm(tiny, sizes, rounds, tokens) for row in server_rows(times)]
    except NotUp as error:
        _say(f"vLLM is not measured: {error}")
    return found


MEASURED = {
    "fan_outs": fan_outs,
    "times": times,
    "updates": updates,
    "canaries": canaries,
    "stored": stored,
    "deltas": deltas,
    "shared_memory": shared_memory,
    "pulls": pulls,
    "broadcasts": broadcasts,
    "large": large,
    "published": published,
    "generation": generation,
    "observed": observed,
}


async def bench(scratch: Path, size: Size, only: str | None) -> dict[str, list[Row]]:
    return {name: await measure(scratch, size) for name, measure in MEASURED.items() if only in (None, name)}


@contextmanager
def _server() -> Iterator[str]:
    server = NatsServer()
    server.start()
    try:
        yield server.url
    finally:
        server.stop()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _written(row: Row) -> dict[str, object]:
    return {**asdict(row), "holds": row.holds}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few rounds, at most 32 workers: to see that it runs")
    parser.add_argument("--only", choices=list(MEASURED), help="one of the tables")
    parser.add_argument(
        "--gib",
        type=int,
        default=1,
        choices=(1, 2, 4),
        help="of weights in deltas, shared_memory, pulls, broadcasts, large",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there too")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rl-plane-bench-") as scratch:
        found = asyncio.run(bench(Path(scratch), Size(arguments.quick, arguments.gib), arguments.only))
    print(f"Python {platform.python_version()}, {os.cpu_count()} cores, {platform.platform()}")
    for rows in found.values():
        times, ratios = (
            [row for row in rows if row.beside is None],
            [row for row in rows if row.beside is not None],
        )
        for table, part in ((times_table, times), (ratio_table, ratios)):
            if part:
                print(f"\n{table(part)}")
    if arguments.only in (None, "large"):
        for title, text in large_tables(arguments.quick, _say):
            print(f"\n{title}:\n\n{text}", flush=True)
    if arguments.json:
        written = {name: [_written(row) for row in rows] for name, rows in found.items()}
        arguments.json.write_text(json.dumps(written, indent=2) + "\n")


if __name__ == "__main__":
    main()
