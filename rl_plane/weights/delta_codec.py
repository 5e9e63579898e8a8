"""Encodes the difference of two versions of a tensor, bit for bit. No I/O.

A delta is a list of changed elements, each with the XOR of its two values. Applying a delta twice restores the first
version. In bytes it is, little-endian like the tensor:

* a header
* for each entry the number of elements between it and the one before, in 16 bits; longer gaps are bridged by entries
that
  change nothing, each for 65,536 elements
* from the next multiple of 8 on, the XOR values

If one element in a hundred has changed, a delta of bf16 weights has 2 % of their bytes.
"""

from __future__ import annotations

import functools
import os
import struct
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rl_plane.errors import InvalidWeights, Unsupported

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]
    _Scan = Callable[[Array, Array, Array, Array], tuple[int, int]]

MAGIC = b"RLD1"
_HEADER = struct.Struct("<4sB3xQQ")
"""Magic, bytes per element, elements of the tensor, number of entries."""
REACH = 1 << 16
"""The most elements by which one entry moves on."""
WORD = 8
BLOCK_WORDS = 64
"""The words of a block. The scan first sets a bit for each changed word of a block."""
BLOCK_BYTES = BLOCK_WORDS * WORD
PART_WORDS = 1 << 19
"""The words of a part, which one thread compares: enough to pay, and few enough that all threads end together."""
PARALLEL_BYTES = 1 << 24
"""The size in bytes from which several threads compare a tensor. Below it they cost more than they save."""
THREADS = min(4, os.cpu_count() or 1)
"""The most threads that compare a tensor. More would wait for memory."""
ENTRIES = 1 << 14
"""The entries that are applied at once: what they change stays in a core's cache between reading and writing."""
WIDTHS = frozenset({1, 2, 4, 8})
DE_BRUIJN = 0x022FDD63CC95386D
"""A de Bruijn sequence of 64 bits: each window of six bits occurs once
(https://en.wikipedia.org/wiki/De_Bruijn_sequence)."""

Bytes = bytes | bytearray | memoryview


def max_nbytes(nbytes: int, width: int) -> int:
    """The longest delta of a tensor of so many bytes."""
    elements = nbytes // width
    return _values_at(elements) + nbytes


