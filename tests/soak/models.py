"""The weights that the soak serves: witness checkpoints and adapters, which differ in the tokens that they make."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass
from pathlib import Path

from rl_plane.demo.fleet import child_environment
from tests.soak.checker import Reference
from worker.receive.staging import adapter_digest, model_digest
from worker.testing.tiny_model import VOCAB_SIZE, permutation

BASES, ADAPTERS = 6, 4
"""More than are served in turn: of two versions that follow each other, the weights always differ."""

_MAKE = """
import sys
from pathlib import Path
from worker.testing.tiny_adapter import make_witness_adapter
from worker.testing.tiny_model import make_witness_model
root, bases, adapters, dtype = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
for seed in range(bases):
    make_witness_model(root / f"base_{seed}", seed, dtype)
for seed in range(adapters):
    make_witness_adapter(root / "base_0", root / f"adapter_{seed}", seed)
"""


@dataclass(frozen=True, slots=True)
class Weights:
    """The checkpoints and adapters of a soak, all beneath one directory."""

    root: Path
    reference: Reference

    def base(self, number: int) -> Path:
        return self.root / f"base_{number % BASES}"

    def adapter(self, number: int) -> Path:
        return self.root / f"adapter_{number % ADAPTERS}"

    def bad(self, kind: str) -> Path:
        """Makes a checkpoint that every worker must refuse."""
        path = self.root / f"bad_{kind}"
        if not path.exists():
            path.mkdir()
            data = (self.base(1) / "model.safetensors").read_bytes()
            (path / "model.safetensors").write_bytes(_BROKEN[kind](data))
        return path


def _cut(data: bytes) -> bytes:
    return data[: len(data) - 1000]


def _misshapen(data: bytes) -> bytes:
    """Returns the file with the shape of one tensor reversed in the header."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    name = next(
        name for name, told in sorted(header.items()) if name != "__metadata__" and len(told["shape"]) == 2
    )
    header[name]["shape"].reverse()
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


_BROKEN = {"cut": _cut, "misshapen": _misshapen}
BAD = tuple(_BROKEN)


async def make_weights(root: Path, dtype: str) -> Weights:
    """Makes the weights in another process, so that this one does not load torch."""
    argv = [sys.executable, "-P", "-c", _MAKE, str(root), str(BASES), str(ADAPTERS), dtype]
    maker = await asyncio.create_subprocess_exec(*argv, env=child_environment(root))
    if await maker.wait() != 0:
        raise RuntimeError("the soak's weights could not be made")
    bases = {
        model_digest(root / f"base_{seed}"): tuple(permutation(f"witness {seed}", VOCAB_SIZE))
        for seed in range(BASES)
    }
    adapters = {
        adapter_digest(root / f"adapter_{seed}"): tuple(permutation(f"adapter {seed}", VOCAB_SIZE))
        for seed in range(ADAPTERS)
    }
    return Weights(root, Reference(bases, adapters))
