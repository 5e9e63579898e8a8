"""Requests of rollouts, and how fast their workers make tokens."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from frontend.completions.reply_choice import Choice
from frontend.routing.fleet_status import FleetStatus
from frontend.routing.progress import GenerationProgress
from rl_plane.protocol.generation import GenerateDelta
from tests.support.committed_records import span
from tests.support.scripted_worker import Script, Stream

PACE_S = 0.02
"""Per token, where something is to happen meanwhile."""
LONG = 2000
"""Tokens that no test waits for."""


def native(size: int) -> list[tuple[str, dict[str, Any]]]:
    return [
        ("/inference/v1/generate", {"token_ids": [5] * size, "sampling_params": {}}),
        ("/generate", {"input_ids": [5] * size}),
        ("/generate", {"text": "x" * size}),
    ]


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> set[asyncio.Task[Any] | None]:
    """The requests that have waited for a worker."""
    wait, found = FleetStatus.wait_changed, set[asyncio.Task[Any] | None]()

    async def noted(status: FleetStatus, timeout_s: float) -> None:
        found.add(asyncio.current_task())
        await wait(status, timeout_s)

    monkeypatch.setattr(FleetStatus, "wait_changed", noted)
    return found


@pytest.fixture
def delivered(monkeypatch: pytest.MonkeyPatch) -> list[Choice]:
    """The choices of which a frontend of this process has taken tokens or an end, to deliver them."""
    take, found = Choice.take, list[Choice]()

    def noted(choice: Choice, event: Any) -> None:
        take(choice, event)
        if all(choice is not one for one in found):
            found.append(choice)

    monkeypatch.setattr(Choice, "take", noted)
    return found


@pytest.fixture
def progressing(monkeypatch: pytest.MonkeyPatch) -> list[GenerationProgress]:
    """The progress of each request of which a frontend of this process has taken tokens from a worker."""
    take, found = GenerationProgress.take, list[GenerationProgress]()

    def noted(progress: GenerationProgress, delta: GenerateDelta) -> None:
        take(progress, delta)
        if all(progress is not one for one in found):
            found.append(progress)

    monkeypatch.setattr(GenerationProgress, "take", noted)
    return found


def rest(base: int) -> Script:
    """Sends two tokens, or the single token that is requested."""

    async def script(stream: Stream) -> None:
        count = stream.body["request"]["max_tokens"]
        await stream.send([8] * count, span(base, 0, count), end=True)

    return script
