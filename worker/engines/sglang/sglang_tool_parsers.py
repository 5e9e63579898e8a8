"""SGLang's parsers of tool calls, without its HTTP server."""

from __future__ import annotations

from typing import Any

from rl_plane.protocol.worker_ops import ParsedCall


def has_parser(name: str | None) -> bool:
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    return name in FunctionCallParser.ToolCallParserEnum


def calls_of(name: str, tokenizer: Any, tools: list[dict[str, Any]], text: str) -> tuple[str, list[ParsedCall]]:
    """The rest of a text, and the calls in it, as SGLang's server finds them. `text`: with special tokens. Raises
    ValueError for wrong tools."""
    from sglang.srt.entrypoints.openai.protocol import Tool
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    parser = FunctionCallParser([Tool.model_validate(tool) for tool in tools], name, tokenizer=tokenizer)
    rest, found = parser.parse_non_stream(text)
    return rest, [ParsedCall(name=one.name or "", arguments=one.parameters) for one in found]
