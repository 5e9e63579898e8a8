"""Measures what an update of a large model takes: time, network and memory.

The first rows tell how fast weights come into a staging area, with digests on, beside what limits each transport. The
memory of the area was used before, as it is from the second update on. Then come the rows of a relay, and tables: the
computed cost of large models, a trainer's memory by its ranks, and the host memory of the engines that are installed.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from bench.broadcasts import measure_broadcasts
from bench.hosts import NoLab
from bench.large_plan import Speeds
from bench.large_plan import table as plan_table
from bench.pulls import BARE_PLACED, measure_pulls
from bench.relays import HOSTS, MEGABITS, MEGABYTES, QUICK_HOSTS, QUICK_MEGABYTES, measure_relay, relay_rows
from bench.report import Row, compared
from bench.shared_memory import COPY, LENT_PLACED, PLACED, measure_ipc
from bench.stored import plain_read
from rl_plane.protocol.versions import TensorSpec
from rl_plane.transports.base import TransportContext
from rl_plane.transports.filesystem.receiver import FilesystemTransport
from rl_plane.transports.nixl.wire import have_nixl
from rl_plane.weights.checkpoint import write_manifest
from rl_plane.weights.safetensors_file import write_safetensors
from worker.receive.staging import DigestingStream
from worker.receive.staging_area import StagingArea

IPC_AIM = 1.4
PULL_AIM = 1.4
BROADCAST_AIM = 1.15
FILE_AIM = 1.4
TENSOR_BYTES = 16 << 20
TABLE_S = 1800
"""The bound in seconds of a table that starts engines."""
ENGINES = ("vllm", "sglang")


@dataclass(frozen=True, slots=True)
class LargeSize:
    """The size of one measurement."""

    scratch: Path
    nbytes: int
    rounds: int
    quick: bool = False


class NotMeasured(Exception):
    """Says why this machine can't measure something."""


RowMaker = Callable[[LargeSize], list[Row]]


def _row(
    what: str, nbytes: int, ours: Sequence[float], beside: str, theirs: Sequence[float], aim: float | None
) -> Row:
    return compared(f"{what} into the staging area, {nbytes / 1e6:,.0f} MB", 1, ours, beside, theirs, aim)


def from_ipc(size: LargeSize) -> list[Row]:
    times = measure_ipc(size.nbytes, size.rounds, (LENT_PLACED, PLACED))
    return [
        _row(what, times.nbytes, times.seconds[way], "bare copy", times.seconds[COPY], IPC_AIM)
        for what, way in (("ipc, layout tensors,", LENT_PLACED), ("ipc, packed,", PLACED))
    ]


def from_nixl(size: LargeSize) -> list[Row]:
    if not have_nixl():
        raise NotMeasured("nixl is not installed: make engines")
    times = measure_pulls(size.nbytes, 1, size.rounds, ("bare", BARE_PLACED, PLACED))
    limits: list[tuple[str, str, float | None]] = [
        ("bare nixl reads into used memory", BARE_PLACED, PULL_AIM),
        ("bare nixl reads into two buffers", "bare", None),
    ]
    return [
        _row("nixl", times.nbytes, times.seconds[PLACED], beside, times.seconds[way], aim)
        for beside, way, aim in limits
    ]


def from_gloo(size: LargeSize) -> list[Row]:
    times = measure_broadcasts(size.nbytes, 1, size.rounds, ("bare", PLACED))
    bare = times.seconds["bare"]
    return [_row("gloo", times.nbytes, times.seconds[PLACED], "bare broadcasts", bare, BROADCAST_AIM)]


def from_files(size: LargeSize) -> list[Row]:
    """Reads a file that is in the page cache."""
    directory = size.scratch / "files"
    directory.mkdir()
    spec, data = TensorSpec("U8", (TENSOR_BYTES,)), bytes(TENSOR_BYTES)
    names = [f"layer.{number}" for number in range(size.nbytes // TENSOR_BYTES)]
    write_safetensors(directory / "model.safetensors", dict.fromkeys(names, (spec, data)))
    write_manifest(directory)
    nbytes = len(names) * TENSOR_BYTES
    room = np.ones((directory / "model.safetensors").stat().st_size, np.uint8).data
    area = StagingArea.for_specs(dict.fromkeys(names, spec))
    transport = FilesystemTransport(TransportContext(weight_roots=(size.scratch,)))
    plain, ours = [], []
    for number in range(-1, size.rounds):  # the first one warms the memory
        read = plain_read(directory / "model.safetensors", room)
        start = time.perf_counter()
        with closing(transport.open({"backend": "filesystem", "path": str(directory)}, "base")) as delivery:
            for _ in DigestingStream(delivery, places=area.find):
                pass
        if number >= 0:
            ours.append(time.perf_counter() - start)
            plain.append(read)
    return [_row("files", nbytes, ours, "a read into used memory", plain, FILE_AIM)]


def from_relay(size: LargeSize) -> list[Row]:
    """One update to many hosts, each of them a source."""
    if not have_nixl():
        raise NotMeasured("nixl is not installed: make engines")
    hosts, megabytes = (QUICK_HOSTS, QUICK_MEGABYTES) if size.quick else (HOSTS, MEGABYTES)
    try:
        return relay_rows(measure_relay(megabytes << 20, MEGABITS * 1_000_000, hosts))
    except NoLab as error:
        raise NotMeasured(str(error)) from error


ROW_MAKERS: list[RowMaker] = [from_ipc, from_nixl, from_gloo, from_files, from_relay]
"""Each makes some rows of the section `large`."""


def measure_large(size: LargeSize, say: Callable[[str], None]) -> list[Row]:
    found: list[Row] = []
    for maker in ROW_MAKERS:
        say(f"large models: {maker.__name__} …")
        try:
            found += maker(size)
        except NotMeasured as error:
            say(f"{maker.__name__} is not measured: {error}")
    return found


def large_tables(quick: bool, say: Callable[[str], None]) -> Iterator[tuple[str, str]]:
    """Yields the title and the Markdown of each table."""
    yield "The cost of an update of a large model, computed", plan_table(Speeds())
    if quick:
        say("the memory of trainers and of engines is not measured: it takes minutes")
        return
    commands: dict[str, tuple[str, ...]] = {"A trainer's memory by its ranks": ("bench.memory", "--owners")}
    for engine in ENGINES:
        if find_spec(engine) is None:
            say(f"the host memory of {engine} is not measured: it is not installed, make engines")
        else:
            commands[f"Host memory of {engine}"] = ("bench.host_memory", "--engine", engine)
    for title, command in commands.items():
        say(f"large models: {' '.join(command)} …")
        try:
            yield title, _printed(*command)
        except NotMeasured as error:
            say(f"{' '.join(command)} did not measure: {error}")


def _printed(module: str, *arguments: str) -> str:
    """Runs a benchmark in a process of its own, whose memory it measures, and returns what it prints."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", module, *arguments], capture_output=True, text=True, timeout=TABLE_S
        )
    except subprocess.TimeoutExpired as error:
        raise NotMeasured(f"it takes more than {TABLE_S} s") from error
    if done.returncode:
        raise NotMeasured((done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1])
    return done.stdout.strip()
