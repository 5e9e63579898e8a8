"""Ends the work of a command at a signal."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn


class _Ended(BaseException):
    """A signal has asked for the end."""


def _end(number: int, frame: FrameType | None) -> NoReturn:
    raise _Ended


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Ends the block at SIGINT, SIGTERM or SIGHUP, without an error."""
    before = {number: signal.signal(number, _end) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    except _Ended:
        pass
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
