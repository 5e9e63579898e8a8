"""The hashes of digests. Needs the packages xxhash and blake3, which the frontend and the clients do without."""

from __future__ import annotations

from typing import Literal, Protocol

from rl_plane._util.extras import import_error

try:
    from blake3 import blake3
    from xxhash import xxh3_128, xxh3_128_hexdigest
except ModuleNotFoundError as error:
    raise import_error(error, "rl_plane.protocol.hashers", "worker") from None

Algorithm = Literal["xxh3", "blake3"]
"""Names an algorithm, as `versions.DigestAlgorithm` does, whose import here would be a circle."""

PARALLEL_HASH_BYTES = 1 << 20
"""BLAKE3 hashes a tensor of at least this size on all cores. Below it threads cost more than they save. XXH3 is as fast
as memory on one core."""


class Hasher(Protocol):
    """A hash under way."""

    def update(self, data: memoryview, /) -> object:
        """Adds the bytes. Other threads run meanwhile."""

    def hexdigest(self) -> str: ...


def new_hasher(algorithm: Algorithm) -> Hasher:
    """Returns the hash of no bytes, for bytes that come in pieces."""
    made: Hasher = blake3() if algorithm == "blake3" else xxh3_128()
    return made


def hex_digest(data: bytes | bytearray | memoryview, algorithm: Algorithm) -> str:
    """The hash of the bytes, hex."""
    if algorithm == "blake3":
        threads = blake3.AUTO if len(data) >= PARALLEL_HASH_BYTES else 1
        return str(blake3(data, max_threads=threads).hexdigest())
    return xxh3_128_hexdigest(data)
