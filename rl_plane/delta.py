"""What has changed between two versions of a tensor, bit for bit. Pure: bytes in, bytes out.

A delta is a list of changed elements, each with the XOR of its two values, so that applying it twice gives the first
version back. As bytes: a header, then of each entry the number of elements that lie between it and the one before
(16 bits; where more do, an entry in between that changes nothing bridges 65,536 of them), then, from the next multiple
of 8 on, the XOR values. Little-endian, as the tensors' own bytes.

At one changed element in a hundred, a delta of bf16 weights has 2 % of their bytes.
"""

from __future__ import annotations

import os
import struct
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rl_plane.errors import InvalidWeights

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

MAGIC = b"RLD1"
_HEADER = struct.Struct("<4sB3xQQ")
"""Magic, bytes per element, elements of the tensor, entries."""
REACH = 1 << 16
"""Elements that one entry moves on by, at most."""
WORD = 8
WORDS = 1 << 18
"""Compared at once. With fewer, numpy's steps are so short that threads do little but hand the interpreter's lock to
one another; with more, what one step writes has left the cache when the next one reads it."""
PARALLEL_WORDS = 1 << 21
"""From so many on a tensor is compared by several threads; below, they cost more than they save."""
THREADS = min(4, os.cpu_count() or 1)
"""More than the cores only hand the lock around, and more than some wait for memory."""
ENTRIES = 1 << 14
"""Applied at once: what they change stays in a core's cache between reading and writing."""
WIDTHS = frozenset({1, 2, 4, 8})

Bytes = bytes | bytearray | memoryview


def max_nbytes(nbytes: int, width: int) -> int:
    """No delta of a tensor of so many bytes is longer."""
    elements = nbytes // width
    return _values_at(elements) + nbytes


