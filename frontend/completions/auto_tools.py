"""Calls that a model makes by itself (`tool_choice: auto`). Each family of models writes them in its own way, so a
worker's engine reads them, by the parser that the worker was started with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from frontend.completions.any_worker import ask_any
from frontend.routing.progress import ChoiceTokens
from rl_plane.client import RlClient
from rl_plane.errors import Unsupported
from rl_plane.membership.core import PARSES_CALLS, Member
from rl_plane.membership.view import MembershipView

OP = "parse_tool_calls"


@dataclass(frozen=True, slots=True)
class AutoTools:
    """The tools that a model may call by itself."""

    tools: tuple[dict[str, Any], ...]
    is_asked_for: bool
    """The caller has sent `auto`. Else it is the default, and a fleet without a parser returns the text."""


class CallReader:
    """Reads the calls in finished texts, by any worker that has a parser."""

    def __init__(self, client: RlClient, view: MembershipView) -> None:
        self._client = client
        self._view = view

    async def reads(self, tools: AutoTools) -> bool:
        """Reports whether the reply can have its calls. Call it before the first token is made. Raises Unsupported if
        the caller asks for them and no worker has a parser, and InvalidRequest for tools that the engine does not
        take."""
        if self._members():
            await self._ask([], tools)
            return True
        if tools.is_asked_for:
            raise Unsupported(
                "no worker reads tool calls out of a text",
                field="tool_choice",
                fix="start workers with --engine-arg tool_call_parser=…; or leave tool_choice out: then the text has "
                "the calls as the model wrote them",
            )
        return False

    async def calls_of(
        self, choice: ChoiceTokens, tools: AutoTools, request_id: str
    ) -> tuple[str, list[dict[str, Any]] | None]:
        """The rest of a choice's text, and its calls. None: it has none."""
        reply = await self._ask(choice.token_ids, tools)
        calls = [
            {
                "id": f"call-{request_id}-{number}",
                "type": "function",
                "function": {"name": call["name"], "arguments": call["arguments"]},
            }
            for number, call in enumerate(reply["calls"])
        ]
        return reply["content"], calls or None

    def _members(self) -> list[Member]:
        return [member for member in self._view.snapshot().members if member.info.get(PARSES_CALLS)]

    async def _ask(self, token_ids: list[int], tools: AutoTools) -> dict[str, Any]:
        body = {"tokens": token_ids, "tools": list(tools.tools)}
        return await ask_any(self._client, self._members(), OP, body)
