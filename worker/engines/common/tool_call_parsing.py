"""Reads the calls in a finished text, by the parser that the engine has for its model's family."""

from __future__ import annotations

import asyncio
import logging
from abc import abstractmethod
from collections.abc import Collection
from functools import partial
from typing import Any

from rl_plane._util.limited_log import LimitedLog
from rl_plane.errors import InvalidRequest
from rl_plane.protocol.worker_ops import ParsedCall, ParsedToolCalls
from worker.engines.capabilities import CanParseToolCalls
from worker.engines.common.generating import Generating
from worker.engines.common.token_checks import check_vocabulary
from worker.engines.common.tokenizing import aside

log = logging.getLogger("worker.engines.common.tool_call_parsing")

ARGUMENT = "tool_call_parser"
"""The engine argument that names the parser, as the engine's own server calls it."""
NO_PARSER = f"the worker has no parser of tool calls: start it with --engine-arg {ARGUMENT}=…"
SAMPLE_TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks at a place.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    },
}
"""The tool with which a parser is tried at the start."""

_unread = LimitedLog(log)


class ToolCallParsing(Generating, CanParseToolCalls):
    """Implements `parse_tool_calls` of an engine that has parsers."""

    _tool_call_parser: str | None = None
    """The name of the parser. None: the worker was started without one."""

    @abstractmethod
    def _parsers(self) -> Collection[str]:
        """The names of the engine's parsers. Blocks."""

    @abstractmethod
    def _calls_of(
        self, name: str, token_ids: list[int], tools: list[dict[str, Any]]
    ) -> tuple[str, list[ParsedCall]]:
        """The rest of the text, and the calls in it, by the engine's parser of this name. Blocks. Raises an exception
        of any kind for tools that the engine does not take, and for a text that the parser can't read."""

    async def _use_parser(self, name: str) -> None:
        """Chooses the parser. It reads an empty text first, so that no finished text finds out that it does not work.
        InvalidRequest: the engine has none of this name, or it does not work with this model."""
        known = await asyncio.to_thread(self._parsers)
        if name not in known:
            raise InvalidRequest(
                f"the engine finds no parser of tool calls for {name[:64]!r}",
                field=f"engine_arg.{ARGUMENT}",
                fix=f"one of {', '.join(sorted(known))}",
            )
        try:
            await asyncio.to_thread(self._calls_of, name, [], [SAMPLE_TOOL])
        except Exception as error:  # each parser has errors of its own
            raise InvalidRequest(
                f"the parser {name} of tool calls does not work here: {_shown(error)}",
                field=f"engine_arg.{ARGUMENT}",
                fix="name the parser of this model's family, and install what it needs",
            ) from error
        self._tool_call_parser = name

    async def parse_tool_calls(self, token_ids: list[int], tools: list[dict[str, Any]]) -> ParsedToolCalls:
        self.info.require("parse_tool_calls", "op")
        assert self._tool_call_parser is not None, "the op is refused without a parser"
        check_vocabulary("tokens", token_ids, self.info.vocab_size)
        said = token_ids[:-1] if token_ids and token_ids[-1] in self._eos else token_ids
        in_thread = partial(asyncio.get_running_loop().run_in_executor, aside)
        try:
            content, calls = await in_thread(self._calls_of, self._tool_call_parser, said, tools)
        except Exception as error:  # each parser has errors of its own
            if not token_ids:  # the parser has read an empty text at the start, so the tools are wrong
                raise InvalidRequest(
                    f"the engine does not take these tools: {_shown(error)}",
                    field="tools",
                    fix="send {type: function, function: {name, description, parameters}}",
                ) from error
            # The text is paid for, and a model may write anything.
            _unread.warning(
                "the parser %s can't read a text of %d tokens, which so has no calls: %s",
                self._tool_call_parser,
                len(token_ids),
                _shown(error),
            )
            content, calls = await in_thread(partial(self._text_of, said, skip_special_tokens=True)), []
        return ParsedToolCalls(content=content, calls=calls)

    def _text_of(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        text: str = self._tokenizer.decode(
            token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text


def _shown(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:300]}"
