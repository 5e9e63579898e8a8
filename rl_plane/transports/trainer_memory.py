"""Opens and reads the memory of a trainer on this machine.

`opened_memory` opens shared memory that torch has made under a name, by its sharing strategy `file_system`. The name
comes from a trainer's request, so it is checked as a path of a stranger is: it is a name of torch's own, and the file
is a regular file of this process's own user, not a link, and as long as it must be.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rl_plane.errors import InvalidRequest
from rl_plane.protocol.shared_tensors import NamedMemory
from rl_plane.protocol.versions import DigestAlgorithm
from rl_plane.weights.hashed_copy import read_hashed

SHM = Path("/dev/shm")
"""The directory of the system's shared memory. torch counts shares in files there."""
HEADER_BYTES = 64
"""The bytes before the tensors, in which torch counts who uses the memory."""

FIELD = "memories"


@contextmanager
def opened_memory(memory: NamedMemory, *, shm: Path = SHM, writable: bool = False) -> Iterator[int]:
    """Yields a descriptor of the memory. The tensors begin HEADER_BYTES after its start.

    Args:
        memory: its name, which NamedMemory has checked, and its length.
        shm: the directory of the system's shared memory.
        writable: also for writing.

    Raises:
        InvalidRequest: there is no such memory on this machine, or it is not a regular file of this user and of the
            stated length.
    """
    flags = os.O_RDWR if writable else os.O_RDONLY
    try:
        descriptor = os.open(shm / memory.name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise InvalidRequest(
            f"there is no shared memory {memory.name} here: {error.strerror}",
            field=FIELD,
            fix="is the trainer on this machine, as this user, with this /dev/shm, and has it kept the tensors until "
            "the answer? else send the weights another way",
        ) from error
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            raise InvalidRequest(
                f"{memory.name} is not shared memory of this worker's user",
                field=FIELD,
                fix="run trainer and workers as one user",
            )
        if found.st_size < HEADER_BYTES + memory.nbytes:
            raise InvalidRequest(
                f"{memory.name} has {found.st_size} bytes, less than a storage of {memory.nbytes} bytes needs",
                field=FIELD,
                fix="send the tensors again",
            )
        yield descriptor
    finally:
        os.close(descriptor)


def read_memory(descriptor: int, start: int, place: memoryview, algorithm: DigestAlgorithm) -> str:
    """Reads from a trainer's descriptor into `place`. Returns the hex digest of what is in `place` now.

    Raises ValueError if the descriptor is not of memory or a file, or if that gets shorter."""
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise ValueError("a descriptor that is not of memory")

    def read(at: int, piece: memoryview) -> None:
        done = 0
        while done < piece.nbytes:
            count = os.preadv(descriptor, [piece[done:]], start + at + done)
            if not count:
                raise ValueError(f"memory that ends after {start + at + done} bytes, within a tensor")
            done += count

    return read_hashed(place, read, algorithm)
