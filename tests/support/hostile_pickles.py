"""Guards and mutations for tests of readers that must never run a pickle."""

from __future__ import annotations

import pickletools
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

WATCHED = (
    "import",
    "exec",
    "compile",
    "os.system",
    "subprocess.Popen",
    "open",
    "pickle.find_class",
    "ctypes.dlopen",
)
SYSTEM = b"\x8c\x02os\x8c\x06system\x93"
"""The opcodes of the name `os.system`."""

_events: list[str] | None = None


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _events is not None and event in WATCHED:
        _events.append(event)


class Reduced:
    """Makes a pickle that calls a function: `Reduced(function, arguments)`."""

    def __init__(self, *what: Any) -> None:
        self._what = what

    def __reduce__(self) -> Any:
        return self._what


@contextmanager
def forbidden_to_run() -> Iterator[None]:
    """Fails if anything is imported, run, opened or unpickled within, by Python's own audit events."""
    global _events
    if not getattr(sys, "_rl_plane_audited", False):  # a hook can't be taken away again
        sys.addaudithook(_audit)
        sys._rl_plane_audited = True  # type: ignore[attr-defined]
    modules, _events = set(sys.modules), []
    try:
        yield
    finally:
        happened, _events = _events, None
    assert happened == []
    assert set(sys.modules) == modules


def mutated(data: bytes, chance: random.Random) -> bytearray:
    """The data after one to five changes."""
    mutant = bytearray(data)
    for _ in range(chance.randrange(1, 6)):
        if mutant:
            chance.choice(_CHANGES)(mutant, chance)
    return mutant


def _swap_opcode(data: bytearray, chance: random.Random) -> None:
    data[chance.randrange(len(data))] = ord(chance.choice(pickletools.opcodes).code)


def _flip(data: bytearray, chance: random.Random) -> None:
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)


def _cut(data: bytearray, chance: random.Random) -> None:
    start = chance.randrange(len(data))
    del data[start : start + chance.randrange(1, 40)]


def _copy(data: bytearray, chance: random.Random) -> None:
    start, to = chance.randrange(len(data)), chance.randrange(len(data))
    data[to:to] = data[start : start + chance.randrange(1, 200)]


def _insert(data: bytearray, chance: random.Random) -> None:
    at = chance.randrange(len(data))
    data[at:at] = chance.choice(
        [SYSTEM, b"R", b"\x81", b"b", b"o", b"i", b"cos\nsystem\n", b"\x82\xf0", b"Q", b"h\x00"]
    )


_CHANGES: tuple[Callable[[bytearray, random.Random], None], ...] = (_swap_opcode, _flip, _cut, _copy, _insert)
