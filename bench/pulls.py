"""Measures how fast weights are pulled by the `nixl` transport, beside bare reads of the same bytes by nixl.

`python -m bench.pulls '{"role": …}'` runs the source or a receiver in a process of its own.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Any

from bench.peers import Peer, await_ready, stop_peers
from bench.shared_memory import PLACED, hash_alone
from rl_plane._util.framing import read_frame, send_frame
from rl_plane._util.processes import die_with_parent
from rl_plane.protocol.versions import HostTensor, TensorSpec
from rl_plane.transports.nixl.sender import NixlSender
from rl_plane.transports.nixl.wire import PROTOCOL, RegisteredMemory, make_agent
from rl_plane.transports.packing import fill
from rl_plane.weights.manifest import Manifest, pack

TENSOR_BYTES = 16 << 20
"""A linear layer's."""

BARE_PLACED = "bare, into the area"
"""Reads by nixl and nothing else, into memory of the whole version, which was used before."""
WAYS = ("bare", "pull", "verified", "staged", "verified and staged", "hashed")
"""Reads by nixl and nothing else · the transport · and digests checked · copied, as the `hf` engine keeps it · all of
it · XXH3 of as many bytes, in all receivers at once, and nothing else."""


@dataclass(slots=True)
class PullTimes:
    """Seconds until the last receiver had everything, a number for each round."""

    nbytes: int
    receivers: int
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))


def measure_pulls(nbytes: int, receivers: int, rounds: int, ways: Sequence[str] = WAYS) -> PullTimes:
    count = max(1, nbytes // TENSOR_BYTES)
    times = PullTimes(count * TENSOR_BYTES, receivers)
    with ExitStack() as stack:
        started: list[subprocess.Popen[str]] = []
        stack.callback(stop_peers, started)

        started.append(_start(role="source", tensors=count))
        transport = await_ready(started[0]).said["transport"]
        started += [_start(role="receiver", transport=transport) for _ in range(receivers)]
        pullers = [await_ready(receiver) for receiver in started[1:]]
        for number in range(-1, rounds):  # the first one warms caches
            turn = number % len(ways)
            for way in (*ways[turn:], *ways[:turn]):  # the kernel still tidies up after what was staged
                begun = time.perf_counter()
                for puller in pullers:
                    _tell(puller, way)
                for puller in pullers:
                    await_ready(puller.process)
                if number >= 0:
                    times.seconds[way].append(time.perf_counter() - begun)
    return times


def _start(**arguments: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "bench.pulls", json.dumps(arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=die_with_parent(),
    )


def _tell(peer: Peer, way: str) -> None:
    assert peer.process.stdin is not None
    peer.process.stdin.write(way + "\n")
    peer.process.stdin.flush()


# ---- the roles ----


def source(tensors: int) -> None:
    spec = TensorSpec("U8", (TENSOR_BYTES,))
    data = memoryview(os.urandom(TENSOR_BYTES))
    names = [f"layers.{number}.weight" for number in range(tensors)]
    with NixlSender() as sender:
        manifest = Manifest(pack(((name, spec) for name in names), sender.bucket_bytes))
        transport, digests = sender.open(manifest), dict[str, str]()
        list(fill(manifest, ((name, HostTensor(spec, data)) for name in names), sender.buffer, digests))
        sender.finish(digests)
        _say(transport=transport)
        sys.stdin.read()


def receiver(transport: dict[str, Any]) -> None:
    from rl_plane.transports.base import TransportContext
    from rl_plane.transports.nixl.receiver import NixlTransport
    from worker.engines.common.torch_weights import host_copies
    from worker.receive.staging import DigestingStream
    from worker.receive.staging_area import StagingArea

    with socket.create_connection((transport["host"], transport["port"])) as connection:
        send_frame(connection, {"protocol": PROTOCOL, "secret": transport["secret"]})
        offer = read_frame(connection)
    agent = make_agent("127.0.0.1")
    peer = agent.add_remote_agent(offer["metadata"])
    places = [bucket for (bucket,) in offer["places"]]
    largest = max(nbytes for _, nbytes, _ in places)
    buffers = [RegisteredMemory(agent, largest) for _ in range(2)]

    def bare(into: Sequence[int]) -> None:
        """`into`: the address for each bucket."""
        for at, (address, nbytes, device) in zip(into, places, strict=True):
            here = agent.get_xfer_descs([(at, nbytes, 0)], "DRAM")
            there = agent.get_xfer_descs([(address, nbytes, device)], "DRAM")
            handle = agent.initialize_xfer("READ", here, there, peer)
            state = agent.transfer(handle)
            while state == "PROC":
                state = agent.check_xfer_state(handle)
            if state != "DONE":
                raise SystemExit(f"a bare read ended as {state}")
            handle.release()

    whole: RegisteredMemory | None = None

    def bare_into_area() -> None:
        nonlocal whole
        whole = whole or RegisteredMemory(agent, sum(nbytes for _, nbytes, _ in places))
        bare([whole.address + sum(nbytes for _, nbytes, _ in places[:number]) for number in range(len(places))])

    transports = NixlTransport(TransportContext())

    area: StagingArea | None = None

    def place() -> None:
        nonlocal area
        with closing(transports.open(transport, "base")) as delivery:
            area = area or StagingArea.for_specs(delivery.specs)
            for _ in DigestingStream(delivery, places=area.find):
                pass

    def consume(verified: bool = False, staged: bool = False) -> None:
        with closing(transports.open(transport, "base")) as delivery:
            tensors = DigestingStream(delivery) if verified else delivery.tensors()
            if staged:
                dict(host_copies(tensors, delivery.specs, frozenset(), lambda: False))
            else:
                for _ in tensors:
                    pass

    ways: dict[str, Callable[[], None]] = {
        "bare": lambda: bare([buffers[number % 2].address for number in range(len(places))]),
        BARE_PLACED: bare_into_area,
        "pull": consume,
        PLACED: place,
        "verified": lambda: consume(verified=True),
        "staged": lambda: consume(staged=True),
        "verified and staged": lambda: consume(verified=True, staged=True),
        "hashed": lambda: hash_alone(memoryview(bytearray(TENSOR_BYTES)), sum(nbytes for _, nbytes, _ in places)),
    }
    _say(ready=True)
    for line in sys.stdin:
        ways[line.strip()]()
        _say(done=True)


def _say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def main() -> None:
    arguments = json.loads(sys.argv[1])
    roles: dict[str, Callable[..., None]] = {"source": source, "receiver": receiver}
    roles[arguments.pop("role")](**arguments)


if __name__ == "__main__":
    main()
