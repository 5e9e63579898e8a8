"""Calls that a model makes by itself (`tool_choice: auto`). Each family of models writes them in its own way, so a
worker's engine reads them, by the parser that the worker was started with."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from dataclasses import dataclass, field
from typing import Any

from frontend.completions.any_worker import ask_any
from frontend.routing.fleet_status import FleetStatus
from frontend.routing.progress import ChoiceTokens
from rl_plane.client import RlClient
from rl_plane.errors import DeadlineExceeded, Unavailable, Unsupported
from rl_plane.membership.core import PARSES_CALLS, Member, Snapshot
from rl_plane.membership.view import MembershipView

OP = "parse_tool_calls"
READ_S = 30.0
"""The seconds after which a text is given to no further worker to read. A worker that has many texts refuses one, or
does not come to it in time. It reads some thousand in this time: the rollouts of a batch often end together."""
RETRY_S = 0.2
"""The pause before workers that refused a text are asked again."""
MAX_CHECKED = 1024
"""Lists of tools that are remembered as right. A run has a few; each takes some hundred bytes here."""
FIX = "start workers with --engine-arg tool_call_parser=…"


@dataclass(frozen=True, slots=True)
class AutoTools:
    """The tools that a model may call by itself."""

    tools: tuple[dict[str, Any], ...]
    is_asked_for: bool
    """The caller has sent `auto`. Else it is the default, and a fleet without a parser returns the text."""


@dataclass(frozen=True, slots=True)
class Parsers:
    """The workers with a parser in one fleet."""

    fleet: Snapshot
    members: list[Member]
    checked: set[bytes] = field(default_factory=set)
    """Digests of the tools that one of them has taken."""


class CallReader:
    """Reads the calls in finished texts, by any worker that has a parser."""

    def __init__(
        self,
        client: RlClient,
        view: MembershipView,
        status: FleetStatus,
        *,
        read_s: float = READ_S,
        retry_s: float = RETRY_S,
    ) -> None:
        self._client = client
        self._read_s = read_s
        self._retry_s = retry_s
        self._view = view
        self._status = status
        self._known: Parsers | None = None

    async def reads(self, tools: AutoTools) -> bool:
        """Reports whether the reply can have its calls. Call it before the first token is made. Raises Unsupported if
        the caller asks for them and no worker has a parser, and InvalidRequest for tools that the engine does not
        take."""
        parsers, digest = self._parsers(), hashlib.blake2b(json.dumps(tools.tools).encode()).digest()
        if digest in parsers.checked:
            return True
        if await self._ask([], tools) is not None:
            if len(parsers.checked) >= MAX_CHECKED:
                parsers.checked.clear()
            parsers.checked.add(digest)
            return True
        if tools.is_asked_for:
            raise Unsupported(
                "no worker reads tool calls out of a text",
                field="tool_choice",
                fix=f"{FIX}; or leave tool_choice out: then the text has the calls as the model wrote them",
            )
        return False

    async def calls_of(
        self, choice: ChoiceTokens, tools: AutoTools, request_id: str
    ) -> tuple[str, list[dict[str, Any]] | None]:
        """The rest of a choice's text, and its calls. None: it has none, or the last worker with a parser has left and
        the caller does not ask for calls. Raises Unavailable if the caller does, or if no worker has time."""
        reply = await self._ask(choice.token_ids, tools)
        if reply is None:
            if not tools.is_asked_for:
                return "", None
            raise Unavailable(
                "the last worker that reads tool calls out of a text has left",
                field="tool_choice",
                fix=f"{FIX}; error.partial has the text",
                retry_after_s=1.0,
            )
        calls = [
            {
                "id": f"call-{request_id}-{number}",
                "type": "function",
                "function": {"name": call["name"], "arguments": call["arguments"]},
            }
            for number, call in enumerate(reply["calls"])
        ]
        return reply["content"], calls or None

    def _parsers(self) -> Parsers:
        """Found once for each fleet: it may have many members."""
        fleet = self._view.snapshot()
        if self._known is None or self._known.fleet is not fleet:
            self._known = Parsers(fleet, [one for one in fleet.members if one.info.get(PARSES_CALLS)])
        return self._known

    async def _ask(self, token_ids: list[int], tools: AutoTools) -> dict[str, Any] | None:
        """The reply of a worker with a parser, once one has time. None: no worker has a parser."""
        body = {"tokens": token_ids, "tools": list(tools.tools)}
        give_up_at = time.monotonic() + self._read_s
        while members := self._parsers().members:
            try:
                return await ask_any(self._client, self._status, members, OP, body)
            except (Unavailable, DeadlineExceeded):
                if time.monotonic() + self._retry_s > give_up_at:
                    raise
            await asyncio.sleep(self._retry_s)
        return None
