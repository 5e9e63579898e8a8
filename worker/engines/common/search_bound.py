"""Refuses texts that a parser of tool calls would search for too long.

The patterns of some parsers take for ever with some texts. Python can't stop a search that it has begun, and the
worker's other threads stand still meanwhile. So another process tries the search first, which can be killed.
"""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Literal

SEARCH_CPU_S = 0.1
"""The processor time that one search of a text may take. The texts of models take less than a millisecond. The worker
serves nothing else during the search in its own process."""
SEARCH_WALL_S = 10.0
"""The time of the process that tries the search; nearly all of it is for a busy machine on which an interpreter
starts."""

_TRY = """
import re, signal, sys
seconds, method, pattern, flags = sys.argv[1:]
search, text = getattr(re.compile(pattern, int(flags)), method), sys.stdin.buffer.read().decode()
signal.setitimer(signal.ITIMER_VIRTUAL, float(seconds))  # the signal ends the process in the middle of a search
search(text)
"""


def check_search_ends(pattern: re.Pattern[str], method: Literal["search", "findall"], text: str) -> None:
    """Raises ValueError if the search takes too long. `method`: the pattern's method that the parser calls."""
    given = [str(SEARCH_CPU_S), method, pattern.pattern, str(int(pattern.flags))]
    command = [sys.executable, "-I", "-S", "-c", _TRY, *given]
    try:
        subprocess.run(command, input=text.encode(), capture_output=True, timeout=SEARCH_WALL_S, check=True)
    except subprocess.SubprocessError as error:
        raise ValueError(f"the search for calls takes more than {SEARCH_CPU_S:g} s") from error
