"""`python -m bench --quick` measures everything that `make bench` does, on a small scale. How fast is not asked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.memory import DELTA
from rl_plane.transports.nixl.wire import have_nixl
from tests.support.paths import ROOT
from tests.support.without_nats import without_nats

pytestmark = [pytest.mark.slow, pytest.mark.timeout(660)]

BENCH_S = 600
"""The bound in seconds on a busy machine, on which two workers import torch one after the other."""
SIZES = (1, 8, 32)
TINY = ("--device", "cpu", "--gb", "0", "--rounds", "2")
"""The arguments of a short engine cycle."""
FAN_OUTS = ("RlClient.call_all(state)", "GET /v1/rl/state", "RlClient.call(state)")
TIMES = (
    "SIGKILL → gone, our nats.conf",
    "SIGKILL → gone, any other NATS server",
    "registering → listed",
)
UPDATES = [("update", size) for size in (1, 8)]
CANARIES = [
    ("one forward of the canary's tokens", None),
    ("update of 2 MB", "canary off"),
    ("its pause", "canary off + 1 forward"),
]
STORED = (
    ("filesystem", "plain read"),
    ("filesystem, unverified", "plain read"),
    ("filesystem", "plain read into used memory"),
    ("filesystem, unverified", "plain read into used memory"),
    ("object_store", "nats-py get"),
    ("object_store, unverified", "nats-py get"),
    ("object_store", "plain read"),
    ("object_store, unverified", "plain read"),
    ("object_store, publishing", "nats-py put"),
    ("object_store, publishing, unverified", "nats-py put"),
)
DELTAS = [f"delta, 34 MB of bf16, 1 % changed: 2.0% of the bytes, {what}" for what in ("encode", "apply")]
HASHED = ", XXH3 alone of the same bytes"
SHARED_MEMORY = [
    ("ipc, 67 MB, digests not checked", "copy"),
    ("ipc, 67 MB", "copy"),
    ("ipc, 67 MB, layout tensors, digests not checked", "copy"),
    ("ipc, 67 MB, layout tensors", "copy"),
    (f"ipc, 67 MB{HASHED}", "copy"),
    ("ipc, 67 MB, staged, digests not checked", "copy"),
    ("ipc, 67 MB, staged", "copy"),
]

PULLS = [
    (f"nixl, 34 MB{what}", receivers)
    for receivers in (1, 3)
    for what in (", digests not checked", "", HASHED, ", staged, digests not checked", ", staged")
    if have_nixl()
]
STREAMS = [
    f"{what}, {size}{beside}"
    for size in ("1 stream", "8 streams")
    for what, beside in (
        ("first token later", ""),
        ("first token later by the bare path", ""),
        ("1,000 tokens", ""),
        ("1,000 tokens", ", two frontends"),
        ("CPU of a frontend for 1,000 tokens", ""),
        ("CPU of nats-server for 1,000 tokens", ""),
        ("CPU of a worker for 1,000 tokens", ""),
        ("CPU for 1,000 paced tokens in whole replies", ""),
    )
]
OBSERVED = [
    f"{what}, with observers, {size}"
    for size in ("1 stream", "8 streams")
    for what in ("1,000 tokens", "CPU for 1,000 tokens")
]
BROADCASTS = [
    f"gloo, 67 MB{what}"
    for what in (
        ", lent, digests not checked",
        ", digests not checked",
        "",
        HASHED,
        ", lent, staged, digests not checked",
        ", staged",
    )
]

LARGE = [
    f"{name} into the staging area, 67 MB"
    for name in ("ipc, layout tensors,", "ipc, packed,", "nixl", "nixl", "gloo", "files")
]
RELAY = "8 MB to 2 hosts by relay"
"""Only where hosts can be made: see `bench.hosts`."""

PUBLISHED = [
    f"publish by {name}{way}, 2 MB"
    for way in ("", DELTA, ", unverified")
    for name in ("ipc", "gloo", "nixl")
    if name != "nixl" or have_nixl()
]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    path = tmp_path_factory.mktemp("bench") / "rows.json"
    done = subprocess.run(
        [sys.executable, "-m", "bench", "--quick", "--json", str(path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONWARNINGS": "default"},
        capture_output=True,
        text=True,
        timeout=BENCH_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(path.read_text())


@pytest.mark.bench
def test_every_row_is_printed(ran: tuple[str, dict[str, Any]]) -> None:
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in ran[0].splitlines() if "|" in line]
    assert [(what, size) for what in FAN_OUTS for size in map(str, SIZES)] == sorted(
        ((cells[0], cells[1]) for cells in lines if cells[0] in FAN_OUTS),
        key=lambda row: (FAN_OUTS.index(row[0]), int(row[1])),
    )
    assert [cells[0] for cells in lines if cells[0] in TIMES] == list(TIMES)
    assert "671 B, fp8" in [cells[0] for cells in lines], "the computed cost of large models"
    updates = {what for what, _ in UPDATES}
    assert [(cells[0], int(cells[1])) for cells in lines if cells[0] in updates] == UPDATES


@pytest.mark.bench
def test_the_json_has_the_same_rows(ran: tuple[str, dict[str, Any]]) -> None:
    rows = ran[1]
    assert [(row["workers"], row["what"]) for row in rows["fan_outs"]] == [
        (size, what) for size in SIZES for what in FAN_OUTS
    ]
    assert [row["what"] for row in rows["times"]] == list(TIMES)
    assert [(row["what"], row["workers"]) for row in rows["updates"]] == UPDATES
    assert sorted((row["what"], row["beside"]) for row in rows["canaries"]) == sorted(CANARIES)
    assert [(row["what"].rpartition(", ")[0], row["beside"]) for row in rows["stored"]] == list(STORED)
    assert [row["what"] for row in rows["deltas"]] == DELTAS
    assert [(row["what"], row["beside"]) for row in rows["shared_memory"]] == SHARED_MEMORY
    assert [(row["what"], row["workers"]) for row in rows["pulls"]] == PULLS
    assert [row["what"] for row in rows["broadcasts"]] == BROADCASTS
    assert [row["what"] for row in rows["large"] if not row["what"].startswith(RELAY)] == [
        what for what in LARGE if have_nixl() or not what.startswith("nixl")
    ]
    assert [row["what"] for row in rows["published"]] == PUBLISHED
    assert [row["what"] for row in rows["generation"]] == STREAMS
    assert [row["what"] for row in rows["observed"]] == OBSERVED
    for row in [row for table in rows.values() for row in table]:
        assert 0 < row["median_s"] <= row["p99_s"] or (row["what"] in STREAMS and row["median_s"] == 0)


@pytest.mark.bench
def test_a_row_says_of_each_aim_whether_it_holds(ran: tuple[str, dict[str, Any]]) -> None:
    for row in [row for rows in ran[1].values() for row in rows]:
        assert row["holds"] == (None if row["aim"] is None else row["value"] <= row["aim"])
    assert all(row["aim"] for row in ran[1]["fan_outs"] if row["workers"] >= 8)


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=170,
    )


def printed(module: str, *arguments: str, **environment: str) -> str:
    done = python("-m", module, *arguments, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_engines_cycle_checks_every_token(tmp_path: Path) -> None:
    """The bench also runs without nats-py."""
    line = printed("bench.engine_cycle", *TINY, PYTHONPATH=without_nats(tmp_path))
    said = json.loads(line)
    assert said["tokens_checked"] > 10
    assert said["pause_ms"] > 0


def test_an_engines_cycle_says_what_a_tree_lacks_that_is_not_installed() -> None:
    hidden = (
        "import importlib.metadata as metadata, runpy; real = metadata.entry_points; "
        "metadata.entry_points = lambda **asked: [] if 'rl_plane.transports' in asked.values() else real(**asked); "
        "runpy.run_module('bench.engine_cycle', run_name='__main__')"
    )
    done = python("-c", hidden, *TINY)
    assert done.returncode == 1
    assert done.stderr.endswith("bench/README.md says how, offline too\n")


@pytest.mark.bench
@pytest.mark.engines("sglang")
def test_an_engines_own_ways_stand_beside_ours() -> None:
    """The paths from memory are checked to load the same weights."""
    said = printed("bench.engine_paths", "--quick", "--engine", "sglang")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in said.splitlines()[2:]]
    ways = {
        "update_weights_from_disk": "filesystem",
        "update_weights_from_distributed, gloo": "publish by gloo",
        "update_weights_from_tensor": "publish by ipc",
        "update_weights_from_tensor, flattened_bucket": "publish by ipc",
    }
    assert [(cells[0], cells[4]) for cells in rows] == [
        (f"sglang, {what}", own) for own, ours in ways.items() for what in (f"{ours}, 1 MB", "generation held")
    ]


@pytest.mark.bench
@pytest.mark.engines("vllm")
def test_the_kept_kv_benchmark_prints_its_ratios() -> None:
    said = printed("bench.kept_kv", "--streams", "2", "--context", "200", "--window-s", "1", "--rounds", "1")
    found = json.loads(said[said.index("{") :])
    assert found["keep_to_no_update"] > 0
    assert found["recompute_to_prefill"] > 0


@pytest.mark.bench
@pytest.mark.engines("vllm", "sglang")
def test_the_host_memory_benchmark_prints_a_row_for_each_engine_and_node() -> None:
    rows = [row.split(" | ") for row in printed("bench.host_memory", "--quick", "--ranks", "1").splitlines()[2:]]
    assert [row[0] for row in rows] == ["| sglang, 1", "| vllm, 1"]
    assert {len(row) for row in rows} == {7}
    nodes = printed("bench.host_memory", "--quick", "--hosts", "--engine", "vllm").splitlines()[2:]
    assert [row.split(" | ")[0] for row in nodes] == [f"| vllm, 2 on 2 hosts, node {rank}" for rank in (0, 1)]


@pytest.mark.bench
def test_the_memory_benchmark_prints_a_row_for_each_transport() -> None:
    ways = {
        "filesystem": [""],
        "gloo": ["", ", wait false"],
        "ipc": ["", ", wait false", ", layout tensors", DELTA],
        "nixl": ["", ", wait false", ", keep_copy false", ", keep_copy false, wait false", DELTA],
        "object_store": ["", DELTA],
    }
    if not have_nixl():
        del ways["nixl"]
    first, second = (
        [row.split(" | ") for row in table.splitlines()[2:]]
        for table in printed("bench.memory", "--quick").split("\n\n")
    )
    assert [row[0] for row in first] == [f"| {backend}{way}" for backend, each in ways.items() for way in each]
    assert {len(row) for row in first} == {5}
    assert [row[0] for row in second] == [
        f"| {backend}" for backend in ("nixl", "gloo", "filesystem") if backend in ways
    ]
    assert {len(row) for row in second} == {5}
