"""Copies or reads bytes and hashes them in the same pass, while they are in the processor's cache."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import ModuleType

from rl_plane.protocol.hashers import hex_digest, new_hasher
from rl_plane.protocol.versions import DigestAlgorithm

PIECE_BYTES = 512 << 10
"""The bytes that are copied and hashed at once. They stay in the cache of one core, which has 1 MiB or more. Between
two pieces other threads may run, which in shorter pieces cost more time than the cache saves."""

try:
    import numpy
except ModuleNotFoundError:  # a worker of the fake engine may have none
    numpy: ModuleType | None = None  # type: ignore[no-redef]


def copy_hashed(place: memoryview, data: memoryview, algorithm: DigestAlgorithm) -> str:
    """Copies `data` into `place`, which has the same length. Returns the hex digest of what is in `place` now.

    So the digest covers the copy, even if another process changes `data` meanwhile. Other threads run during the copy,
    where numpy is installed.
    """

    def read(at: int, piece: memoryview) -> None:
        copy(piece, data[at : at + len(piece)])

    return read_hashed(place, read, algorithm)


def read_hashed(place: memoryview, read: Callable[[int, memoryview], None], algorithm: DigestAlgorithm) -> str:
    """Fills `place` by `read(offset, piece)`, piece by piece. Returns the hex digest of what is in `place` now."""
    if algorithm == "blake3":  # it is slower than memory, and takes all cores for a long tensor
        read(0, place)
        return hex_digest(place, algorithm)
    hasher = new_hasher(algorithm)
    for at in range(0, len(place), PIECE_BYTES):
        piece = place[at : at + PIECE_BYTES]
        read(at, piece)
        hasher.update(piece)
    return hasher.hexdigest()


def copy(place: memoryview, data: memoryview) -> None:
    """Copies `data` into `place`, which has the same length."""
    if numpy is None or not len(data):
        place[:] = data
    else:
        numpy.copyto(numpy.frombuffer(place, numpy.uint8), numpy.frombuffer(data, numpy.uint8))


def is_same_memory(one: memoryview, other: memoryview) -> bool:
    """Returns whether both begin at the same address. Of no bytes, and of memory that can't be written, it is not."""
    return address_of(one) == address_of(other) != 0


def address_of(data: memoryview) -> int:
    """Returns the address of writable memory; 0 for other memory, and for none."""
    return 0 if data.readonly or not data.nbytes else ctypes.addressof(ctypes.c_char.from_buffer(data))
