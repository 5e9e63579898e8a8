"""Streams over an update whose policy lets running requests keep their KV: what their spans say."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.support.dialect_facade import facade, fine
from tests.support.frontend_process import PROMPT, http, next_event, update

if TYPE_CHECKING:
    from tests.conftest import Plane

__all__ = ["http"]


class Stream:
    """A stream of single tokens, read until `spans` names a new version."""

    def __init__(self, lines: AsyncIterator[str]) -> None:
        self._lines = lines
        self.spans: list[dict[str, Any]] = []

    async def reach(self, label: str) -> None:
        """Reads until a token of the version with this label has come."""
        while not self.spans or self.spans[-1]["version"] != label:
            event = await next_event(self._lines)
            assert "choices" in event, event
            (choice,) = event["choices"]
            self.spans = choice.get("weight_versions", self.spans)

    @property
    def kv(self) -> list[tuple[str, str | None]]:
        """(version, version of the KV) of each span."""
        return [(span["version"], (span.get("kv_version") or {}).get("version")) for span in self.spans]


@contextlib.asynccontextmanager
async def streaming(http: httpx.AsyncClient) -> AsyncIterator[Stream]:
    body = {"prompt_token_ids": PROMPT, "max_tokens": 4000, "stream": True}
    async with http.stream("POST", "/v1/completions", json=body) as response:
        yield Stream(response.aiter_lines())


async def test_spans_name_the_kept_kv(plane: Plane, http: httpx.AsyncClient) -> None:
    plane.spawn(token_delay_s=0.01)
    async with streaming(http) as stream:
        await stream.reach("initial")
        kept = await update(plane, 1, kv="keep")
        await stream.reach(kept["label"])
        assert stream.kv == [("initial", None), ("step_1", "initial")]
        anew = await update(plane, 2)
        await stream.reach(anew["label"])
        assert stream.kv == [("initial", None), ("step_1", "initial"), ("step_2", None)]
        (span,) = [one for one in stream.spans if "kv_version" in one]
        assert span["kv_version"].keys() == {"version", "sequence", "digest"}


@pytest.mark.parametrize(("flush_cache", "kv"), [(True, None), (False, "initial"), (None, None)])
async def test_sglangs_flush_cache_decides(plane: Plane, flush_cache: bool | None, kv: str | None) -> None:
    plane.spawn(token_delay_s=0.01)
    async with facade(plane) as http, streaming(http) as stream:
        await stream.reach("initial")
        body = {"model_path": str(plane.model(1)), "weight_version": "one"}
        more = {} if flush_cache is None else {"flush_cache": flush_cache}
        fine(await http.post("/update_weights_from_disk", json={**body, **more}))
        await stream.reach("one")
        assert stream.kv == [("initial", None), ("one", kv)]
