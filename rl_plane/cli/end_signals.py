"""Ends the work of a command at a signal."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn


class _Ended(BaseException):
    """A signal has asked for the end."""


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    for one in SIGNALS:  # a second signal must not end the work that the first one begins
        signal.signal(one, signal.SIG_IGN)
    raise _Ended


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Ends the block at SIGINT, SIGTERM or SIGHUP, without an error. The block ignores further signals."""
    before = {number: signal.signal(number, _end) for number in SIGNALS}
    try:
        yield
    except _Ended:
        pass
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
