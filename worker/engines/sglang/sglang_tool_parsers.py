"""SGLang's parsers of tool calls, without its HTTP server."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from rl_plane.protocol.worker_ops import ParsedCall
from worker.engines.common.search_bound import check_search_ends

AUTO = "auto"
"""The name with which SGLang chooses the parser by the model's chat template, while it starts."""

_CALL = re.compile(r"\[[a-zA-Z]\w*\(")
"""The beginning of each call for the parser `pythonic`. A text without it takes no time worth a process."""


def parsers() -> Collection[str]:
    """The names of SGLang's parsers."""
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    return list(FunctionCallParser.ToolCallParserEnum)


def calls_of(name: str, tokenizer: Any, tools: list[dict[str, Any]], text: str) -> tuple[str, list[ParsedCall]]:
    """The rest of a text, and the calls in it, as SGLang's server finds them. `text`: with special tokens. Each
    parser raises errors of its own."""
    from sglang.srt.entrypoints.openai.protocol import Tool
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    parser = FunctionCallParser([Tool.model_validate(tool) for tool in tools], name, tokenizer=tokenizer)
    if name == "pythonic" and _CALL.search(stripped := parser.detector._text_strip(text.strip())):
        check_search_ends(parser.detector.tool_call_regex, "search", stripped)
    rest, found = parser.parse_non_stream(text)
    return rest, [ParsedCall(name=one.name or "", arguments=one.parameters) for one in found]
