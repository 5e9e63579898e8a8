"""`python -m bench.memory`: how much memory an update takes beyond the model, for a trainer and for an `hf` worker.

Beside what it should: two buckets in each, and in the worker the staged weights. What is measured is the peak of a
process's resident memory (VmHWM, which Linux lets a process set back) less what was resident before the first update.

A second table has the ranks of a trainer with sharded weights, each of which keeps and sends the tensors that it owns.
"""

from __future__ import annotations

import argparse
import secrets
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.gaps import SHAPE_500_MB
from bench.owners import AIM, RANKS, measure_ranks, memory_of
from bench.peers import hf_worker
from rl_plane.publish import WeightPublisher
from rl_plane.transports.nixl.wire import have_nixl
from rl_plane.transports.registry import installed
from rl_plane.weights import read_ahead
from worker.testing.tiny_model import make_tiny_model

BUCKET_BYTES = 64 << 20
"""Bytes of a bucket: as large as the largest tensor, which has a bucket of its own anyhow."""
BUCKETS = 2
UPDATES = 3
"""Rounds, of which the largest peak counts: some buffers are made once and stay. The first one loads libraries, too."""
DELTA = ", a delta"
"""The mark of rows with deltas between versions of which 1 % of the elements have changed, anywhere."""
OVERLAPPED = ", wait false"
"""The next step changes the tensors as soon as they are read."""
WAYS: dict[str, dict[str, dict[str, Any]]] = {
    "gloo": {"": {}, OVERLAPPED: {"wait": False}},
    "ipc": {
        "": {},
        OVERLAPPED: {"wait": False},
        ", layout tensors": {"options": {"layout": "tensors"}},
        DELTA: {"encoding": "delta"},
    },
    "nixl": {
        "": {},
        OVERLAPPED: {"wait": False},
        ", keep_copy false": {"options": {"keep_copy": False}},
        f", keep_copy false{OVERLAPPED}": {"options": {"keep_copy": False}, "wait": False},
        DELTA: {"encoding": "delta"},
    },
    "object_store": {"": {"encoding": "full"}, DELTA: {"encoding": "delta"}},
}
"""The options of the publisher, and of its `publish`, with which a transport is measured."""
OWNERS_HEAD = (
    "transport, FSDP2",
    "1 rank MB",
    f"the largest of {RANKS} ranks MB",
    f"{RANKS} ranks ÷ 1 rank",
    f"limit with copies ({AIM:.2f})",
)
SHAPE_OF_OWNERS = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
"""The shape for `make_tiny_model`, 1.2 GB of float32: no tensor has more than 2 % of the bytes, as in a large model. So
the shares are even, and one gathered tensor is small beside them."""
KEEPS_COPIES = ("nixl",)
"""The transports whose owners keep copies of their shares. The others need two buckets, for any number of ranks."""
HEAD = ("transport", "trainer MB", "÷ two buckets", "worker MB", "÷ two buckets and staging")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The worker that receives the updates: where its NATS server is, and its process."""

    url: str
    namespace: str
    pid: int


def trained(directory: Path) -> dict[str, Any]:
    """A model that the trainer has in memory already: what it takes is not the update's."""
    from safetensors.torch import load_file

    return {name: tensor.clone() for name, tensor in load_file(directory / "model.safetensors").items()}