def nothing(nbytes: int, width: int) -> bytes:
    """The delta of a tensor that has not changed."""
    return _HEADER.pack(MAGIC, width, nbytes // width, 0)


def encode(old: Bytes, new: Bytes, width: int) -> bytes | None:
    """From one to the other, as long as it and in elements of `width` bytes. None: nothing has changed."""
    import numpy as np

    nbytes = len(memoryview(old))
    if len(memoryview(new)) != nbytes or width not in WIDTHS or nbytes % width:
        raise ValueError(f"{len(memoryview(new))} bytes beside {nbytes}, in elements of {width}")
    kind, words = np.dtype(f"<u{width}"), nbytes // WORD
    before, after = (np.frombuffer(data, "<u8", words) for data in (old, new))

    starts = range(0, words, WORDS)
    parts: list[_Part | None] = [None] * len(starts)
    jobs = enumerate(starts)

    def compare() -> None:
        for number, start in jobs:
            part = slice(start, start + WORDS)
            parts[number] = _changes(before[part], after[part], kind, start * (WORD // width))

    helpers = THREADS - 1 if words >= PARALLEL_WORDS else 0
    with ThreadPoolExecutor(max(helpers, 1), "rl-plane-delta") as threads:
        helping = [threads.submit(compare) for _ in range(helpers)]
        compare()
        for one in helping:
            one.result()
    if rest := (nbytes - words * WORD) // width:
        old_end, new_end = (np.frombuffer(data, kind, rest, words * WORD) for data in (old, new))
        where = np.flatnonzero(old_end != new_end)
        if len(where):
            changed = old_end[where] ^ new_end[where]
            parts.append(_part(where, changed, words * (WORD // width)))
    return _joined([part for part in parts if part is not None], nbytes, width)


def _changes(one: Array, other: Array, kind: np.dtype[Any], start: int) -> _Part | None:
    """Of two arrays of 64-bit words, whose first element is the tensor's `start`th."""
    import numpy as np

    # numpy's search takes its time for each candidate: first eight words are one, then the words of those that differ,
    # then the elements of those.
    differ = np.empty(-(-len(one) // 8) * 8, bool)
    differ[len(one) :] = False
    np.not_equal(one, other, out=differ[: len(one)])
    eights = differ.view("<u8")
    (found,) = (eights != 0).nonzero()
    if not len(found):
        return None
    (within,) = eights.take(found).view(bool).nonzero()
    found <<= 3
    words = found.take(within >> 3)
    within &= 7
    words |= within
    values = one.take(words)
    values ^= other.take(words)
    values = values.view(kind)
    (inside,) = (values != 0).nonzero()
    values = values.take(inside)
    lanes = WORD // kind.itemsize
    shift = lanes.bit_length() - 1
    of = inside >> shift
    first, last = ((int(words[of[at]]) << shift) + int(inside[at]) % lanes for at in (0, -1))
    # In 16 bits, a quarter of the memory. They wrap around as often as the positions do, or a way is too long for one.
    where = words.astype(np.uint16)
    where <<= shift
    where = where.take(of)
    where |= inside.astype(np.uint16) & np.uint16(lanes - 1)
    before, after = where[:-1], where[1:]
    if np.count_nonzero(after <= before) != last // REACH - first // REACH:
        return _part((words.take(of) << shift) + inside % lanes, values, start)
    gaps = np.empty_like(where)
    gaps[0] = 0  # not known yet
    np.subtract(after, before, out=gaps[1:])
    gaps[1:] -= 1
    return _Part(start + first, start + last, gaps, values)


@dataclass(frozen=True, slots=True)
class _Part:
    """Entries of a run of elements."""

    first: int
    last: int
    gaps: Array
    """The first is not known before the part in front of it is."""
    values: Array


def _part(where: Array, values: Array, start: int) -> _Part:
    """`where`: from `start` on, however far from one another."""
    import numpy as np

    steps = np.diff(where, prepend=where[0] - 1)
    bridges = (steps - 1) // REACH
    entry = np.arange(len(steps)) + np.cumsum(bridges)  # of each change, among all
    gaps = np.full(entry[-1] + 1, REACH - 1, np.uint16)
    gaps[entry] = (steps - 1) % REACH
    padded = np.zeros(len(gaps), values.dtype)
    padded[entry] = values
    return _Part(start + int(where[0]), start + int(where[-1]), gaps, padded)


def _joined(parts: list[_Part], nbytes: int, width: int) -> bytes | None:
    import numpy as np

    if not parts:
        return None
    gaps: list[Any] = []
    values: list[Any] = []
    last = -1
    for part in parts:
        bridges, part.gaps[0] = divmod(part.first - last - 1, REACH)
        if bridges:
            gaps.append(np.full(bridges, REACH - 1, np.uint16))
            values.append(np.zeros(bridges, part.values.dtype))
        gaps.append(part.gaps)
        values.append(part.values)
        last = part.last
    entries = sum(map(len, gaps))
    head = _HEADER.pack(MAGIC, width, nbytes // width, entries)
    padding = bytes(_values_at(entries) - len(head) - 2 * entries)
    return b"".join([head, *gaps, padding, *values])


@dataclass(frozen=True, slots=True)
class Delta:
    """One that was checked: it can be applied."""

    width: int
    gaps: Array
    values: Array

    def apply(self, buffer: Bytes) -> None:
        """In place, to a tensor of the size that it was checked for. Again: takes it back."""
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
    """InvalidWeights unless it is the delta of a tensor of so many bytes. Believes nothing."""
    import numpy as np

    def refuse(what: str) -> InvalidWeights:
        return InvalidWeights(
            f"the delta of {name[:200]!r} {what}",
            field="transport",
            fix="make it with rl_plane.delta, from the version that `base` names",
        )

    size = len(memoryview(blob))
    if size < _HEADER.size:
        raise refuse(f"has {size} bytes, which is no header")
    magic, of_width, elements, entries = _HEADER.unpack_from(blob)
    if magic != MAGIC:
        raise refuse("does not begin as a delta does")
    if (of_width, elements) != (width, nbytes // width):
        raise refuse(f"is of {elements} elements of {of_width} bytes, the tensor has {nbytes // width} of {width}")
    if entries > elements or size != (_values_at(entries) + entries * width if entries else _HEADER.size):
        raise refuse(f"has {size} bytes, which {entries} changes of {elements} elements don't take")
    gaps = np.frombuffer(blob, "<u2", entries, _HEADER.size)
    if entries + int(gaps.sum(dtype=np.int64)) > elements:
        raise refuse("changes elements beyond the tensor's end")
    return Delta(width, gaps, np.frombuffer(blob, f"<u{width}", entries, _values_at(entries) if entries else 0))


def apply(blob: Bytes, buffer: Bytes, width: int, name: str = "") -> None:
    """Checks, then applies."""
    check(blob, len(memoryview(buffer)), width, name).apply(buffer)


def _values_at(entries: int) -> int:
    return -(-(_HEADER.size + 2 * entries) // WORD) * WORD
