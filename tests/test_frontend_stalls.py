"""A reader over HTTP that stands still, for longer than every buffer between it and the engine has room."""

from __future__ import annotations

import json
import socket
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from frontend import listeners
from frontend.replies import Choice
from rl_plane.streams import WINDOW, IncomingStream
from tests.test_frontend_generation import PROMPT, ask, frontend, next_event, tokens_under, until_running, update

if TYPE_CHECKING:
    from tests.conftest import Plane

TOKENS = 4000
TOPS = 20
"""Of each token: some 750 bytes of JSON, so of all tokens ten times what all buffers take."""
SOCKET_BYTES = 1 << 15
"""Of each end: Linux would buffer more than the whole reply."""
OTHERS = 300
"""Tokens of a request beside it: more than a window."""


async def test_one_that_stands_still_holds_up_nobody_and_loses_nothing(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:

    worker = plane.spawn()
    digest = (await update(plane, 1))["digest"]
    client = await plane.client()
    taken, waiting = 0, 0
    bind, take, put = listeners.bind, Choice.take, IncomingStream.put

    def small(*args: Any) -> socket.socket:
        """What is accepted by it is, too."""
        listener = bind(*args)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
        return listener

    def counted(choice: Choice, event: Any) -> None:
        nonlocal taken
        take(choice, event)
        if choice.top_logprobs is not None:  # only the slow one has them
            taken = len(choice.token_ids)

    def measured(stream: IncomingStream, body: dict[str, Any]) -> bool:
        nonlocal waiting
        gap = put(stream, body)
        waiting = max(waiting, stream._queue.qsize())
        return gap

    monkeypatch.setattr("frontend.process.bind", small)
    monkeypatch.setattr(Choice, "take", counted)
    monkeypatch.setattr(IncomingStream, "put", measured)
    few = httpx.AsyncHTTPTransport(socket_options=[(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BYTES)])
    asked = {"prompt_token_ids": PROMPT, "max_tokens": TOKENS, "logprobs": TOPS, "return_token_ids": True}
    async with (
        frontend(plane) as http,
        httpx.AsyncClient(base_url=http.base_url, timeout=60, transport=few) as slow,
        slow.stream("POST", "/v1/completions", json={**asked, "stream": True}) as response,
    ):
        lines = response.aiter_lines()
        (first,) = (await next_event(lines))["choices"]
        # Its engine goes on to the end meanwhile, and others are served by the same worker and frontend.
        await until_running(plane, client, worker.instance_id, 0)
        before = -1
        while taken > before:
            before = taken
            (choice,) = (await ask(http, max_tokens=OTHERS, return_token_ids=True))["choices"]
            assert choice["token_ids"] == tokens_under(digest, 0, OTHERS)
        # It is left with the worker: neither the frontend's objects nor its queue have it.
        assert 0 < taken < TOKENS / 2
        assert 0 < waiting <= WINDOW

        choices = [first]
        async for line in lines:
            if line not in ("", "data: [DONE]"):
                choices += json.loads(line.removeprefix("data: "))["choices"]
    assert [token for choice in choices for token in choice["token_ids"]] == tokens_under(digest, 0, TOKENS)
    assert sum(len(choice["logprobs"]["top_logprobs"]) for choice in choices) == TOKENS
    (span,) = choices[-1]["weight_versions"]
    assert (choices[-1]["finish_reason"], span["digest"], span["end"]) == ("length", digest, TOKENS)
