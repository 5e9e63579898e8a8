"""Mutations of bytes and of values. The same random numbers give the same mutations."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import msgpack

MAX_DEPTH = 6
MUTATIONS = 3
"""At most so many changes of one message: more of them are refused by the first check that they meet."""

ODD_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1 << 53, (1 << 64) - 1, -(1 << 63), 0.5, float("inf"), float("nan"),
    "", "x", "0" * 16, "x" * 10_000, "\x00", "é\u202e", "../../etc/passwd", "*", ">",
    [], [[]], [0] * 1000, {}, {"": None}, {"v": 99}, b"", b"\xff" * 100,
)  # fmt: skip


def of_value(pick: random.Random, value: Any, depth: int = 0) -> Any:
    """Returns a copy with one change: a part is replaced, removed or added."""
    if isinstance(value, dict) and value and depth < MAX_DEPTH and pick.random() < 0.8:
        changed = dict(value)
        key = pick.choice(sorted(changed))
        action = pick.random()
        if action < 0.15:
            del changed[key]
        elif action < 0.3:
            changed[pick.choice(["v", "x", "id", "op", "body"])] = pick.choice(ODD_VALUES)
        else:
            changed[key] = of_value(pick, changed[key], depth + 1)
        return changed
    if isinstance(value, list) and value and depth < MAX_DEPTH and pick.random() < 0.7:
        place = pick.randrange(len(value))
        return [*value[:place], of_value(pick, value[place], depth + 1), *value[place + 1 :]]
    return pick.choice(ODD_VALUES)


def of_bytes(pick: random.Random, data: bytes) -> bytes:
    """Returns a copy with one change: bytes are flipped, removed, repeated or added."""
    place = pick.randrange(len(data) + 1)
    end = min(len(data), place + pick.choice([1, 2, 8, 64]))
    action = pick.randrange(5)
    if action == 0:
        return data[:place]
    if action == 1:
        return data[:place] + pick.randbytes(end - place) + data[end:]
    if action == 2:
        return data[:place] + data[end:]
    if action == 3:
        return data[:place] + pick.randbytes(pick.choice([1, 4, 16])) + data[place:]
    return data[:place] + data[place:end] * pick.choice([2, 100]) + data[end:]


def packed(value: Any) -> bytes:
    return bytes(msgpack.packb(value))


def as_json(value: Any) -> bytes:
    return json.dumps(value, default=lambda one: one.hex()).encode()


def of_message(pick: random.Random, value: Any, encode: Callable[[Any], bytes]) -> bytes:
    """Encodes a mutated value. Half of the messages are mutated as bytes too."""
    for _ in range(pick.randrange(MUTATIONS + 1)):
        value = of_value(pick, value)
    data = encode(value)
    for _ in range(pick.randrange(MUTATIONS) if pick.random() < 0.5 else 0):
        data = of_bytes(pick, data)
    return data
