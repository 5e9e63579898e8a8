"""`python -m bench.memory`: how much memory an update takes beyond the model, for a trainer and for an `hf` worker.

Beside what it should: two buckets in each, and in the worker the staged weights. What is measured is the peak of a
process's resident memory (VmHWM, which Linux lets a process set back) less what was resident before the first update.
"""

from __future__ import annotations

import argparse
import secrets
import tempfile
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from bench.gaps import SHAPE_500_MB
from bench.peers import peers, start_peer
from rl_plane.nats_server import NatsServer
from rl_plane.publish import WeightPublisher
from rl_plane.publish.nixl_wire import have_nixl
from rl_plane.publish.senders import installed
from worker.tiny_model import make_tiny_model

BUCKET_BYTES = 64 << 20
"""As large as the largest tensor, which has a bucket of its own anyhow."""
BUCKETS = 2
UPDATES = 3
"""Of which the largest peak counts: some buffers are made once and stay. The first one loads libraries, too."""
OPTIONS: dict[str, dict[str, dict[str, Any]]] = {"nixl": {"": {}, ", keep_copy false": {"keep_copy": False}}}
"""With which a transport is measured."""
HEAD = ("transport", "trainer MB", "÷ two buckets", "worker MB", "÷ two buckets and staging")


def trained(directory: Path) -> dict[str, Any]:
    """A model that the trainer has in memory already: what it takes is not the update's."""
    from safetensors.torch import load_file

    return {name: tensor.clone() for name, tensor in load_file(directory / "model.safetensors").items()}


def _status(pid: int | str, field: str) -> int:
    """In bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(field + ":"))
    return int(line.split()[1]) << 10


def _begin(pid: int | str) -> int:
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return _status(pid, "VmRSS")


def measure(backend: str, model: Path, more: dict[str, Any]) -> tuple[int, int]:
    """(trainer's, worker's) bytes beyond what they had. `more`: options of the transport."""
    namespace = f"memory{secrets.token_hex(2)}"
    with ExitStack() as stack:
        server = NatsServer()
        server.start()
        stack.callback(server.stop)
        started = start_peer(
            "workers",
            nats_url=server.url,
            namespace=namespace,
            model=str(model),
            copies=1,
            engine="hf",
            weight_roots=[str(model.parent)],
        )
        stack.enter_context(peers([started]))
        options: dict[str, Any] = {"root": model.parent / "published"} if backend == "filesystem" else {}
        publisher = WeightPublisher(
            trained(model),
            server.url,
            namespace=namespace,
            transport=backend,
            bucket_bytes=BUCKET_BYTES,
            options=more,
            **options,
        )
        stack.enter_context(closing(publisher))
        trainer, worker = _begin("self"), _begin(started.pid)
        for number in range(UPDATES):
            publisher.publish(str(number))
        return _status("self", "VmHWM") - trainer, _status(started.pid, "VmHWM") - worker


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.memory", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tiny model: to see that it runs")
    parser.add_argument("--only", choices=sorted(installed()), help="one transport")
    arguments = parser.parse_args()
    print("| " + " | ".join(HEAD) + " |\n" + "|---" * len(HEAD) + "|")
    with tempfile.TemporaryDirectory(prefix="rl-plane-bench-") as scratch:
        shape = {} if arguments.quick else SHAPE_500_MB
        model = make_tiny_model(Path(scratch) / "model", 0, "float32", **shape)
        staging = (model / "model.safetensors").stat().st_size
        lacking = {"nccl"} | (set() if have_nixl() else {"nixl"})
        for backend in [arguments.only] if arguments.only else sorted(installed().keys() - lacking):
            for words, more in OPTIONS.get(backend, {"": {}}).items():
                trainer, worker = measure(backend, model, more)
                buckets = BUCKETS * BUCKET_BYTES
                cells = [f"{trainer / 1e6:,.0f}", f"{trainer / buckets:.2f}"]
                cells += [f"{worker / 1e6:,.0f}", f"{worker / (buckets + staging):.2f}"]
                print(f"| {backend}{words} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
