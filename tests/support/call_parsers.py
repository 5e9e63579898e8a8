"""A parser of tool calls at a worker, in the place of an engine's own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from frontend.completions.auto_tools import CallReader


async def _yes(*_: Any) -> bool:
    return True


def parse_calls(
    patch: pytest.MonkeyPatch,
    calls_of: Callable[..., Awaitable[Any]],
    reads: Callable[..., Awaitable[Any]] = _yes,
) -> None:
    """A worker has a parser. `calls_of` reads the calls of a finished text, and `reads` says whether it can."""
    patch.setattr(CallReader, "reads", reads)
    patch.setattr(CallReader, "calls_of", calls_of)
