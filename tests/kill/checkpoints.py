"""Checkpoints that differ in the tokens that they make."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rl_plane.demo.fleet import child_environment
from worker.engines.fake.adapter import fake_token, make_fake_model
from worker.receive.staging import model_digest
from worker.testing.tiny_model import witness_next_token


class Wrong(Exception):
    """Raised when something happened that must not happen."""


def check(holds: object, words: str) -> None:
    if not holds:
        raise Wrong(words)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    path: Path
    digest: str


class Models(Protocol):
    """An engine's checkpoints, and the tokens that each of them makes."""

    @property
    def workers(self) -> Sequence[Sequence[str]]:
        """The flags of `rl-plane worker`, for each worker of the fleet."""

    @property
    def nodes(self) -> int:
        """The number of nodes of the first worker's engine."""

    @property
    def pause_s(self) -> float:
        """The seconds between two requests of a client."""

    async def make(self, number: int) -> Checkpoint:
        """Number n differs from the few before it."""

    def token(self, digest: str, context: list[int], made: int) -> int:
        """The greedy next token under these weights, after a context whose last `made` tokens are the completion."""


class FakeModels:
    workers = (("--engine", "fake", "--engine-arg", "token_delay_s=0.02"),) * 3
    nodes = 1
    pause_s = 0.05

    def __init__(self, root: Path) -> None:
        self._root = root

    async def make(self, number: int) -> Checkpoint:
        path = make_fake_model(self._root / f"step_{number}", number)
        return Checkpoint(path, model_digest(path))

    def token(self, digest: str, context: list[int], made: int) -> int:
        return fake_token(digest, context[: len(context) - made], made)


_MAKE_WITNESSES = (
    "import sys; from pathlib import Path; from worker.testing.tiny_model import make_witness_model\n"
    "for seed in range(int(sys.argv[2])): make_witness_model(Path(sys.argv[1]) / f'witness_{seed}', seed, sys.argv[3])"
)


class WitnessModels:
    dtype = "float32"
    workers: Sequence[Sequence[str]] = (("--engine", "hf", "--device", "cpu"),) * 3
    nodes = 1
    pause_s = 0.15
    seeds = 5

    def __init__(self, root: Path) -> None:
        self._root = root
        self._seeds: dict[str, int] = {}

    async def make(self, number: int) -> Checkpoint:
        if not self._seeds:  # in a process of its own, which takes torch with it
            argv = [sys.executable, "-P", "-c", _MAKE_WITNESSES, str(self._root), str(self.seeds), self.dtype]
            maker = await asyncio.create_subprocess_exec(*argv, env=child_environment(self._root))
            check(await maker.wait() == 0, "no witness checkpoints could be made")
            self._seeds = {model_digest(self._path(seed)): seed for seed in range(self.seeds)}
        path = self._path(number % self.seeds)
        return Checkpoint(path, model_digest(path))

    def _path(self, seed: int) -> Path:
        return self._root / f"witness_{seed}"

    def token(self, digest: str, context: list[int], made: int) -> int:
        return witness_next_token(self._seeds[digest], context[-1])


HANGS = ("--engine-hang-s", "10")
"""A stopped rank ends its worker after so many seconds."""


class VllmModels(WitnessModels):
    """The models of a fleet in which a worker of another engine continues beside the killed one."""

    dtype = "bfloat16"
    pause_s = 0.5  # most of two cores is for engines that start again
    workers: Sequence[Sequence[str]] = (
        ("--engine", "vllm", "--device", "cpu", "--engine-arg", "max_model_len=2048"),
        ("--engine", "hf", "--device", "cpu"),
    )


class SglangModels(VllmModels):
    workers: Sequence[Sequence[str]] = (
        ("--engine", "sglang", "--device", "cpu"),
        ("--engine", "hf", "--device", "cpu"),
    )


class VllmOnNodes(VllmModels):
    """The models of a fleet whose first worker has an engine over two nodes."""

    nodes = 2
    workers = (
        (*VllmModels.workers[0], "--engine-arg", "tensor_parallel_size=2", *HANGS),
        VllmModels.workers[1],
    )


class SglangOnNodes(SglangModels):
    nodes = 2
    workers = ((*SglangModels.workers[0], "--engine-arg", "tp_size=2", *HANGS), SglangModels.workers[1])


MODELS: dict[str, Callable[[Path], Models]] = {
    "fake": FakeModels,
    "hf": WitnessModels,
    "vllm": VllmModels,
    "sglang": SglangModels,
    "vllm-nodes": VllmOnNodes,
    "sglang-nodes": SglangOnNodes,
}
