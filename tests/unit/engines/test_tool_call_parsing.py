"""A parser of tool calls: how it is chosen, and what its errors become. `tests/engines/test_tool_parsers.py` has the
engines' own parsers."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rl_plane.errors import InvalidRequest
from rl_plane.protocol.worker_ops import ParsedCall, ParsedToolCalls
from tests.support.vllm_stand_in import Llm, StandIn
from worker.engines.base import EngineInfo

TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "look"}}]
CALL = ParsedCall(name="look", arguments="{}")


class Parsing(StandIn):
    """An engine with the parsers `one` and `stub`, which starts with `parser`. `fails`: the error of each text, and of
    the empty one."""

    fails: Exception | None = None

    def __init__(self, directory: Path, parser: str) -> None:
        super().__init__(directory, Llm(), None, "cpu")
        self.parser = parser

    async def _start(self) -> EngineInfo:
        self._tokenizer = SimpleNamespace(decode=lambda token_ids, **options: f"text {token_ids}")
        self._eos = frozenset({0})
        await self._use_parser(self.parser)
        return await super()._start()

    def _parsers(self) -> Collection[str]:
        return ("stub", "one")

    def _calls_of(
        self, name: str, token_ids: list[int], tools: list[dict[str, Any]]
    ) -> tuple[str, list[ParsedCall]]:
        if name == "stub":
            raise NotImplementedError("a stub")
        if self.fails is not None:
            raise self.fails
        return f"read {token_ids}", [CALL]


@pytest.fixture
async def engine(tmp_path: Path) -> Parsing:
    engine = Parsing(tmp_path, "one")
    await engine.start()
    return engine


async def test_a_parser_reads_a_text_without_its_last_token(engine: Parsing) -> None:
    for token_ids in ([5, 6, 0], [5, 6]):
        assert await engine.parse_tool_calls(token_ids, TOOLS) == ParsedToolCalls(
            content="read [5, 6]", calls=[CALL]
        )


@pytest.mark.parametrize("error", [AttributeError("no get"), ValueError("no JSON"), NotImplementedError()])
@pytest.mark.parametrize("token_ids", [[5, 0], [0]])
async def test_a_text_that_breaks_the_parser_has_no_calls(
    engine: Parsing, error: Exception, token_ids: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    engine.fails = error
    reply = await engine.parse_tool_calls(token_ids, TOOLS)
    assert reply == ParsedToolCalls(content=f"text {token_ids[:-1]}", calls=[])
    assert type(error).__name__ in caplog.text


async def test_an_error_without_a_text_is_of_the_tools(engine: Parsing) -> None:
    engine.fails = AttributeError("no name")
    with pytest.raises(InvalidRequest, match="no name") as caught:
        await engine.parse_tool_calls([], TOOLS)
    assert caught.value.facts["field"] == "tools"


@pytest.mark.parametrize(("name", "says"), [("other", "finds no parser"), ("stub", "a stub")])
async def test_a_parser_that_can_not_work_is_refused_at_the_start(tmp_path: Path, name: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as caught:
        await Parsing(tmp_path, name).start()
    assert caught.value.facts["field"] == "engine_arg.tool_call_parser"
    assert ("one, stub" if name == "other" else "model's family") in caught.value.facts["fix"]
