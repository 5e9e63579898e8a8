"""vLLM's parsers of tool calls, without its HTTP server."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rl_plane.errors import InvalidRequest
from rl_plane.protocol.worker_ops import ParsedCall
from worker.engines.common.tool_call_parsing import ARGUMENT


def chosen_parser(extra: Mapping[str, str]) -> str | None:
    """The parser that the engine arguments name. InvalidRequest: vLLM has none of this name."""
    name = extra.get(ARGUMENT)
    if name is None:
        return None
    from vllm.tool_parsers import ToolParserManager

    known = ToolParserManager.list_registered()
    if name not in known:
        raise InvalidRequest(
            f"vLLM has no parser of tool calls {name[:64]!r}",
            field=f"engine_arg.{ARGUMENT}",
            fix=f"one of {', '.join(known)}",
        )
    return name


def check_parser(name: str, tokenizer: Any) -> None:
    """InvalidRequest: the parser does not work with this tokenizer, or lacks a package."""
    from vllm.tool_parsers import ToolParserManager

    try:
        ToolParserManager.get_tool_parser(name)(tokenizer)
    except Exception as error:  # each parser has errors of its own
        raise InvalidRequest(
            f"vLLM's parser {name} of tool calls does not work here: {error}",
            field=f"engine_arg.{ARGUMENT}",
            fix="name the parser of this model's family, and install what it needs",
        ) from error


def calls_of(
    name: str, tokenizer: Any, tools: list[dict[str, Any]], text: Callable[[bool], str]
) -> tuple[str, list[ParsedCall]]:
    """The rest of a text, and the calls in it, as vLLM's server finds them. `text`: the text with or without
    (`skip_special_tokens`) special tokens, as the parser needs it. Raises ValueError for wrong tools."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    request = ChatCompletionRequest(messages=[], tools=tools, tool_choice="auto")
    parser = ToolParserManager.get_tool_parser(name)(tokenizer, request.tools)
    request = parser.adjust_request(request)
    whole = text(request.skip_special_tokens)
    found = parser.extract_tool_calls(whole, request)
    if not found.tools_called:
        return whole, []
    calls = [ParsedCall(name=one.function.name, arguments=one.function.arguments) for one in found.tool_calls]
    return found.content or "", calls
