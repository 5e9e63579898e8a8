"""A trainer that publishes directories' weights by `ipc`, in a process of its own: `python -m
tests.support.ipc_trainer`.

It reads a JSON object a line for each publication, and says one a line: `{"transport": …}`, then `{"at": bucket}` where
the request says that it stops, and `{"ended": …}`. It continues from there when it reads an empty line.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_plane.errors import PlaneError
from rl_plane.transports.ipc.ipc_session import Bounds
from rl_plane.transports.ipc.sender import IpcSender, Layout
from rl_plane.transports.packing import Buffer, fill
from rl_plane.weights.checkpoint import Checkpoint, open_checkpoint
from rl_plane.weights.manifest import Manifest
from tests.support.commanded_process import forked
from tests.support.zygote import fork_module

if TYPE_CHECKING:
    import torch

BOUND_S = 60.0
"""The bound for a process that only copies, on a busy machine."""


class Trainer:
    """The test's side."""

    def __init__(self) -> None:
        self.process = fork_module("fake", __name__, stdin=True, text=True)

    def publish(self, directory: Path, receivers: int, **options: Any) -> None:
        """See `publish` below."""
        self._write(json.dumps({"directory": str(directory), "receivers": receivers, **options}))

    async def says(self, key: str) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = await asyncio.wait_for(asyncio.to_thread(self.process.stdout.readline), BOUND_S)
        assert line, f"the trainer ended with {self.process.wait()}"
        said: dict[str, Any] = json.loads(line)
        assert key in said, said
        return said

    def go_on(self) -> None:
        self._write("")

    def _write(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.kill()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()


def publish(
    directory: str,
    receivers: int,
    kind: str = "base",
    bucket_bytes: int = 1 << 16,
    holds: tuple[int, ...] = (),
    child: bool = False,
    corrupt: bool = False,
    layout: Layout = "packed",
    **bounds: Any,
) -> None:
    """`holds`: before these buckets are packed; their number: before it states the digests; one more: when all have
    everything. `child`: fork one there, which lives on. `corrupt`: state other digests than those of what is
    sent."""
    checkpoint = open_checkpoint(Path(directory), field="directory", kind=kind)  # type: ignore[arg-type]
    own = _shared(checkpoint) if layout == "tensors" else {}
    sender = IpcSender(lambda: receivers, layout=layout, bounds=Bounds(**bounds))
    manifest = Manifest(sender.pack(checkpoint.specs.items(), bucket_bytes), adapter_config=checkpoint.config)
    _say(transport=sender.open(manifest), buckets=len(manifest.buckets))
    digests: dict[str, str] = {}
    lent = sender.lend(own)
    assert len(lent) == (len(manifest.buckets) if own else 0)

    def hold(number: int) -> None:
        if number in holds:
            _say(at=number, child=forked() if child else None)
            sys.stdin.readline()

    def buffer(number: int) -> Buffer:
        place = sender.buffer(number)
        hold(number)
        return place

    try:
        for number in fill(manifest, own.items() or checkpoint.tensors(), buffer, digests, lent):
            if number in lent:
                assert sender._update is not None
                sender._update.await_free(number)
                hold(number)
            sender.send(number)
        if corrupt:
            digests = dict.fromkeys(digests, "0" * 32)
        hold(len(manifest.buckets))
        sender.finish(digests)
        hold(len(manifest.buckets) + 1)
        _say(ended=None)
    except PlaneError as error:
        _say(ended=error.to_wire())
    finally:
        sender.destroy()
        checkpoint.close()


def _shared(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """The tensors in shared memory, like a trainer's after `module.share_memory()`."""
    import torch

    from worker.engines.common.torch_weights import DTYPE_OF_NAME

    return {
        name: torch.frombuffer(bytearray(one.data), dtype=DTYPE_OF_NAME[one.spec.dtype])
        .reshape(one.spec.shape)
        .share_memory_()
        for name, one in checkpoint.tensors()
    }


def _say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    for line in sys.stdin:
        publish(**json.loads(line))
