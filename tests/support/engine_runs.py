"""Helpers of tests of an EngineAdapter: running requests, and updates through its own receivers."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import threading
from pathlib import Path
from typing import Any

import pytest

from rl_plane.protocol.generation import GenerateDelta, GenerateRequest, VersionSpan
from rl_plane.protocol.update_requests import PreparedReply
from rl_plane.protocol.versions import WeightVersion
from tests.support.receive_requests import NamedRequest, files_request
from worker.engines.base import EngineAdapter, PauseMode
from worker.engines.capabilities import CanLoadAdapters, require
from worker.receive.staging import adapter_digest, model_digest
from worker.testing.tiny_model import witness_next_token

BOUND_S = 180.0
"""More than any step takes on a busy machine."""

_names = (f"staging-{number}" for number in itertools.count())
_ids = (f"request-{number}" for number in itertools.count())


def ask(prompt: list[int], **more: Any) -> GenerateRequest:
    more = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True} | more
    return GenerateRequest(id=next(_ids), prompt_token_ids=prompt, **more)


@dataclasses.dataclass
class Result:
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    text: str = ""
    finish: str | None = None
    spans: list[VersionSpan] = dataclasses.field(default_factory=list)
    """The last delta's."""
    deltas: list[GenerateDelta] = dataclasses.field(default_factory=list)


class Run:
    """A request under way, and a way to wait until it has so many tokens."""

    def __init__(self, engine: EngineAdapter, request: GenerateRequest) -> None:
        self.request = request
        self.result = Result()
        self._grown = asyncio.Condition()
        self._task = asyncio.create_task(self._consume(engine))

    async def _consume(self, engine: EngineAdapter) -> Result:
        result = self.result
        try:
            async for delta in engine.generate(self.request):
                result.tokens += delta.token_ids
                result.logprobs += delta.logprobs or []
                result.text += delta.text
                result.finish = delta.finish_reason
                result.spans = delta.spans
                result.deltas.append(delta)
                async with self._grown:
                    self._grown.notify_all()
        finally:
            async with self._grown:
                self._grown.notify_all()
        return result

    async def reach(self, count: int) -> None:
        async with asyncio.timeout(BOUND_S), self._grown:
            await self._grown.wait_for(lambda: self._task.done() or len(self.result.tokens) >= count)
        assert len(self.result.tokens) >= count

    async def end(self) -> Result:
        async with asyncio.timeout(BOUND_S):
            return await self._task

    def cancel(self) -> None:
        self._task.cancel()


async def run(engine: EngineAdapter, request: GenerateRequest) -> Result:
    return await Run(engine, request).end()


def version(sequence: int, path: Path) -> WeightVersion:
    return WeightVersion("run", sequence, f"step_{sequence}", model_digest(path))


def adapter_version(sequence: int, path: Path) -> WeightVersion:
    return WeightVersion("run", sequence, f"lora_{sequence}", adapter_digest(path))


def reception(path: Path, **more: Any) -> NamedRequest:
    return files_request(next(_names), path, **more)


async def receive(engine: EngineAdapter, what: NamedRequest) -> tuple[str, PreparedReply]:
    await asyncio.to_thread(engine.receiver.open, *what)
    return what.staging, await asyncio.to_thread(engine.receiver.receive, what.staging, lambda: False)


async def update(engine: EngineAdapter, path: Path, sequence: int, mode: PauseMode = "keep") -> None:
    staging, reply = await receive(engine, reception(path))
    assert reply["digest"] == model_digest(path)
    await engine.pause(mode, False)
    assert await engine.swap(staging, version(sequence, path)) is True
    await engine.resume()


async def load_adapter(engine: EngineAdapter, name: str, path: Path, sequence: int = 1) -> None:
    staging, reply = await receive(engine, reception(path, kind="lora"))
    assert reply["digest"] == adapter_digest(path)
    await engine.pause("keep", False)
    try:
        await require(engine, CanLoadAdapters).swap_adapter(name, staging, adapter_version(sequence, path))
    finally:
        await engine.resume()


async def unload_adapter(engine: EngineAdapter, name: str) -> None:
    await engine.pause("keep", False)
    await require(engine, CanLoadAdapters).swap_adapter(name, None, None)
    await engine.resume()


def witnessed(seed: int, token: int, count: int) -> list[int]:
    tokens = []
    for _ in range(count):
        token = witness_next_token(seed, token)
        tokens.append(token)
    return tokens


async def ends_while_tokenized(engine: Any, request: GenerateRequest, patch: pytest.MonkeyPatch) -> None:
    """Ends `request`, whose prompt is text, while the prompt waits for the tokenizer: by an abort, then by a pause."""
    await _ends_while_tokenized(engine, request, patch, pauses=False)
    await _ends_while_tokenized(engine, request, patch, pauses=True)
    await engine.resume()


async def _ends_while_tokenized(
    engine: Any, request: GenerateRequest, patch: pytest.MonkeyPatch, pauses: bool
) -> None:
    from transformers import PreTrainedTokenizerFast

    begun, go, encode = threading.Event(), threading.Event(), PreTrainedTokenizerFast.encode

    def held(*args: Any, **more: Any) -> Any:
        begun.set()
        assert go.wait(BOUND_S)
        return encode(*args, **more)

    with patch.context() as patched:
        patched.setattr(PreTrainedTokenizerFast, "encode", held)
        asked = asyncio.create_task(anext(engine.generate(request)))
        try:
            assert await asyncio.to_thread(begun.wait, BOUND_S)
            if pauses:
                await engine.pause("abort", False)
            else:
                assert await engine.abort(["another"]) == 0
                assert await engine.abort([request.id]) == 1
            async with asyncio.timeout(BOUND_S):
                delta = await asked
        finally:
            go.set()
    assert (delta.token_ids, delta.finish_reason) == ([], "abort")
    assert engine.load() == (0, 0)
