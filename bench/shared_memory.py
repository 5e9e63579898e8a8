"""Measures how fast `ipc` brings weights into another process, beside a bare copy.

`python -m bench.shared_memory` is that process: for each line of JSON it receives once.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rl_plane._util.processes import die_with_parent
from rl_plane.protocol.versions import HostTensor, TensorSpec, tensor_digest
from rl_plane.transports.ipc.sender import IpcSender
from rl_plane.transports.packing import Tensor, fill
from rl_plane.weights.manifest import Manifest

BUCKET_BYTES = 32 << 20
TENSOR_BYTES = 16 << 20
"""A matrix of a small model."""


PLACED = "into the area"
"""Both sides hash, and the receiver copies into a staging area, whose memory was used before."""
LENT_PLACED = "lent, into the area"
"""Both sides hash, and the receiver reads the tensors of the layout `tensors` into a staging area."""
WAYS = ("received", "checked", "staged", "checked and staged", "lent", "lent and checked")
"""Received, and nothing more · both sides hash · copied, as the `hf` engine keeps it · all of it · in the layout
`tensors`, of which the receiver makes a copy of its own · that, and both sides hash."""
COPY = "copy"
"""Between two buffers that are there already."""
HASHED = "hashed"
"""XXH3 of as many bytes, which are in the cache, in both processes at once, and nothing else."""


@dataclass(slots=True)
class IpcTimes:
    """Seconds, a number for each round."""

    nbytes: int
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))


def measure_ipc(nbytes: int, rounds: int, ways: Sequence[str] = WAYS) -> IpcTimes:
    """From the opening of an update until one receiver has all of it."""
    import torch

    data = [np.full(TENSOR_BYTES, number % 251, np.uint8) for number in range(nbytes // TENSOR_BYTES)]
    spec = TensorSpec("U8", (TENSOR_BYTES,))
    tensors = [(f"layer.{number}", HostTensor(spec, one.data)) for number, one in enumerate(data)]
    shared = [(name, torch.tensor(one).share_memory_()) for (name, _), one in zip(tensors, data, strict=True)]
    target = np.ones(nbytes, np.uint8)
    times, packing, lending = IpcTimes(nbytes), IpcSender(lambda: 1), IpcSender(lambda: 1, layout="tensors")

    def sent(way: str) -> float:
        digests: dict[str, str] | None = {} if "checked" in way or PLACED in way else None
        sender, named = (lending, dict[str, Tensor](shared)) if "lent" in way else (packing, dict(tensors))
        manifest = Manifest(sender.pack(((name, spec) for name in named), BUCKET_BYTES))
        start = time.perf_counter()
        ask({"transport": sender.open(manifest), "way": way})
        lent = sender.lend(named)
        assert len(lent) == ("lent" in way) * len(manifest.buckets), "all of it or nothing"
        for number in fill(manifest, named.items(), sender.buffer, digests, lent):
            sender.send(number)
        sender.finish(digests)
        took = time.perf_counter() - start
        sender.close()
        await_answer()
        return took

    def hashed() -> float:
        start = time.perf_counter()
        ask({"hash": nbytes})
        hash_alone(data[0].data, nbytes)
        await_answer()
        return time.perf_counter() - start

    def copied() -> float:
        start = time.perf_counter()
        for number, one in enumerate(data):
            target[number * TENSOR_BYTES : (number + 1) * TENSOR_BYTES] = one
        return time.perf_counter() - start

    with _receiver() as receiver:
        asked, answered = receiver.stdin, receiver.stdout
        assert asked is not None
        assert answered is not None

        def ask(what: dict[str, Any]) -> None:
            print(json.dumps(what), file=asked, flush=True)

        def await_answer() -> None:
            if not answered.readline():
                raise SystemExit("the receiver failed")

        for number in range(-1, rounds):  # the first one warms the buffers
            seconds = {way: sent(way) for way in ways}
            seconds[HASHED] = hashed()
            seconds[COPY] = copied()
            if number >= 0:
                for way, took in seconds.items():
                    times.seconds[way].append(took)
    packing.destroy()
    lending.destroy()
    return times


def hash_alone(tensor: memoryview, nbytes: int) -> None:
    """Hashes `nbytes` in tensors as they are hashed on their way."""
    for _ in range(nbytes // tensor.nbytes):
        tensor_digest(tensor)


@contextmanager
def _receiver() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.shared_memory"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=die_with_parent(),
    )
    with process:  # the end of its input ends it
        yield process


def main() -> None:
    from rl_plane.transports.base import TransportContext
    from rl_plane.transports.ipc.receiver import IpcTransport
    from worker.engines.common.torch_weights import host_copies
    from worker.receive.staging import DigestingStream
    from worker.receive.staging_area import StagingArea

    area: StagingArea | None = None
    for line in sys.stdin:
        asked = json.loads(line)
        if "hash" in asked:
            hash_alone(memoryview(bytearray(TENSOR_BYTES)), asked["hash"])
            print("{}", flush=True)
            continue
        delivery = IpcTransport(TransportContext()).open(asked["transport"], "base")
        placed = PLACED in asked["way"]
        area = area or (StagingArea.for_specs(delivery.specs) if placed else None)
        find = area.find if placed and area is not None else None
        stream = DigestingStream(delivery, places=find) if placed or "checked" in asked["way"] else None
        tensors = delivery.tensors() if stream is None else stream
        staged = {}
        if "staged" in asked["way"]:
            staged = dict(host_copies(tensors, delivery.specs, frozenset(), lambda: False))
        else:
            for _ in tensors:
                pass
        if stream is not None:
            stream.finish()
        delivery.close()
        staged.clear()
        print("{}", flush=True)


if __name__ == "__main__":
    main()
