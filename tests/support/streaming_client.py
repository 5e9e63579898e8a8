"""A client that reads a streamed completion event by event."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest_asyncio

from tests.conftest import Plane
from tests.support.frontend_process import (
    PROMPT,
    frontend,
    next_event,
)


@pytest_asyncio.fixture
async def http(plane: Plane) -> AsyncIterator[httpx.AsyncClient]:
    async with frontend(plane, admission_wait_s=20.0) as client:
        yield client


async def ready(plane: Plane, count: int) -> None:
    await (await plane.client()).run("ready", {"min_workers": count, "wait_s": 30})


class Streaming:
    """A streamed request, read event by event."""

    def __init__(self, http: httpx.AsyncClient, **body: Any) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.last: dict[str, Any] = {}
        """The last choice."""
        self.error: dict[str, Any] | None = None
        asked = {"prompt_token_ids": PROMPT, "stream": True, "return_token_ids": True, **body}
        self._request = http.stream("POST", "/v1/completions", json=asked)

    async def __aenter__(self) -> Streaming:
        response = await self._request.__aenter__()
        assert response.status_code == 200, await response.aread()
        self._lines = response.aiter_lines()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._request.__aexit__(*error)

    async def until(self, holds: Callable[[Streaming], bool]) -> Streaming:
        while not holds(self):
            assert await self.more(), "it ended"
        return self

    async def more(self) -> bool:
        event = await next_event(self._lines)
        if event is None or event == "[DONE]":
            return False
        if "error" in event:
            self.error = event["error"]
            return False
        (self.last,) = event["choices"]
        self.tokens += self.last["token_ids"]
        self.logprobs += self.last["logprobs"]["token_logprobs"]
        return True

    async def end(self) -> Streaming:
        while await self.more():
            pass
        return self

    @property
    def spans(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.last["weight_versions"]
        return found