def nothing(nbytes: int, width: int) -> bytes:
    """The delta of a tensor that has not changed."""
    return _HEADER.pack(MAGIC, width, nbytes // width, 0)


def encode(old: Bytes, new: Bytes, width: int, threads: Executor | None = None) -> bytes | None:
    """The delta from `old` to `new`; None if nothing has changed.

    Args:
        old: the tensor's bytes before.
        new: its bytes now, of the same length.
        width: bytes per element.
        threads: for a large tensor, THREADS - 1 of these help to compare.

    Raises:
        Unsupported: numba can't be imported.
    """
    import numpy as np

    nbytes = len(memoryview(old))
    if len(memoryview(new)) != nbytes or width not in WIDTHS or nbytes % width:
        raise ValueError(f"{len(memoryview(new))} bytes beside {nbytes}, in elements of {width}")
    scan, kind = _compiled(width), np.dtype(f"<u{width}")
    whole = nbytes - nbytes % BLOCK_BYTES
    before, after = (np.frombuffer(data, "<u8", whole // WORD) for data in (old, new))
    pairs = [
        (before[start : start + PART_WORDS], after[start : start + PART_WORDS])
        for start in range(0, len(before), PART_WORDS)
    ]
    if nbytes > whole:  # pad the rest to a block, equally in both
        ends = (bytes(memoryview(data)[whole:]).ljust(BLOCK_BYTES, b"\0") for data in (old, new))
        before, after = (np.frombuffer(end, "<u8") for end in ends)
        pairs.append((before, after))
    most = max((len(one) for one, _ in pairs), default=0) * (WORD // width)
    found: list[_PartEntries | None] = [None] * len(pairs)
    jobs = enumerate(pairs)

    def compare() -> None:
        gaps, values = np.empty(most, np.uint16), np.empty(most, kind)
        for number, (one, other) in jobs:
            entries, left = scan(one, other, gaps, values)
            found[number] = _PartEntries(gaps[:entries].copy(), values[:entries].copy(), left)

    helping: list[Future[None]] = []
    if threads is not None and nbytes >= PARALLEL_BYTES:
        helping = [threads.submit(compare) for _ in range(THREADS - 1)]
    compare()
    for helper in helping:
        helper.result()
    return _joined([part for part in found if part is not None], nbytes, width)


def import_numba() -> Any:
    """Returns the module numba, or raises Unsupported."""
    try:
        import numba
    except (ImportError, OSError) as error:  # also raised for a numpy or Python that is too new for it
        raise Unsupported(
            f"deltas need numba, which can't be imported: {str(error)[:300]}",
            field="encoding",
            fix="pip install 'rl-plane[publish]', or publish with encoding='full'",
        ) from error
    return numba


@functools.cache
def _compiled(width: int) -> _Scan:
    """Compiles the scan for one width.

    The scan takes two versions of some blocks, and room for as many gaps and values as they have elements. It returns
    the number of entries, and the number of elements after the last entry.
    """
    numba = import_numba()
    u64 = numba.uint64
    lane_bits, lanes = u64(8 * width), u64(WORD // width)
    lane_starts, lane = u64(64 - 8 * width), u64((1 << 8 * width) - 1)
    # A known way to count the zeros below the lowest set bit: multiply that bit by a de Bruijn sequence; the first six
    # bits of the product are then unique. The compiler replaces it by the processor's own instruction.
    places = tuple(sorted(range(64), key=lambda place: (DE_BRUIJN << place) % (1 << 64) >> 58))
    lowest = numba.njit(lambda bits: u64(places[((bits & (~bits + u64(1))) * u64(DE_BRUIJN)) >> u64(58)]))

    def scan(one: Array, other: Array, gaps: Array, values: Array) -> tuple[int, int]:
        entries, following = u64(0), u64(0)  # `following`: the element after that of the last entry
        for start in range(u64(0), u64(len(one)), u64(BLOCK_WORDS)):
            before, after = one[start : start + u64(BLOCK_WORDS)], other[start : start + u64(BLOCK_WORDS)]
            changed = u64(0)
            for number in range(u64(BLOCK_WORDS)):  # the known bounds let the compiler use vector instructions
                changed |= u64(before[number] != after[number]) << number
            while changed != 0:
                number = lowest(changed)
                changed &= changed - u64(1)
                bits = before[number] ^ after[number]
                while bits != 0:
                    at = lowest(bits) & lane_starts
                    value = (bits >> at) & lane
                    bits ^= value << at
                    element = (start + number) * lanes + at // lane_bits
                    gap = element - following
                    while gap >= u64(REACH):
                        gaps[entries], values[entries] = REACH - 1, 0
                        entries += u64(1)
                        gap -= u64(REACH)
                    gaps[entries], values[entries] = gap, value
                    entries += u64(1)
                    following = element + u64(1)
        return entries, len(one) * lanes - following

    # With a signature numba compiles now and not at the first call, and once for all kinds of memory.
    array, u16, values_kind = numba.types.Array, numba.uint16, getattr(numba, f"uint{8 * width}")
    read = array(u64, 1, "C", readonly=True, aligned=False)
    signature = numba.types.UniTuple(numba.int64, 2)(read, read, u16[::1], values_kind[::1])
    compiled: _Scan = numba.njit(signature, nogil=True, error_model="numpy")(scan)
    return compiled


@dataclass(frozen=True, slots=True)
class _PartEntries:
    """The entries of one part."""

    gaps: Array
    values: Array
    left: int
    """The number of elements after the last entry; all elements if there is none."""


def _joined(parts: list[_PartEntries], nbytes: int, width: int) -> bytes | None:
    import numpy as np

    gaps: list[Any] = []
    values: list[Any] = []
    before = 0  # elements between the last entry and this part
    for part in parts:
        if len(part.gaps):
            bridges, part.gaps[0] = divmod(int(part.gaps[0]) + before, REACH)
            if bridges:
                gaps.append(np.full(bridges, REACH - 1, np.uint16))
                values.append(np.zeros(bridges, part.values.dtype))
            gaps.append(part.gaps)
            values.append(part.values)
            before = 0
        before += part.left
    if not gaps:
        return None
    entries = sum(map(len, gaps))
    head = _HEADER.pack(MAGIC, width, nbytes // width, entries)
    padding = bytes(_values_at(entries) - len(head) - 2 * entries)
    return b"".join([head, *gaps, padding, *values])


@dataclass(frozen=True, slots=True)
class Delta:
    """A delta that was checked, and can be applied."""

    width: int
    gaps: Array
    values: Array

    def apply(self, buffer: Bytes) -> None:
        """Applies the delta in place, to a tensor of the size for which it was checked. A second call undoes it."""
        import numpy as np

        elements = np.frombuffer(buffer, self.values.dtype)
        last = -1
        for start in range(0, len(self.gaps), ENTRIES):
            where = self.gaps[start : start + ENTRIES].astype(np.int64)
            where += 1
            where[0] += last
            np.cumsum(where, out=where)
            elements[where] = elements.take(where) ^ self.values[start : start + ENTRIES]
            last = int(where[-1])


def check(blob: Bytes, nbytes: int, width: int, name: str = "") -> Delta:
    """Parses a delta from another process. Raises InvalidWeights unless it fits a tensor of so many bytes."""
    import numpy as np

    def refuse(what: str) -> InvalidWeights:
        return InvalidWeights(
            f"the delta of {name[:200]!r} {what}",
            field="transport",
            fix="make it with rl_plane.weights.delta_codec, from the version that `base` names",
        )

    size = len(memoryview(blob))
    if size < _HEADER.size:
        raise refuse(f"has {size} bytes, less than a header")
    magic, of_width, elements, entries = _HEADER.unpack_from(blob)
    if magic != MAGIC:
        raise refuse("does not begin with a delta's header")
    if (of_width, elements) != (width, nbytes // width):
        raise refuse(f"is of {elements} elements of {of_width} bytes, the tensor has {nbytes // width} of {width}")
    if entries > elements or size != (_values_at(entries) + entries * width if entries else _HEADER.size):
        raise refuse(f"has {size} bytes, which {entries} changes of {elements} elements don't take")
    gaps = np.frombuffer(blob, "<u2", entries, _HEADER.size)
    if entries + int(gaps.sum(dtype=np.int64)) > elements:
        raise refuse("changes elements beyond the tensor's end")
    return Delta(width, gaps, np.frombuffer(blob, f"<u{width}", entries, _values_at(entries) if entries else 0))


def apply(blob: Bytes, buffer: Bytes, width: int, name: str = "") -> None:
    """Checks a delta, and applies it in place."""
    check(blob, len(memoryview(buffer)), width, name).apply(buffer)


def _values_at(entries: int) -> int:
    return -(-(_HEADER.size + 2 * entries) // WORD) * WORD
