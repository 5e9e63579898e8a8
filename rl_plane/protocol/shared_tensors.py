"""Describes tensors in the memory of a trainer on the workers' machine, by plain values: where each tensor lies, in
which memory. A part of an update by the transport `ipc` has them."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from rl_plane.errors import InvalidRequest
from rl_plane.protocol.validation import Body
from rl_plane.protocol.versions import MAX_RANK

MAX_MEMORY_BYTES = 1 << 44
"""More than any machine has. The bound keeps sums of sizes and offsets in 64 bits."""
MAX_HANDLE_CHARS = 2048
"""The longest handle of memory on a GPU, in hex. cudaMalloc's have 66 bytes."""
MAX_COPIES = 64
"""More GPUs than any machine has."""
EVENT_CHARS = 128
"""The length of an event's handle, in hex."""

_HEX = r"^(?:[0-9a-f]{2})*$"
COUNTER_NAME = r"torch_[0-9]{1,10}_[0-9]{1,20}_[0-9]{1,20}"
"""The name that torch gives to shared memory: the id of the process that made it, a random number, and a count."""


class NamedMemory(Body):
    """Shared memory of torch's sharing strategy `file_system`."""

    name: str = Field(pattern=f"^{COUNTER_NAME}$")
    nbytes: int = Field(ge=0, le=MAX_MEMORY_BYTES)
    """The bytes of the storage. The file is longer by torch's own header."""


class GpuMemory(Body):
    """A share of an allocation on a GPU, as torch makes it. Can be opened once."""

    gpu: str = Field(min_length=1, max_length=64, pattern=r"^[0-9A-Za-z-]+$")
    """The GPU's UUID."""
    memory: str = Field(min_length=2, max_length=MAX_HANDLE_CHARS, pattern=_HEX)
    """CUDA's handle of the allocation, in hex."""
    nbytes: int = Field(ge=0, le=MAX_MEMORY_BYTES)
    offset: int = Field(ge=0, le=MAX_MEMORY_BYTES)
    """The offset of the storage in the allocation, in bytes."""
    counter: str = Field(pattern=f"^/{COUNTER_NAME}$")
    """The file in which torch counts whether the share was opened and released."""
    counter_offset: int = Field(ge=0, lt=10_000)
    event: str = Field(max_length=EVENT_CHARS, pattern=_HEX)
    """The handle of the event after which the memory may be read, in hex. May be empty."""
    event_sync: bool


class GpuCopies(Body):
    """Copies of one memory on several GPUs, each shared for the process that reads on that GPU. Each worker reads the
    copy of its own GPU."""

    copies: list[GpuMemory] = Field(min_length=1, max_length=MAX_COPIES)
    held: bool = False
    """The trainer shares the memory once, and fills it again for each part: a worker releases it after the last part
    that has it."""

    @property
    def nbytes(self) -> int:
        return min(one.nbytes for one in self.copies)

    @model_validator(mode="after")
    def _one_for_each(self) -> Self:
        if len({one.gpu for one in self.copies}) != len(self.copies):
            raise InvalidRequest(
                "two copies are on one GPU", field="memories", fix="share each memory once for each GPU"
            )
        return self


class TensorPlace(Body):
    """The place of a tensor in memory."""

    memory: int = Field(ge=0)
    """The number of its memory, in the `memories` of the part."""
    start: int = Field(ge=0, le=MAX_MEMORY_BYTES)
    """The offset of its first element, in bytes."""
    strides: Annotated[list[int], Field(max_length=MAX_RANK)] | None = None
    """The distance between two neighbours of each axis, in elements. None: the tensor is contiguous."""
