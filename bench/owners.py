"""Measures the memory of each rank of a trainer whose sharded weights are published: `python -m bench.memory` shows it.

Each rank is a process. What is measured is the peak of its resident memory, less what was resident before the first
update: the buffers and copies of the tensors that it owns, and the tensor that is being gathered.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

RANKS = 4
AIM = 1.4 / RANKS
"""The most that a rank of four may take, as a part of what a single rank takes."""
UPDATES = 2
"""The second one is sent beside the committed first one."""
BOUND_S = 600.0


def measure_ranks(backend: str, model: Path, url: str, namespace: str, ranks: int) -> list[int]:
    """The bytes that each rank takes for the updates."""
    meeting = model.parent / f"meeting-{backend}-{ranks}"
    meeting.unlink(missing_ok=True)
    what = [backend, str(model), url, namespace, str(meeting), str(ranks)]
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "bench.owners", *what, str(rank)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(ranks)
    ]
    try:
        found = [json.loads(one.communicate(timeout=BOUND_S)[0].splitlines()[-1]) for one in started]
    finally:
        for one in started:
            one.kill()
            one.wait()
    return [int(one["bytes"]) for one in found]


def memory_of(pid: int | str, field: str) -> int:
    """A field of a process's status in bytes. `pid`: a number, or `self`."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(field + ":"))
    return int(line.split()[1]) << 10


def _sharded(directory: str) -> Any:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype="float32")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _main(backend: str, directory: str, url: str, namespace: str, meeting: str, ranks: str, rank: str) -> None:
    import torch
    import torch.distributed as dist

    from rl_plane.publish import WeightPublisher
    from rl_plane.transports.nixl.wire import make_agent

    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=int(rank), world_size=int(ranks))
    model = _sharded(directory)
    if backend == "nixl":
        make_agent("127.0.0.1")
    root = Path(directory).parent / "published"
    with WeightPublisher(
        model, url, namespace=namespace, transport=backend, encoding="full", root=root
    ) as publisher:
        gc.collect()
        before = memory_of("self", "VmRSS")
        Path("/proc/self/clear_refs").write_text("5")
        for number in range(UPDATES):
            with torch.no_grad():
                for weight in model.parameters():
                    weight.to_local().add_(0.001)
            publisher.publish(f"{ranks} ranks {number}")
        taken = memory_of("self", "VmHWM") - before
    print(json.dumps({"bytes": taken}), flush=True)
    os._exit(0)  # torch's threads may abort a process that ends in an orderly way


if __name__ == "__main__":
    _main(*sys.argv[1:])
