"""SGLang's parsers of tool calls, without its HTTP server."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Collection
from typing import Any

from rl_plane.protocol.worker_ops import ParsedCall

AUTO = "auto"
"""The name with which SGLang chooses the parser by the model's chat template, while it starts."""

SEARCH_CPU_S = 0.1
"""The processor time that one search of a text may take. The texts of models take less than a millisecond. The worker
serves nothing else during the search in its own process."""
SEARCH_WALL_S = 10.0
"""The time of the process that tries the search; nearly all of it is for a busy machine on which an interpreter
starts."""

_CALL = re.compile(r"\[[a-zA-Z]\w*\(")
"""The beginning of each call for the parser `pythonic`. A text without it takes no time worth a process."""

_TRY = """
import re, signal, sys
seconds, pattern, flags = sys.argv[1:]
search, text = re.compile(pattern, int(flags)).search, sys.stdin.buffer.read().decode()
signal.setitimer(signal.ITIMER_VIRTUAL, float(seconds))  # the signal ends the process in the middle of a search
search(text)
"""


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
    if name == "pythonic":
        _check_search_ends(parser.detector.tool_call_regex, parser.detector._text_strip(text.strip()))
    rest, found = parser.parse_non_stream(text)
    return rest, [ParsedCall(name=one.name or "", arguments=one.parameters) for one in found]


def _check_search_ends(pattern: re.Pattern[str], text: str) -> None:
    """Raises ValueError if the search takes too long. The parser's pattern takes for ever with some texts of a hundred
    characters. Python can't stop a search that it has begun, and the worker's other threads stand still meanwhile. So
    another process tries it first."""
    if not _CALL.search(text):
        return
    command = [sys.executable, "-I", "-S", "-c", _TRY, str(SEARCH_CPU_S), pattern.pattern, str(int(pattern.flags))]
    try:
        subprocess.run(command, input=text.encode(), capture_output=True, timeout=SEARCH_WALL_S, check=True)
    except subprocess.SubprocessError as error:
        raise ValueError(f"the search for calls takes more than {SEARCH_CPU_S:g} s") from error
