"""Refuses regular expressions of an adapter that take too long.

A trainer chooses them, and some take for ever to match a name of sixty characters. Python can't stop a match that it
has begun, and the worker's other threads stand still meanwhile. So another process tries them first, which can be
killed.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from worker.engines.common.lora import refuse_key

PATTERNS_S = 10.0
"""Seconds for the patterns of one setting. Those of a real adapter take milliseconds; the rest is for a busy machine on
which an interpreter starts."""

_SETTINGS = (
    "target_modules", "exclude_modules", "target_parameters", "modules_to_save", "layers_pattern", "rank_pattern",
    "alpha_pattern",
)  # fmt: skip

_PLAIN = re.compile(r"[\w.]*")
"""A name, or the end of one: it takes no time worth a process."""

_TRY = r"""
import json, re, sys
patterns, names = json.load(sys.stdin)
for pattern in patterns:
    for form in (
        pattern,
        rf"(.*\.)?({pattern})$",
        rf"(^|.*\.){pattern}($|\..*)",
        rf"(?:^|.*?\.){pattern}\.(?P<idx>\d+)\.",
    ):
        try:
            for name in names:
                re.match(form, name)
                re.fullmatch(form, name)
        except Exception:
            pass
"""
"""Matches each pattern in the forms that PEFT makes of it. One form may compile where another one does not. A form that
does not compile is left to the code that uses it later: that code reports the error."""


def check_patterns_end(config: Mapping[str, Any], names: Iterable[str], within_s: float = PATTERNS_S) -> None:
    """Raises InvalidWeights if a setting holds no patterns, or if its patterns take longer than `within_s`. `names`:
    the names of the model with which the patterns are matched."""
    known = list(names)
    for setting in _SETTINGS:
        given = config.get(setting)
        if given is None:
            continue
        patterns = [given] if isinstance(given, str) else given
        if not isinstance(patterns, list | dict) or not all(isinstance(one, str) for one in patterns):
            raise refuse_key(setting, f"is {given!r:.100}", "give names of this model, or patterns of them")
        unsure = [one for one in patterns if not _PLAIN.fullmatch(one)]
        if not unsure:
            continue
        try:
            subprocess.run(
                [sys.executable, "-I", "-S", "-c", _TRY],
                input=json.dumps([unsure, known]),
                text=True,
                capture_output=True,
                timeout=within_s,
                check=True,
            )
        except subprocess.SubprocessError as error:
            is_slow = isinstance(error, subprocess.TimeoutExpired)
            what = f"takes more than {within_s:g} s" if is_slow else "ends the process which tries it"
            raise refuse_key(
                setting,
                f"has a regular expression that {what}: {unsure[0][:100]!r}",
                "use a simpler one, or list the names of the modules",
            ) from error
