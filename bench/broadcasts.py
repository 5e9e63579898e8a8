"""Measures how fast a `gloo` group brings weights to its receivers, beside a bare broadcast of the same buckets.

`python -m bench.broadcasts` is a receiver: its first lines say its place, each one after that what to receive, and how.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np

from bench.shared_memory import PLACED, hash_alone
from rl_plane._util.processes import die_with_parent
from rl_plane.protocol.versions import HostTensor, TensorSpec
from rl_plane.transports.group.sender import GroupSender
from rl_plane.transports.group.store_listener import StoreListener
from rl_plane.transports.packing import fill
from rl_plane.weights.manifest import Manifest, pack

TENSOR_BYTES = 32 << 20
"""A matrix of a model of some billion parameters: it fills a bucket."""
TIMEOUT_S_PER_GIB = 120.0
"""The bound of one way in one round on a busy machine, also for less than 1 GiB."""

WAYS = ("bare", "lent", "received", "checked", "lent and staged", "checked and staged", "hashed")
"""Each bucket broadcast and waited for, and nothing else · the transport, from where the tensors lie · the transport,
packed · and both sides make the digests · copied, as the `hf` engine keeps it: lent, or packed and with digests ·
XXH3 of as many bytes, on all sides at once, and nothing else."""


@dataclass(slots=True)
class BroadcastTimes:
    """Seconds until the last receiver had everything, a number for each round."""

    nbytes: int
    receivers: int
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))


def measure_broadcasts(nbytes: int, receivers: int, rounds: int, ways: Sequence[str] = WAYS) -> BroadcastTimes:
    import torch

    spec = TensorSpec("U8", (TENSOR_BYTES,))
    count = nbytes // TENSOR_BYTES
    data = [np.full(TENSOR_BYTES, number % 251, np.uint8) for number in range(count)]
    tensors = [(f"layer.{number}", HostTensor(spec, one.data)) for number, one in enumerate(data)]
    manifest = Manifest(pack(((name, spec) for name, _ in tensors), GroupSender.bucket_bytes))
    times = BroadcastTimes(count * TENSOR_BYTES, receivers)
    timeout_s = TIMEOUT_S_PER_GIB * max(1, nbytes / (1 << 30))
    sender = GroupSender(timeout_s=timeout_s)
    with ExitStack() as stack:
        started = [stack.enter_context(_receiver()) for _ in range(receivers)]
        stack.callback(lambda: [one.stdin.close() for one in started if one.stdin])

        def init(body: dict[str, Any]) -> Mapping[str, Any]:
            for number, one in enumerate(started):
                _tell(one, {**body, "world_size": 1 + receivers, "rank_offset": 1 + number})
            return {"fingerprint": [_heard(one) for one in started]}

        sender.form(init)
        stack.callback(sender.destroy)
        store = StoreListener("127.0.0.1", 0, timeout_s)  # the sender's own takes no more connections
        stack.callback(store.close)
        place: dict[str, Any] = {
            "master_port": store.port,
            "world_size": 1 + receivers,
            "timeout_s": timeout_s,
        }
        for number, one in enumerate(started):
            _tell(one, {**place, "rank": 1 + number})
        bare = _bare_group(rank=0, **place)
        whole = [torch.from_numpy(one) for one in data]  # each fills its bucket
        assert [one.nbytes for one in whole] == [bucket.nbytes for bucket in manifest.buckets]

        def sent(way: str) -> None:
            if way == "hashed":
                for one in started:
                    _tell(one, {"way": way, "nbytes": times.nbytes})
                hash_alone(data[0].data, times.nbytes)
                return
            if way == "bare":
                opened: dict[str, Any] = {"sizes": [one.numel() for one in whole]}
            else:
                opened = {"transport": sender.open(manifest)}
            for one in started:
                _tell(one, {"way": way, **opened})
            for one in started:
                _heard(one)  # it listens
            if way == "bare":
                for bucket in whole:
                    _broadcast(bare, bucket)
                return
            digests: dict[str, str] | None = {} if "checked" in way or way == PLACED else None
            lent = sender.lend(dict(tensors)) if "lent" in way else ()
            for number in fill(manifest, tensors, sender.buffer, digests, lent):
                sender.send(number)
            sender.finish(digests)

        for number in range(-1, rounds):  # the first one warms the buffers
            turn = number % len(ways)
            for way in (*ways[turn:], *ways[:turn]):
                begun = time.perf_counter()
                sent(way)
                for one in started:
                    _heard(one)
                if number >= 0:
                    times.seconds[way].append(time.perf_counter() - begun)
                sender.close()
    return times


def _receiver() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "bench.broadcasts"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=die_with_parent(),
    )


def _tell(one: subprocess.Popen[str], what: dict[str, Any]) -> None:
    print(json.dumps(what), file=one.stdin, flush=True)


def _heard(one: subprocess.Popen[str]) -> str:
    assert one.stdout is not None
    said = one.stdout.readline()
    if not said:
        raise SystemExit("a receiver failed")
    return said


def _bare_group(rank: int, master_port: int, world_size: int, timeout_s: float) -> Any:
    import torch.distributed as dist

    bound = timedelta(seconds=timeout_s)
    store = dist.TCPStore("127.0.0.1", master_port, None, False, bound, wait_for_workers=False)
    return dist.ProcessGroupGloo(dist.PrefixStore("bare", store), rank, world_size, bound)


def _broadcast(group: Any, data: Any) -> None:
    import torch.distributed as dist

    options = dist.BroadcastOptions()
    options.rootRank = 0
    group.broadcast([data], options).wait()


def main() -> None:
    import torch

    from rl_plane.transports.base import TransportContext
    from rl_plane.transports.group.receiver import GlooTransport
    from worker.engines.common.torch_weights import host_copies
    from worker.receive.staging import DigestingStream
    from worker.receive.staging_area import StagingArea

    transport = GlooTransport(TransportContext())
    transport.init(json.loads(sys.stdin.readline()))
    print("{}", flush=True)
    bare = _bare_group(**json.loads(sys.stdin.readline()))
    buffers: list[torch.Tensor] = []
    area: StagingArea | None = None
    for line in sys.stdin:
        asked = json.loads(line)
        if asked["way"] == "hashed":
            hash_alone(memoryview(bytearray(TENSOR_BYTES)), asked["nbytes"])
        elif asked["way"] == "bare":
            sizes = asked["sizes"]
            buffers = buffers or [torch.zeros(max(sizes), dtype=torch.uint8) for _ in range(2)]
            print("{}", flush=True)
            for number, size in enumerate(sizes):
                _broadcast(bare, buffers[number % 2][:size])
        else:
            delivery = transport.open(asked["transport"], "base")
            print("{}", flush=True)
            staged = {}
            placed = asked["way"] == PLACED
            area = area or (StagingArea.for_specs(delivery.specs) if placed else None)
            find = area.find if placed and area is not None else None
            hashed = placed or "checked" in asked["way"]
            tensors = DigestingStream(delivery, places=find) if hashed else delivery.tensors()
            if "staged" in asked["way"]:
                staged = dict(host_copies(tensors, delivery.specs, frozenset(), lambda: False))
            else:
                for _ in tensors:
                    pass
            delivery.close()
            staged.clear()
        print("{}", flush=True)
    transport.destroy()


if __name__ == "__main__":
    main()