def some_places(weights: Mapping[str, Any]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns the bits of each tensor, flat, and one place in a hundred. The places differ from call to call, so no
    version equals an earlier one."""
    random = np.random.default_rng()
    flats = [tensor.numpy().reshape(-1).view(np.uint32) for tensor in weights.values()]
    return [(flat, random.integers(len(flat), size=-(-len(flat) // 100))) for flat in flats]


@contextmanager
def served(model: Path) -> Iterator[ServedModel]:
    """Runs an `hf` worker of this model beneath a NATS server of its own."""
    namespace = f"memory{secrets.token_hex(2)}"
    with hf_worker(namespace, model, weight_roots=[str(model.parent)]) as (url, peer):
        yield ServedModel(url, namespace, peer.process.pid)


def measure(backend: str, model: Path, more: dict[str, Any], worker: ServedModel) -> tuple[int, int]:
    """(trainer's, worker's) bytes beyond what they had. `more`: options of the publisher, and `wait`, of `publish`."""
    wait = more.get("wait", True)
    more = {name: value for name, value in more.items() if name != "wait"}
    weights = trained(model)
    if "layout" in more.get("options", {}):
        for tensor in weights.values():
            tensor.share_memory_()
    places = some_places(weights)
    with ExitStack() as stack:
        root: dict[str, Any] = {"root": model.parent / "published"} if backend == "filesystem" else {}
        publisher = WeightPublisher(
            weights,
            worker.url,
            namespace=worker.namespace,
            transport=backend,
            bucket_bytes=BUCKET_BYTES,
            **root,
            **more,
        )
        stack.enter_context(closing(publisher))

        def step() -> None:
            for flat, where in places:
                flat[where] ^= 1

        def published(version: str) -> int:
            """The number of bytes."""
            publication = publisher.publish(version, wait=wait)
            publication.wait_read()
            step()
            publication.result()
            return publication.progress.of_nbytes

        step()  # what is served already would be neither swapped nor kept
        read_ahead._given_back.clear()  # by the publisher before: it is resident still
        processes: tuple[int | str, ...] = ("self", worker.pid)
        before = [memory_of(pid, "VmRSS") for pid in processes]
        deltas = more.get("encoding") == "delta"
        if deltas:
            published("whole")  # what it leaves counts, its own peak doesn't
        for pid in processes:
            Path(f"/proc/{pid}/clear_refs").write_text("5")
        for number in range(UPDATES):
            nbytes = published(str(number))
            assert (2 * nbytes < sum(tensor.nbytes for tensor in weights.values())) == deltas
        ours, theirs = (memory_of(pid, "VmHWM") - had for pid, had in zip(processes, before, strict=True))
        return ours, theirs


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.memory", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tiny model: to see that it runs")
    parser.add_argument("--only", choices=sorted(installed()), help="one transport")
    parser.add_argument("--owners", action="store_true", help="the table of a trainer's ranks alone")
    arguments = parser.parse_args()
    if not arguments.owners:
        _show_transports(arguments)
    _show_owners(arguments)


def owner_rows(quick: bool, only: str | None = None) -> Iterator[tuple[str, ...]]:
    """The cells of each row of the table of a trainer's ranks."""
    lacking = set() if have_nixl() else {"nixl"}
    backends = [name for name in ("nixl", "gloo", "filesystem") if name not in lacking and only in (None, name)]
    with tempfile.TemporaryDirectory(prefix="rl-plane-bench-") as scratch:
        model = make_tiny_model(Path(scratch) / "model", 0, "float32", **({} if quick else SHAPE_OF_OWNERS))
        for backend in backends:
            with served(model) as worker:
                one, many = (
                    max(measure_ranks(backend, model, worker.url, worker.namespace, ranks)) for ranks in (1, RANKS)
                )
            aim = "" if backend not in KEEPS_COPIES else "met" if many <= AIM * one else "missed"
            yield backend, f"{one / 1e6:,.0f}", f"{many / 1e6:,.0f}", f"{many / one:.2f}", aim


def _show_owners(arguments: argparse.Namespace) -> None:
    print("\n| " + " | ".join(OWNERS_HEAD) + " |\n" + "|---" * len(OWNERS_HEAD) + "|")
    for row in owner_rows(arguments.quick, arguments.only):
        print("| " + " | ".join(row) + " |", flush=True)


def _show_transports(arguments: argparse.Namespace) -> None:
    print("| " + " | ".join(HEAD) + " |\n" + "|---" * len(HEAD) + "|")
    with tempfile.TemporaryDirectory(prefix="rl-plane-bench-") as scratch:
        shape = {} if arguments.quick else SHAPE_500_MB
        model = make_tiny_model(Path(scratch) / "model", 0, "float32", **shape)
        staging = (model / "model.safetensors").stat().st_size
        lacking = {"nccl"} | (set() if have_nixl() else {"nixl"})
        with ExitStack() as stack:
            # A measured worker is new, so that its earlier updates leave nothing resident. A quick run has one for all.
            shared = stack.enter_context(served(model)) if arguments.quick else None
            for backend in [arguments.only] if arguments.only else sorted(installed().keys() - lacking):
                for words, more in WAYS.get(backend, {"": {}}).items():
                    with nullcontext(shared) if shared else served(model) as worker:
                        ours, theirs = measure(backend, model, more, worker)
                    buckets = BUCKETS * BUCKET_BYTES
                    cells = [f"{ours / 1e6:,.0f}", f"{ours / buckets:.2f}"]
                    cells += [f"{theirs / 1e6:,.0f}", f"{theirs / (buckets + staging):.2f}"]
                    print(f"| {backend}{words} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
