"""Reads the calls in a finished text, by the parser that the engine has for its model's family."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from functools import partial
from typing import Any

from rl_plane.errors import InvalidRequest
from rl_plane.protocol.worker_ops import ParsedCall, ParsedToolCalls
from worker.engines.capabilities import CanParseToolCalls
from worker.engines.common.generating import Generating
from worker.engines.common.token_checks import check_vocabulary
from worker.engines.common.tokenizing import aside

ARGUMENT = "tool_call_parser"
"""The engine argument that names the parser, as the engine's own server calls it."""
NO_PARSER = f"the worker has no parser of tool calls: start it with --engine-arg {ARGUMENT}=…"


class ToolCallParsing(Generating, CanParseToolCalls):
    """Implements `parse_tool_calls` of an engine that has parsers."""

    _tool_call_parser: str | None = None
    """The name of the parser. None: the worker was started without one."""

    @abstractmethod
    def _calls_of(self, token_ids: list[int], tools: list[dict[str, Any]]) -> tuple[str, list[ParsedCall]]:
        """The rest of the text, and the calls in it, by the engine's parser. Blocks. Raises ValueError (pydantic's
        errors too) for tools that the engine does not take."""

    async def parse_tool_calls(self, token_ids: list[int], tools: list[dict[str, Any]]) -> ParsedToolCalls:
        self._refuse_lacking_op("parse_tool_calls")
        check_vocabulary("tokens", token_ids, self.info.vocab_size)
        if token_ids and token_ids[-1] in self._eos:
            token_ids = token_ids[:-1]
        read = partial(self._calls_of, token_ids, tools)
        try:
            content, calls = await asyncio.get_running_loop().run_in_executor(aside, read)
        except ValueError as error:
            raise InvalidRequest(
                f"the engine does not take these tools: {str(error)[:300]}",
                field="tools",
                fix="send {type: function, function: {name, description, parameters}}",
            ) from error
        return ParsedToolCalls(content=content, calls=calls)

    def _text_of(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        text: str = self._tokenizer.decode(
            token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text
