"""A trainer that offers directories' weights by `nixl`, in a process of its own: `python -m
tests.support.nixl_trainer`.

It pulls as a worker does, too. It does what the lines that it reads say, each a JSON object, and answers each with one.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rl_plane.protocol.versions import HostTensor
from rl_plane.transports.base import TransportContext
from rl_plane.transports.nixl.sender import NixlSender
from rl_plane.transports.packing import fill
from rl_plane.weights.checkpoint import open_checkpoint
from rl_plane.weights.manifest import Manifest, pack
from tests.conftest import stop_process
from tests.support.commanded_process import forked
from tests.support.zygote import fork_module

if TYPE_CHECKING:
    from rl_plane.transports.nixl.receiver import NixlTransport

BOUND_S = 60.0
"""The bound for a process that only copies, on a busy machine."""

SMALL_BUCKETS = 1024
"""A tensor of a fake model."""


class Trainer:
    """The test's side."""

    process: subprocess.Popen[str]

    def __init__(self, *, starts: bool = False, **environment: str) -> None:
        """`starts`: an interpreter of its own, which ends as one does, and so do its children."""
        env = {**os.environ, **environment}
        if starts:
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            self.process = subprocess.Popen([sys.executable, "-m", __name__], env=env, text=True, **pipes)
        else:
            self.process = fork_module("hf", __name__, env=env, stdin=True, text=True)

    async def does(self, **what: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()
        line = await asyncio.wait_for(asyncio.to_thread(self.process.stdout.readline), BOUND_S)
        assert line, f"the trainer ended with {self.process.wait()}"
        said: dict[str, Any] = json.loads(line)
        return said

    async def offers(
        self, directory: Path, kind: str = "base", bucket_bytes: int = SMALL_BUCKETS
    ) -> dict[str, Any]:
        """The `transport` of an update to it."""
        said = await self.does(do="offer", directory=str(directory), kind=kind, bucket_bytes=bucket_bytes)
        transport: dict[str, Any] = said["transport"]
        return transport

    async def keeps(self, adapter: str | None = None) -> int:
        """Keeps the version. Returns the number of registrations of memory so far."""
        return int((await self.does(do="keep", adapter=adapter))["registrations"])

    async def ends(self) -> int:
        assert self.process.stdin is not None
        self.process.stdin.close()
        return await asyncio.to_thread(self.process.wait, BOUND_S)

    def stop(self) -> None:
        stop_process(self.process.pid)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.kill()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()


def offer(sender: NixlSender, directory: Path, kind: Literal["base", "lora"], bucket_bytes: int) -> dict[str, Any]:
    checkpoint = open_checkpoint(directory, field="directory", kind=kind)
    try:
        manifest = Manifest(pack(checkpoint.specs.items(), bucket_bytes), adapter_config=checkpoint.config)
        transport, digests = sender.open(manifest), dict[str, str]()
        for number in fill(manifest, checkpoint.tensors(), sender.buffer, digests):
            sender.send(number)
        sender.finish(digests)
        return transport
    finally:
        checkpoint.close()


def pass_on(worker: NixlTransport, transport: dict[str, Any]) -> dict[str, Any]:
    """Pulls a version, and offers it again, like staged weights."""
    delivery = worker.open(transport, "base")
    try:
        staged = {name: HostTensor(one.spec, memoryview(bytearray(one.data))) for name, one in delivery.tensors()}
    finally:
        delivery.close()
    return dict(worker.offer(staged))


def main() -> None:
    with NixlSender() as sender, contextlib.ExitStack() as ends:
        worker: NixlTransport | None = None
        registrations = 0
        register = sender._agent.register_memory

        def counted(*given: Any) -> Any:
            nonlocal registrations
            registrations += 1
            return register(*given)

        sender._agent.register_memory = counted
        for line in sys.stdin:
            what = json.loads(line)
            match what.pop("do"):
                case "offer":
                    directory = Path(what.pop("directory"))
                    _say(transport=offer(sender, directory, **what))
                case "keep":
                    sender.keep(**what)
                    _say(registrations=registrations)
                case "fork":
                    _say(child=forked())
                case "pass on":
                    if worker is None:
                        from rl_plane.transports.nixl.receiver import NixlTransport

                        worker = NixlTransport(TransportContext())
                        ends.callback(worker.destroy)
                    _say(transport=pass_on(worker, **what))
                case "fork a child that exits":
                    if (pid := os.fork()) == 0:
                        sys.exit()
                    _say(status=os.waitpid(pid, 0)[1])
                case "fork a child that drops all":
                    if (pid := os.fork()) == 0:
                        del register
                        vars(sender).clear()
                        if worker is not None:
                            vars(worker).clear()
                        gc.collect()
                        os._exit(0)
                    _say(status=os.waitpid(pid, 0)[1])


def _say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main()
