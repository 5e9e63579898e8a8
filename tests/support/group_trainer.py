"""A trainer in a process of its own: rank 0 of a group, commanded line by line. For tests of groups."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_plane.client import RlClient
from rl_plane.errors import PlaneError
from rl_plane.protocol.versions import HostTensor
from rl_plane.transports.group.sender import GroupSender
from rl_plane.transports.packing import fill
from rl_plane.weights.checkpoint import Checkpoint, open_checkpoint
from rl_plane.weights.manifest import Manifest, pack
from tests.support.commanded_process import CommandedProcess, forked

if TYPE_CHECKING:
    from tests.conftest import Plane

JOIN_S = 30.0
INIT_TIMEOUT_S = 330.0
"""Beyond the time-out of `init_transport` itself."""


class Trainer(CommandedProcess):
    """The handle of a trainer's process."""

    def __init__(self, plane: Plane, *, timeout_s: float = 60.0, stated: bool = False) -> None:
        """`stated`: the manifest has the digests already."""
        arguments = [plane.url, plane.namespace, plane.component, timeout_s, stated]
        super().__init__(plane, "tests.support.group_trainer", arguments)


class Update:
    """An update that the trainer's process is sending."""

    def __init__(self, sender: GroupSender, directory: str, bucket_bytes: int, stated: bool) -> None:
        self._sender = sender
        self._checkpoint: Checkpoint = open_checkpoint(Path(directory), kind=_kind(directory))
        tensors = self._checkpoint.specs.items()
        self.manifest = Manifest(pack(tensors, bucket_bytes), self._checkpoint.config)
        if stated:
            digests: dict[str, str] = {}
            buffers = [bytearray(bucket.nbytes) for bucket in self.manifest.buckets]
            for _ in fill(self.manifest, self._tensors(), lambda number: memoryview(buffers[number]), digests):
                pass
            self.manifest = self.manifest.digested(digests)
        self.digests: dict[str, str] = {}
        self._filled = fill(self.manifest, self._tensors(), sender.buffer, self.digests)

    def _tensors(self) -> Iterator[tuple[str, HostTensor]]:
        return iter({name: HostTensor(one.spec, memoryview(bytes(one.data))) for name, one in self._all()}.items())

    def _all(self) -> Iterator[tuple[str, HostTensor]]:
        found = {
            name: HostTensor(one.spec, memoryview(bytes(one.data))) for name, one in self._checkpoint.tensors()
        }
        return iter((name, found[name]) for name in self._checkpoint.specs)

    def send(self, count: int | None) -> int:
        """Sends `count` more buckets, or all that are left for None. Returns the number of the last one."""
        last = -1
        for number in self._filled:
            self._sender.send(number)
            last = number
            if count is not None and (count := count - 1) == 0:
                break
        return last


async def ensure_group(sender: GroupSender, client: RlClient) -> None:
    """Forms the group with the fleet of this moment, unless there is one already."""
    fleet = await client.list_workers()
    if sender.formed and sender.fingerprint == fleet.fingerprint:
        return
    loop = asyncio.get_running_loop()

    def init(body: dict[str, Any]) -> Mapping[str, Any]:
        return asyncio.run_coroutine_threadsafe(client.run("init_transport", body), loop).result(INIT_TIMEOUT_S)

    await asyncio.to_thread(sender.form, init)


def _kind(directory: str) -> Any:
    return "lora" if (Path(directory) / "adapter_config.json").exists() else "base"


async def _serve(url: str, namespace: str, component: str, timeout_s: float, stated: bool) -> None:
    sender = GroupSender(timeout_s=timeout_s, join_timeout_s=JOIN_S)
    update: Update | None = None
    client = await RlClient.connect(url, namespace, component, name="trainer")

    async def do(what: str, argument: Any) -> Any:
        nonlocal update
        if what == "form":
            await ensure_group(sender, client)
            return sender.fingerprint
        if what in ("open", "open inline"):
            directory, bucket_bytes = argument
            update = Update(sender, directory, bucket_bytes, stated)
            transport = sender.open(update.manifest)
            if what == "open":
                return transport
            fields = {key: value for key, value in transport.items() if not key.startswith("manifest_")}
            return {**fields, "manifest": update.manifest.to_wire()}
        if what == "close":
            return sender.close()
        if what == "fork":
            return forked()
        assert update is not None
        if what == "send":
            return await asyncio.to_thread(update.send, argument)
        assert what == "finish"
        await asyncio.to_thread(sender.finish, None if argument == "no digests" else update.digests)
        return update.manifest.digested(update.digests).digest

    while line := await asyncio.to_thread(sys.stdin.readline):
        try:
            answer: dict[str, Any] = {"ok": await do(*json.loads(line))}
        except PlaneError as error:
            answer = {"error": error.to_wire()}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    asyncio.run(_serve(*json.loads(sys.argv[1])))
