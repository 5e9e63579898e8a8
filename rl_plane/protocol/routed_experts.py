"""The experts that each token of a mixture-of-experts model was sent to, for a trainer that repeats the routing.

A choice with P prompt tokens and N generated tokens has P + N - 1 rows, from the prompt's first token on, because an
engine does not send the last token through the model.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from rl_plane.errors import EngineFailed

NARROW_EXPERTS = 256
"""The number of ids that fit into one byte. More experts take two bytes."""
NPY_ALIGNMENT = 64
"""The alignment of the data in a `.npy` file."""


class RoutedExperts(BaseModel):
    """The rows of consecutive tokens. A worker creates them, a frontend reads them."""

    model_config = ConfigDict(frozen=True)

    layers: int = Field(ge=1)
    """The number of layers of the model. A layer without experts has the ids 0."""
    top_k: int = Field(ge=1)
    """The number of experts of a token in a layer. They are in the router's order."""
    width: Literal[1, 2]
    """The bytes of an id: unsigned, little-endian."""
    data: bytes
    """[tokens, layers, top_k]"""

    @property
    def row(self) -> int:
        """The bytes of one row."""
        return self.layers * self.top_k * self.width

    @property
    def tokens(self) -> int:
        return len(self.data) // self.row

    def cut(self, start: int, end: int | None = None) -> RoutedExperts:
        """The rows of the tokens from `start` up to `end`."""
        stop = None if end is None else end * self.row
        return self.model_copy(update={"data": self.data[start * self.row : stop]})

    @classmethod
    def joined(cls, parts: Iterable[RoutedExperts | None]) -> RoutedExperts | None:
        """Joins the parts in their order. None: there are no rows."""
        found = [part for part in parts if part is not None]
        if not found:
            return None
        if len({(part.layers, part.top_k, part.width) for part in found}) > 1:
            raise EngineFailed(
                "the rows of routed experts have two shapes: check that all workers have the same model"
            )
        if len(found) == 1:
            return found[0]
        return found[0].model_copy(update={"data": b"".join(part.data for part in found)})

    def ids(self) -> bytes:
        """The ids as int32, little-endian."""
        wide = bytearray(len(self.data) // self.width * 4)
        for place in range(self.width):
            wide[place::4] = self.data[place :: self.width]
        return bytes(wide)

    def npy(self) -> bytes:
        """A `.npy` file with dtype and shape, which `numpy.load` reads."""
        kind = "|u1" if self.width == 1 else "<u2"
        shape = (self.tokens, self.layers, self.top_k)
        head = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}".encode()
        magic = b"\x93NUMPY\x01\x00"
        head += b" " * (-(len(magic) + 2 + len(head) + 1) % NPY_ALIGNMENT) + b"\n"
        return magic + len(head).to_bytes(2, "little") + head + self.data


def width_of(experts: int) -> Literal[1, 2]:
    """The bytes of an id in a model with this number of experts."""
    return 1 if experts <= NARROW_EXPERTS else 2


def as_npy(found: RoutedExperts | None) -> str | None:
    """The form of vLLM's routes: base64 of a `.npy` file."""
    return None if found is None else b64encode(found.npy()).decode()


def as_int32(found: RoutedExperts | None) -> str | None:
    """The form of SGLang's routes: base64 of the ids alone."""
    return None if found is None else b64encode(found.ids()).decode()
