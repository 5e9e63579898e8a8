"""One host of a relay: a process that offers weights, or receives them from the trainer and from its peers.

It does what the lines on its standard input say, each a JSON object with `do`, and answers each with one line.
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import closing
from typing import Any

from rl_plane.errors import PlaneError
from rl_plane.protocol.relay import RelayPlan
from rl_plane.protocol.versions import HostTensor, TensorSpec
from rl_plane.transports.base import Delivery, TransportContext
from rl_plane.transports.nixl.receiver import NixlTransport
from rl_plane.transports.nixl.sender import NixlSender
from rl_plane.transports.packing import fill
from rl_plane.weights.manifest import ALIGN_BYTES, Manifest, pack
from worker.receive.staging import DigestingStream


class Host:
    """The process's transport, and the memory into which it receives."""

    def __init__(self, towards: str) -> None:
        """`towards`: an address on the network by which the peers reach this process."""
        self.transport = NixlTransport(TransportContext(nats_url=f"nats://{towards}:4222"))
        self.cancelled = threading.Event()
        self._sender: NixlSender | None = None
        self._memory = memoryview(b"")
        self._ends: dict[str, int] = {}
        self._opened: Delivery | None = None
        self._thread: threading.Thread | None = None
        self._result: dict[str, Any] = {}

    def address(self) -> dict[str, Any]:
        host, port = self.transport.relay_address()
        return {"address": host, "port": port}

    def offer(self, host: str, tensors: int, nbytes: int, seed: int) -> dict[str, Any]:
        """Offers so many tensors of `nbytes` each, as a trainer does."""
        self._sender = self._sender or NixlSender(host)
        spec = TensorSpec("U8", (nbytes,))
        chance = random.Random(seed)
        given = {
            f"layers.{number}": HostTensor(spec, memoryview(chance.randbytes(nbytes))) for number in range(tensors)
        }
        manifest = Manifest(pack(((name, spec) for name in given), self._sender.bucket_bytes))
        transport, digests = self._sender.open(manifest), dict[str, str]()
        list(fill(manifest, given.items(), self._sender.buffer, digests))
        self._sender.finish(digests)
        return {"transport": transport, "digest": manifest.digested(digests).digest}

    def open(self, transport: Mapping[str, Any], plan: Mapping[str, Any] | None) -> dict[str, Any]:
        """Asks the trainer for a version. `begin` receives it."""
        if plan is None:
            self._opened = self.transport.open(transport, "base")
        else:
            self._opened = self.transport.open_relayed(transport, "base", RelayPlan.model_validate(plan))
        return {}

    def begin(self) -> dict[str, Any]:
        """Begins to receive. `result` waits for the end."""
        self.cancelled.clear()
        self._result = {}
        assert self._opened is not None
        self._thread = threading.Thread(target=self._receive, args=(self._opened,))
        self._thread.start()
        return {}

    def end(self) -> dict[str, Any]:
        """Ends what this host serves to its peers, as the end of an update does."""
        self.transport.end_relay()
        return {}

    def result(self) -> dict[str, Any]:
        assert self._thread is not None
        self._thread.join()
        return self._result

    def abort(self) -> dict[str, Any]:
        self.cancelled.set()
        return self.result()

    def _receive(self, opened: Delivery) -> None:
        begun, used = time.monotonic(), time.process_time()
        try:
            with closing(opened) as delivery:
                self._make_room(delivery.specs)
                stream = DigestingStream(delivery, places=self._place, cancelled=self.cancelled.is_set)
                for _ in stream:
                    pass
                self._result = {
                    "digest": stream.digest,
                    "seconds": time.monotonic() - begun,
                    "cpu_s": time.process_time() - used,
                    "sources": list(delivery.sources),
                }
        except PlaneError as error:
            self._result = {"error": error.to_wire(), "seconds": time.monotonic() - begun}

    def _make_room(self, specs: Mapping[str, TensorSpec]) -> None:
        end, self._ends = 0, {}
        for name, spec in specs.items():
            self._ends[name] = end
            end += -(-spec.nbytes // ALIGN_BYTES) * ALIGN_BYTES
        if self._memory.nbytes != end:
            self._memory = memoryview(bytearray(end))

    def _place(self, name: str, spec: TensorSpec) -> memoryview:
        return self._memory[self._ends[name] : self._ends[name] + spec.nbytes]

    def close(self) -> None:
        self.cancelled.set()
        self.transport.destroy()
        if self._sender is not None:
            self._sender.destroy()


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # UCX writes to standard output when a peer dies
    host = Host(sys.argv[1])
    with closing(host):
        print(json.dumps({"ready": True}), file=answers, flush=True)
        for line in sys.stdin:
            what = json.loads(line)
            print(json.dumps(getattr(host, what.pop("do"))(**what)), file=answers, flush=True)


if __name__ == "__main__":
    main()
