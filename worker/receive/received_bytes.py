"""Counts the bytes of the update that is being received, where another process can read the count.

The receiving thread writes the counts, one word each, without a lock. A reader may see a byte count that is one tensor
newer than the time beside it, which no reader minds.
"""

from __future__ import annotations

import mmap
import os
import time
from dataclasses import dataclass
from pathlib import Path

FILE = "received-bytes"
"""The file in the socket directory through which a host agent shows its counts to the worker."""

_WORDS = 4
_NBYTES = 8 * _WORDS
_EXPECTED, _RECEIVED, _LAST_NS, _FIRST_NS = range(_WORDS)


@dataclass(frozen=True, slots=True)
class ByteCount:
    """The bytes of one receive at one moment."""

    received: int
    expected: int
    """The bytes of all tensors that are announced so far."""
    since_progress_s: float
    """Seconds since the last bytes came, or since the receive began."""
    receiving_s: float
    """Seconds from the first bytes to the last ones."""

    @property
    def rate(self) -> float | None:
        """Bytes per second, from the first bytes to the last ones. None: too few have come."""
        return self.received / self.receiving_s if self.receiving_s > 0 else None


class ReceivedBytes:
    """The counts of one receiver."""

    def __init__(self, words: memoryview | None = None) -> None:
        """`words`: memory that another process maps. None: only this process reads the counts."""
        self._words = memoryview(bytearray(_NBYTES)).cast("q") if words is None else words

    @classmethod
    def shared(cls, directory: Path) -> ReceivedBytes:
        """The counts that other processes read by `watched`."""
        descriptor = os.open(directory / FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(descriptor, _NBYTES)
            return cls(memoryview(mmap.mmap(descriptor, _NBYTES)).cast("q"))
        finally:
            os.close(descriptor)

    @classmethod
    def watched(cls, directory: Path) -> ReceivedBytes | None:
        """The counts of the process that has made `shared` in this directory. None: it has not made them yet."""
        try:
            with open(directory / FILE, "rb") as file:
                words = mmap.mmap(file.fileno(), _NBYTES, access=mmap.ACCESS_READ)
        except (OSError, ValueError):  # ValueError: the file has no length yet
            return None
        return cls(memoryview(words).cast("q"))

    def begin(self, expected: int) -> None:
        """Begins to count, for an update of so many bytes."""
        words, now = self._words, time.monotonic_ns()
        words[_RECEIVED] = words[_FIRST_NS] = 0
        words[_EXPECTED], words[_LAST_NS] = expected, now

    def expect(self, more: int) -> None:
        """Counts on more bytes than `begin` has said."""
        self._words[_EXPECTED] += more

    def came(self, nbytes: int) -> None:
        """Counts bytes that have come."""
        words, now = self._words, time.monotonic_ns()
        words[_FIRST_NS] = words[_FIRST_NS] or now
        words[_LAST_NS] = now
        words[_RECEIVED] += nbytes

    def now(self) -> ByteCount:
        """The counts at this moment. All processes of a machine share the clock."""
        words = self._words
        last, first = words[_LAST_NS], words[_FIRST_NS]
        return ByteCount(
            words[_RECEIVED],
            words[_EXPECTED],
            max(0.0, (time.monotonic_ns() - last) / 1e9) if last else 0.0,
            max(0.0, (last - first) / 1e9) if first else 0.0,
        )
