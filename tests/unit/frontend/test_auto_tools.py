"""Calls that a model makes by itself: what a worker's parser finds becomes the reply's `tool_calls`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from frontend.completions.auto_tools import MAX_CHECKED, AutoTools, CallReader
from frontend.completions.openai_replies import Chunks, whole
from frontend.completions.reply_choice import Choice
from rl_plane.errors import DeadlineExceeded, InvalidRequest, Unavailable, Unsupported
from rl_plane.membership.core import PARSES_CALLS, Member, Snapshot
from rl_plane.protocol.generation import GenerateDelta
from tests.support.openai_plans import chat

TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "look"}}]
CALL = {"id": "call-x-0", "type": "function", "function": {"name": "look", "arguments": "{}"}}


class Workers:
    """A client, a view and the status of the workers `a`, `b` and `c`. Those in `able` have a parser, those in `open`
    are open. Each of `fails` is the outcome of one call."""

    def __init__(self, able: str, open: str = "") -> None:
        self.asked: list[tuple[str, str, Any]] = []
        self.fails: list[Exception] = []
        self.open = open
        self.have_parsers(able)

    def have_parsers(self, able: str) -> None:
        members = [Member(key, f"i{key}", "server", 1, 1, {PARSES_CALLS: key in able}) for key in "abc"]
        self.fleet = Snapshot(1, "", tuple(members))

    def snapshot(self) -> Snapshot:
        return self.fleet

    def admitted(self) -> dict[str, Any]:
        return dict.fromkeys(self.open)

    async def call(self, instance_id: str, op: str, body: dict[str, Any]) -> Any:
        self.asked.append((instance_id, op, body["tokens"]))
        if self.fails:
            raise self.fails.pop(0)
        calls = [{"name": "look", "arguments": "{}"}] if body["tokens"] else []
        return SimpleNamespace(body={"content": "I look. ", "calls": calls})


def reader_of(workers: Any, **bounds: float) -> CallReader:
    return CallReader(workers, workers, workers, **bounds)


def ended() -> Choice:
    choice = Choice(0)
    choice.token_ids = [5, 6]
    return choice


def test_calls_are_read_for_tools_without_a_choice_or_with_auto() -> None:
    for choice in ("auto", None):
        assert chat(tools=TOOLS, tool_choice=choice).auto_tools == AutoTools(tuple(TOOLS), choice == "auto")
        assert chat(tools=TOOLS, tool_choice=choice, messages=None, prompt_token_ids=[5]).auto_tools is not None
    for choice in ("none", "required"):
        assert chat(tools=TOOLS, tool_choice=choice).auto_tools is None
    assert chat(tool_choice="auto").auto_tools is None


async def test_a_worker_with_a_parser_reads_the_calls() -> None:
    workers = Workers("b")
    reader, tools = reader_of(workers), AutoTools(tuple(TOOLS), True)
    assert await reader.reads(tools)
    assert await reader.calls_of(ended(), tools, "x") == ("I look. ", [CALL])
    assert workers.asked == [("b", "parse_tool_calls", []), ("b", "parse_tool_calls", [5, 6])]


async def test_without_a_parser_auto_is_refused_by_name_and_the_default_stays_a_text() -> None:
    workers = Workers("")
    reader = reader_of(workers)
    assert not await reader.reads(AutoTools(tuple(TOOLS), False))
    with pytest.raises(Unsupported) as caught:
        await reader.reads(AutoTools(tuple(TOOLS), True))
    assert (caught.value.facts["field"], workers.asked) == ("tool_choice", [])


async def test_a_text_waits_for_a_worker_that_has_time_to_read_it() -> None:
    workers = Workers("b")
    workers.fails = [Unavailable("64 ops are under way")] * 3
    reader = reader_of(workers, retry_s=0.0)
    assert await reader.calls_of(ended(), AutoTools(tuple(TOOLS), False), "x") == ("I look. ", [CALL])
    assert len(workers.asked) == 4


async def test_a_text_waits_no_longer_than_its_bound() -> None:
    workers = Workers("b")
    workers.fails = [Unavailable("64 ops are under way")]
    with pytest.raises(Unavailable, match="64 ops"):
        await reader_of(workers, read_s=-1.0, retry_s=0.0).calls_of(ended(), AutoTools(tuple(TOOLS), False), "x")


async def test_the_same_tools_are_checked_once_in_one_fleet() -> None:
    workers = Workers("b")
    reader, checks = reader_of(workers), 0
    one, two, *more, last = [
        AutoTools(({"function": {"name": str(number)}},), False) for number in range(MAX_CHECKED + 1)
    ]
    first = ((one, 1), (one, 0), (two, 1), (one, 0))
    for tools, is_new in (*first, *((tools, 1) for tools in more), (one, 0), (last, 1), (last, 0), (one, 1)):
        checks += is_new
        assert await reader.reads(tools)
        assert len(workers.asked) == checks, "what is remembered has a bound"
    workers.have_parsers("c")
    assert await reader.reads(one)
    assert workers.asked[-1][0] == "c"
    assert len(workers.asked) == checks + 1, "another worker may have another parser"


async def test_tools_that_are_refused_are_checked_again() -> None:
    workers = Workers("b")
    reader, tools = reader_of(workers), AutoTools(tuple(TOOLS), False)
    workers.fails = [InvalidRequest("no name", field="tools")] * 2
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="no name"):
            await reader.reads(tools)
    assert await reader.reads(tools)


async def test_open_workers_are_asked_first() -> None:
    for _ in range(20):  # the order is drawn
        workers = Workers("abc", open="bc")
        workers.fails = [DeadlineExceeded("it hangs"), Unavailable("it leaves")]
        await reader_of(workers).calls_of(ended(), AutoTools(tuple(TOOLS), False), "x")
        first, second, last = [instance_id for instance_id, _, _ in workers.asked]
        assert ({first, second}, last) == ({"b", "c"}, "a")


@pytest.mark.parametrize("is_asked_for", [False, True])
async def test_a_text_whose_last_reader_has_left_stays_a_text_unless_its_calls_are_asked_for(
    is_asked_for: bool,
) -> None:
    workers = Workers("b")
    reader, tools = reader_of(workers), AutoTools(tuple(TOOLS), is_asked_for)
    assert await reader.reads(tools)
    workers.have_parsers("")
    if not is_asked_for:
        assert await reader.calls_of(ended(), tools, "x") == ("", None)
        return
    with pytest.raises(Unavailable) as caught:
        await reader.calls_of(ended(), tools, "x")
    assert "tool_call_parser" in caught.value.facts["fix"]


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


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_choice_that_is_cut_after_its_calls_were_read_has_none(choice: str) -> None:
    text = '[{"name": "look", "parameters": {}}]'
    plan, cut = chat(tools=TOOLS, tool_choice=choice), Choice(0)
    cut.take(GenerateDelta(token_ids=[5], text=text, finish_reason="stop"))
    cut.calls, cut.rest = [CALL], ""
    end = GenerateDelta(token_ids=[], finish_reason="abort")
    cut.take(end)
    (row,) = whole(plan, [cut], "m", 1)["choices"]
    (last,) = Chunks(plan, [cut], "m", 1).of(cut, end, 0)["choices"]
    assert row["finish_reason"] == last["finish_reason"] == "abort"
    assert row["message"] == last["delta"] == {"role": "assistant", "content": text}
