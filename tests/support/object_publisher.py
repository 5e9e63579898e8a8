"""A trainer in a process of its own, which publishes checkpoint directories as objects, one step for each line.

`open KIND DIRECTORY`, `send` (the next bucket), `finish` (all that is left), `remove ID`; an answer for each, in JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rl_plane.errors import PlaneError
from rl_plane.transports.object_store.sender import ObjectStoreSender
from rl_plane.transports.packing import fill
from rl_plane.weights.checkpoint import Kind, open_checkpoint
from rl_plane.weights.manifest import Manifest, pack
from tests.support.zygote import fork_module

BOUND_S = 60.0
"""A process that imports, on a busy machine; a step takes milliseconds."""


class Publisher:
    """The test's end. `options`: the sender's arguments, and `bucket_bytes`."""

    def __init__(self, log: Path, **options: Any) -> None:
        self.process = fork_module("fake", __name__, [json.dumps(options)], log, stdin=True)
        self._log = log

    async def step(self, *words: str) -> Any:
        """Raises RuntimeError with the words of the error that it answers."""
        self.begin(*words)
        return await self.answer()

    def begin(self, *words: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(words).encode() + b"\n")
        self.process.stdin.flush()

    async def answer(self) -> Any:
        return await asyncio.to_thread(self._answer)

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline() if select.select([self.process.stdout], [], [], BOUND_S)[0] else b""
        assert line, f"the publisher did not answer:\n{self._log.read_text()}"
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["done"]

    async def publish(self, directory: Path, kind: Kind = "base") -> dict[str, Any]:
        """Publishes a whole version. Returns the `transport` of its request."""
        transport: dict[str, Any] = await self.step("open", kind, str(directory))
        await self.step("finish")
        return transport

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for end in (self.process.stdin, self.process.stdout):
            if end is not None:
                end.close()


class Trainer:
    def __init__(self, bucket_bytes: int = 1 << 20, **options: Any) -> None:
        self._bucket_bytes = bucket_bytes
        self._sender = ObjectStoreSender(**options)
        self._digests: dict[str, str] = {}
        self._manifest: Manifest
        self._packed: Iterator[int]

    def step(self, what: str, *words: str) -> Any:
        match what:
            case "open":
                return self._open("lora" if words[0] == "lora" else "base", Path(words[1]))
            case "send":
                self._sender.send(number := next(self._packed))
                return number
            case "finish":
                for number in self._packed:
                    self._sender.send(number)
                self._sender.finish(self._digests)
                return self._manifest.digested(self._digests).digest
            case "remove":
                return self._sender.remove(words[0])
        raise ValueError(what)

    def _open(self, kind: Kind, directory: Path) -> dict[str, Any]:
        checkpoint = open_checkpoint(directory, kind=kind)
        self._manifest = Manifest(pack(checkpoint.specs.items(), self._bucket_bytes), checkpoint.config)
        self._digests = {}
        transport = self._sender.open(self._manifest)
        self._packed = fill(self._manifest, checkpoint.tensors(), self._sender.buffer, self._digests)
        return transport


def main() -> None:
    trainer = Trainer(**json.loads(sys.argv[1]))
    for line in sys.stdin:
        try:
            answer = {"done": trainer.step(*line.split())}
        except PlaneError as error:
            answer = {"error": f"{error.code}: {error.message}"}
        os.write(1, json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    main()
