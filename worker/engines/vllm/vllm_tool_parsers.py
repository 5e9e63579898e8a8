"""vLLM's parsers of tool calls, without its HTTP server."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from rl_plane.protocol.worker_ops import ParsedCall
from worker.engines.common.search_bound import check_search_ends

_SEARCHING = ("deepseek_v3", "deepseek_v31")
"""Parsers whose search takes as long as the third power of the number of calls that a text begins and does not end."""


def parsers() -> Collection[str]:
    """The names of vLLM's parsers."""
    from vllm.tool_parsers import ToolParserManager

    names: list[str] = ToolParserManager.list_registered()
    return names


def cached(tokenizer: Any) -> Any:
    """The tokenizer as vLLM's server gives it to parsers. Each new parser reads the whole vocabulary, and this one
    remembers it."""
    from vllm.tokenizers.hf import get_cached_tokenizer

    return get_cached_tokenizer(tokenizer)


def calls_of(
    name: str, tokenizer: Any, tools: list[dict[str, Any]], text: Callable[[bool], str]
) -> tuple[str, list[ParsedCall]]:
    """The rest of a text, and the calls in it, as vLLM's server finds them. `text`: the text with or without
    (`skip_special_tokens`) special tokens, as the parser needs it. Each parser raises errors of its own."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    request = ChatCompletionRequest(messages=[], tools=tools, tool_choice="auto")
    parser = ToolParserManager.get_tool_parser(name)(tokenizer, request.tools)
    request = parser.adjust_request(request)
    whole = text(request.skip_special_tokens)
    if name in _SEARCHING and parser.tool_calls_start_token in whole:
        check_search_ends(parser.tool_call_regex, "findall", whole)
    found = parser.extract_tool_calls(whole, request)
    if not found.tools_called:
        return whole, []
    calls = [ParsedCall(name=one.function.name, arguments=one.function.arguments) for one in found.tool_calls]
    return found.content or "", calls
