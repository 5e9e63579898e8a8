"""A body with tensors is large. Neither freeing it nor searching it may stop the event loop."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
from starlette.requests import Request

from frontend.dialects.sglang.body_tensors import FIELD, read_tensors
from frontend.server import large_bodies
from frontend.server.bodies import LargeBodyPlace, read_hashed
from frontend.server.large_bodies import LongText, parse_large_object
from frontend.server.large_memory import LargeMemory
from rl_plane.protocol.versions import HostTensor, TensorSpec
from rl_plane.weights.safetensors_file import write_safetensors

TENSOR_BYTES = 48_000_000
PIECE_BYTES = 1 << 20
BOUND_S = 30.0


@pytest.fixture(scope="module")
def body(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A request of 64 MB with one tensor."""
    path: Path = tmp_path_factory.mktemp("body") / "weights.safetensors"
    write_safetensors(path, {"a": (TensorSpec("U8", (TENSOR_BYTES,)), bytes(TENSOR_BYTES))})
    return json.dumps({FIELD: [base64.b64encode(path.read_bytes()).decode()]}).encode()


def request(body: bytes) -> Request:
    """A request whose body comes in pieces."""
    starts = iter(range(0, len(body), PIECE_BYTES))

    async def receive() -> dict[str, Any]:
        start = next(starts)
        more = start + PIECE_BYTES < len(body)
        return {"type": "http.request", "body": body[start : start + PIECE_BYTES], "more_body": more}

    return Request({"type": "http", "method": "POST", "headers": []}, receive)


async def tensors_in(body: bytes) -> tuple[dict[str, Any], Mapping[str, HostTensor]]:
    """Returns what a route holds of a request: the parsed body, and its tensors."""
    with LargeBodyPlace(asyncio.Semaphore()) as place:
        parsed, _ = await read_hashed(request(body), len(body), place)
    return parsed, await asyncio.to_thread(read_tensors, parsed[FIELD])


def resident() -> int:
    return int(psutil.Process().memory_info().rss)


async def test_the_loop_does_not_free_a_body_or_its_tensors(body: bytes) -> None:
    """Compares the processor time of the loop's thread, which other processes don't lengthen, in one run."""
    plain = bytearray(body)
    start = time.thread_time()
    del plain
    of_plain = time.thread_time() - start

    parsed, tensors = await tensors_in(body)
    assert isinstance(parsed[FIELD][0], LongText)
    assert tensors["a"].data.nbytes == TENSOR_BYTES
    held = resident()
    start = time.thread_time()
    del parsed, tensors
    assert time.thread_time() - start < of_plain / 4
    async with asyncio.timeout(BOUND_S):
        while resident() > held - len(body):  # noqa: ASYNC110 - the condition has no event
            await asyncio.sleep(0.01)


def test_a_view_keeps_the_memory_that_it_shows() -> None:
    memory = LargeMemory(bytes(range(250)) * 20_000)
    view = memoryview(memory)[-250:]
    del memory
    assert bytes(view) == bytes(range(250))


class _Searched(bytearray):
    """A body that notes the longest search."""

    longest = 0

    def find(self, part: Any, start: Any = None, end: Any = None, /) -> int:
        self.longest = max(self.longest, (len(self) if end is None else end) - (start or 0))
        return super().find(part, start, end)


@pytest.mark.parametrize("size", [large_bodies.SEARCH_BYTES - 12, 3 * large_bodies.SEARCH_BYTES])
def test_a_long_string_is_searched_in_steps(size: int) -> None:
    body = _Searched(b'{"a":"' + b"x" * size + b'","b":"\\"","c":"' + b"y" * size + b'"}')
    parsed = parse_large_object(body)
    assert [bytes(parsed[name].data) for name in "ac"] == [b"x" * size, b"y" * size]
    assert parsed["b"] == '"'
    assert 0 < body.longest <= large_bodies.SEARCH_BYTES
