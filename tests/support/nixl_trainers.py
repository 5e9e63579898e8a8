"""Helpers of `tests/transports/test_nixl_transport.py` and of other tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest_asyncio

from tests.support.nixl_trainer import Trainer


@pytest_asyncio.fixture
async def trainer() -> AsyncIterator[Callable[..., Trainer]]:
    started: list[Trainer] = []

    def start(**how: Any) -> Trainer:
        started.append(Trainer(**how))
        return started[-1]

    yield start
    for one in started:
        one.close()


HEAL_S = 60.0
"""A worker's first pull imports nixl, and with it torch."""


def update_of(transport: dict[str, Any], version: str, **policy: Any) -> dict[str, Any]:
    return {"transport": transport, "version": version, "policy": {"prepare_timeout_s": HEAL_S, **policy}}
