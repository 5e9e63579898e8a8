"""Calls that a model makes by itself: what a worker's parser finds becomes the reply's `tool_calls`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from frontend.completions.auto_tools import AutoTools, CallReader
from frontend.completions.openai_replies import Chunks, whole
from frontend.completions.reply_choice import Choice
from rl_plane.errors import Unsupported
from rl_plane.membership.core import PARSES_CALLS, Member
from rl_plane.protocol.generation import GenerateDelta
from tests.support.openai_plans import chat

TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "look"}}]
CALL = {"id": "call-x-0", "type": "function", "function": {"name": "look", "arguments": "{}"}}


class Workers:
    """A client and a view of workers. Those in `able` have a parser."""

    def __init__(self, able: str) -> None:
        self.asked: list[tuple[str, str, Any]] = []
        self.members = tuple(
            Member(key, f"i{key}", "server", 1, 1, {PARSES_CALLS: key in able}) for key in ("a", "b")
        )

    def snapshot(self) -> Any:
        return self

    async def call(self, instance_id: str, op: str, body: dict[str, Any]) -> Any:
        self.asked.append((instance_id, op, body["tokens"]))
        calls = [{"name": "look", "arguments": "{}"}] if body["tokens"] else []
        return SimpleNamespace(body={"content": "I look. ", "calls": calls})


def test_calls_are_read_for_tools_without_a_choice_or_with_auto() -> None:
    for choice in ("auto", None):
        assert chat(tools=TOOLS, tool_choice=choice).auto_tools == AutoTools(tuple(TOOLS), choice == "auto")
    for choice in ("none", "required"):
        assert chat(tools=TOOLS, tool_choice=choice).auto_tools is None
    assert chat(tool_choice="auto").auto_tools is None


async def test_a_worker_with_a_parser_reads_the_calls() -> None:
    workers = Workers("b")
    reader = CallReader(workers, workers)  # type: ignore[arg-type]
    tools, choice = AutoTools(tuple(TOOLS), True), Choice(0)
    choice.token_ids = [5, 6]
    assert await reader.reads(tools)
    assert await reader.calls_of(choice, tools, "x") == ("I look. ", [CALL])
    assert workers.asked == [("b", "parse_tool_calls", []), ("b", "parse_tool_calls", [5, 6])]


async def test_without_a_parser_auto_is_refused_by_name_and_the_default_stays_a_text() -> None:
    workers = Workers("")
    reader = CallReader(workers, workers)  # type: ignore[arg-type]
    assert not await reader.reads(AutoTools(tuple(TOOLS), False))
    with pytest.raises(Unsupported) as caught:
        await reader.reads(AutoTools(tuple(TOOLS), True))
    assert (caught.value.facts["field"], workers.asked) == ("tool_choice", [])


@pytest.mark.parametrize(("calls", "rest"), [([CALL], "I look. "), ([CALL], ""), (None, "")])
def test_a_reply_has_the_calls_and_the_rest_of_the_text(calls: list[dict[str, Any]] | None, rest: str) -> None:
    plan, choice = chat(tools=TOOLS), Choice(0)
    chunks = Chunks(plan, [choice], "m", 1)
    made = []
    for text, end in (("I look. <c", None), ("all>", "stop")):
        delta = GenerateDelta(token_ids=[5], text=text, finish_reason=end)
        choice.take(delta)
        if end is not None:
            choice.calls, choice.rest = calls, rest
        made.append(chunks.of(choice, delta, 0)["choices"][0])
    (row,) = whole(plan, [choice], "m", 1)["choices"]
    first, last = made
    assert first["delta"] == {"role": "assistant", "content": ""}, "the text waits for its calls"
    if calls is None:
        assert row["message"]["content"] == last["delta"]["content"] == "I look. <call>"
        assert row["finish_reason"] == last["finish_reason"] == "stop"
        return
    assert row["message"] == {"role": "assistant", "content": rest, "tool_calls": [CALL]}
    assert last["delta"] == {**({"content": rest} if rest else {}), "tool_calls": [{"index": 0, **CALL}]}
    assert row["finish_reason"] == last["finish_reason"] == "tool_calls"
