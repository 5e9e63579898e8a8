"""A host of a relay that fails on purpose: `python -m tests.support.relay_host TOWARDS [FAULT [AFTER]]`.

Faults: `dies` (SIGKILL), `stops` (SIGSTOP) and `lies` (changes the bytes before it offers them), from the bucket number
AFTER that it has verified.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from typing import Any

from bench.relay_process import main as run_host
from rl_plane.transports.nixl.metadata_server import RelayOffer
from rl_plane.transports.nixl.peer_source import PeerSource
from tests.support.zygote import fork_module

BOUND_S = 100.0
"""The bound for an answer of a process that copies some megabytes, on a busy machine."""


class RelayHost:
    """The test's side of one host."""

    process: subprocess.Popen[str]

    def __init__(self, *fault: str) -> None:
        env = {**os.environ, "UCX_TLS": "tcp"}
        arguments = ["127.0.0.1", *fault]
        self.process = fork_module("hf", __name__, arguments, env=env, stdin=True, text=True)
        self.answer()

    def ask(self, **what: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], BOUND_S)[0], "no answer"
        line = self.process.stdout.readline()
        assert line, f"the host ended with {self.process.wait()}"
        said: dict[str, Any] = json.loads(line)
        return said

    def does(self, **what: Any) -> dict[str, Any]:
        self.ask(**what)
        return self.answer()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


def fail_on_purpose(fault: str, after: int) -> None:
    """Makes this process fail when it has verified its bucket number `after`."""
    announce, relay = RelayOffer.announce, PeerSource.relay
    places: list[Any] = []
    count = 0

    def noted(self: PeerSource, secret: str, given: Any) -> RelayOffer:
        places[:] = given
        return relay(self, secret, given)

    def announced(self: RelayOffer, bucket: int) -> None:
        nonlocal count
        count += 1
        if fault == "lies" and count > after:
            places[bucket][0][0] ^= 1
        announce(self, bucket)
        if count == after and fault in ("dies", "stops"):
            os.kill(os.getpid(), signal.SIGKILL if fault == "dies" else signal.SIGSTOP)

    PeerSource.relay = noted  # type: ignore[assignment,method-assign]
    RelayOffer.announce = announced  # type: ignore[method-assign]


def main() -> None:
    if len(sys.argv) > 2:
        fail_on_purpose(sys.argv[2], int(sys.argv[3]))
    run_host()


if __name__ == "__main__":
    main()
