"""Bucket entries that no process of the plane writes, for every key that it reads."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator

import msgpack

from rl_plane.commit.history import history_key
from rl_plane.protocol.subjects import (
    ADMISSION_PREFIX,
    CANARY_HISTORY,
    FENCE_KEY,
    FRONTEND_PREFIX,
    HISTORY_PREFIX,
    LOCK,
    MEMBER_PREFIX,
    MEMORY,
    OPENED,
    PAUSE,
    RECORD,
    SESSION,
    KeyValueBucket,
    Subjects,
)

STRANGER = "0123456789abcdef"
LARGE = 400_000
"""Bytes of the large entries: NATS carries a million."""

BAD_VALUES = {
    "empty": b"",
    "text": b"garbage",
    "a list": b"[]",
    "a map": b"{}",
    "another version": b'{"v": 99, "version": 2}',
    "a msgpack list": msgpack.packb([1, 2, 3]),
    "a msgpack map": msgpack.packb({"incarnation": 1, "info": None, "server_id": [], "client_id": "x"}),
    "nested": b"[" * LARGE,
    "long": b'{"v": "' + b"x" * LARGE + b'"}',
}


def keys_of(subjects: Subjects, instance_id: str, update_id: str) -> Iterator[tuple[KeyValueBucket, str]]:
    """Yields every key that a process of the plane reads, for this worker, a stranger, and this update. The bucket
    of offers must exist."""
    for one in (instance_id, STRANGER, "x"):
        yield subjects.members, MEMBER_PREFIX + one
        yield subjects.offers, one
        for prefix in (ADMISSION_PREFIX, FRONTEND_PREFIX):
            yield subjects.state, prefix + one
    for key in (RECORD, LOCK, PAUSE, MEMORY, SESSION, OPENED, CANARY_HISTORY, FENCE_KEY):
        yield subjects.state, key
    yield subjects.state, history_key(update_id)
    yield subjects.state, HISTORY_PREFIX + "x"


def broken(value: bytes | None) -> dict[str, bytes]:
    """Versions of a sound value that can't be decoded."""
    if not value:
        return {}
    found = {"truncated": value[: len(value) // 2]}
    with contextlib.suppress(
        ValueError, TypeError, RecursionError
    ):  # a member's record is msgpack, and the value may be broken already
        fields = dict(json.loads(value))
        found["other types"] = json.dumps({name: [7] for name in fields}).encode()
        found["a further field"] = json.dumps({**fields, "v": 99}).encode()
    return found
