"""A bucket with replicas is refused: the protocol counts on one server that answers for it."""

from __future__ import annotations

from typing import Any

import pytest

from rl_plane.bus import Bus
from rl_plane.errors import InvalidRequest
from rl_plane.subjects import Subjects

STATE = Subjects("a", "b").state


async def ensure(monkeypatch: pytest.MonkeyPatch, replicas: int) -> None:
    """As the server tells of a bucket that somebody has given so many replicas."""
    bus = Bus("nats://127.0.0.1:1", "test")

    async def told(subject: str, payload: bytes, headers: dict[str, str] | None = None) -> dict[str, Any]:
        return {"config": {"num_replicas": replicas, "metadata": {"rl_plane_component": STATE.owner}}}

    monkeypatch.setattr(bus, "_request", told)
    await bus.ensure_bucket(STATE)


async def test_one_replica_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    await ensure(monkeypatch, 1)


async def test_more_are_refused_and_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidRequest, match="has 3 replicas") as refused:
        await ensure(monkeypatch, 3)
    assert refused.value.facts["field"] == "nats_url"
    assert STATE.stream in refused.value.facts["fix"]
