"""Reads out of another process's memory: where a bucket lies there, and into which reads it is split."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rl_plane.errors import InvalidWeights, Unavailable
from rl_plane.weights.manifest import PackedBucket

PUBLISH = "publish the weights again"
"""The fix of each error that ends a pull."""


@dataclass(frozen=True, slots=True)
class ReadLimits:
    """The largest read that a receiver starts."""

    nbytes: int = 32 << 20
    """The most bytes of one read, so that its time bound fits any network, and a cancelled update ends soon."""
    pieces: int = 1024
    """The most pieces of one read. More small tensors gain nothing."""


READ_LIMITS = ReadLimits()

READ_S = 20.0
"""The time in seconds for a read by UCX, or for the next bytes of a read over TCP, on the slowest useful link. An abort
waits longer for the receive that it ends."""

SourceRange = tuple[int, int, int]
"""(address, bytes, device) in the source's memory."""

Piece = tuple[int, SourceRange]
"""The offset of a piece in its bucket, and its place at the source."""


def checked_places(places: Any, buckets: Sequence[PackedBucket]) -> Sequence[Sequence[Piece]]:
    """The places of all buckets, as a source states them. Raises InvalidWeights if they don't fit."""
    if not isinstance(places, list) or len(places) != len(buckets):
        raise refuse("it did not give places for each bucket")
    return [_checked_pieces(pieces, bucket) for pieces, bucket in zip(places, buckets, strict=True)]


def _checked_pieces(pieces: Any, bucket: PackedBucket) -> Sequence[Piece]:
    """The pieces of a bucket: the whole bucket, or each of its tensors."""
    if not isinstance(pieces, list) or not all(isinstance(place, list) and len(place) == 3 for place in pieces):
        raise refuse("its places are not [address, bytes, device]")
    if not all(_is_address(value) for place in pieces for value in place):
        raise refuse("its places are not [address, bytes, device]")
    sizes = [place[1] for place in pieces]
    if sizes == [bucket.nbytes]:
        starts = [0]
    elif sizes == [placed.spec.nbytes for placed in bucket.tensors]:
        starts = [placed.offset for placed in bucket.tensors]
    else:
        raise refuse(f"it gave {sum(sizes)} bytes for a bucket of {bucket.nbytes}")
    return [(at, (address, nbytes, device)) for at, (address, nbytes, device) in zip(starts, pieces, strict=True)]


def tensor_pieces(pieces: Sequence[Piece], bucket: PackedBucket) -> Sequence[Piece]:
    """The pieces of a bucket, one for each tensor."""
    if [there[1] for _, there in pieces] != [bucket.nbytes]:
        return pieces
    _, (address, _, device) = pieces[0]
    return [(one.offset, (address + one.offset, one.spec.nbytes, device)) for one in bucket.tensors]


def split_reads(pieces: Sequence[Piece], limits: ReadLimits) -> Iterator[list[Piece]]:
    """Splits pieces into reads within the limits. Instead of an offset a piece may have any address."""
    found: list[Piece] = []
    room = limits.nbytes
    for at, (address, nbytes, device) in pieces:
        done = 0
        while done < nbytes:
            if not room or len(found) == limits.pieces:
                yield found
                found, room = [], limits.nbytes
            length = min(room, nbytes - done)
            found.append((at + done, (address + done, length, device)))
            done, room = done + length, room - length
    if found:
        yield found


def _is_address(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def gone(why: object) -> Unavailable:
    return Unavailable(f"the trainer is gone, or has withdrawn these weights: {why}", fix=PUBLISH)


def refuse(what: str) -> InvalidWeights:
    return InvalidWeights(f"not a sender of ours: {what}", field="transport", fix="update both sides")
