"""Prints for the commands: ready lines, tables, and errors in one line with the fix."""

from __future__ import annotations

import json
import re
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from rl_plane._util import log_format
from rl_plane._util.extras import missing_module
from rl_plane.errors import (
    BusUnreachable,
    Conflict,
    DeadlineExceeded,
    InvalidRequest,
    Locked,
    PermissionDenied,
    PlaneError,
    Unauthorized,
    Unavailable,
    Unsupported,
)


class BadSetting(InvalidRequest):
    """A flag or a variable with a wrong value; the command line exits with 2."""


READY = "ready"
"""The key of a ready line in JSON; its value names the command."""

_FIXES: tuple[tuple[type[PlaneError], str], ...] = (
    (PermissionDenied, "set RL_PLANE_ADMIN_KEY to a key with another role"),
    (Unauthorized, "set RL_PLANE_ADMIN_KEY to the frontend's key"),
    (Locked, "repeat it when the other update has ended"),
    (BusUnreachable, "start nats-server, or look at its log; `rl-plane doctor` checks the connection"),
    (Unavailable, "repeat it in a moment; see `rl-plane state`"),
    (DeadlineExceeded, "see `rl-plane state`, or wait longer (--timeout-s)"),
    (Conflict, "see `rl-plane state`, then repeat it"),
    (Unsupported, "use another engine, or leave it out"),
    (InvalidRequest, "correct the request"),
    (PlaneError, "see the log of the worker or the frontend"),
)
"""The fix of each kind of error, if the error itself has none."""


def one_line(text: object) -> str:
    """A text in one line, without control characters, and without the password in an address."""
    shown = " ".join(str(text).split())
    shown = "".join(char if char.isprintable() else "?" for char in shown)
    return re.sub(r"(\w://)[^/@\s]+@", r"\1…@", shown)


def fix_of(error: PlaneError, command: str = "") -> str:
    """The error's own fix, or the fix of its kind. `command`: the command that failed."""
    if fix := error.facts.get("fix"):
        return str(fix)
    if command in ("state", "events", "top") and isinstance(error, (Unavailable, Conflict, DeadlineExceeded)):
        return "repeat it in a moment; if it fails again, see the logs of the frontend and of nats-server"
    return next(fix for kind, fix in _FIXES if isinstance(error, kind))


def error_line(error: PlaneError) -> str:
    """The error in one line: the wrong field, unless the message names it, the message, and the fix."""
    field = str(error.facts.get("field") or "")
    words = error.message.rstrip(".")
    name = field.rpartition(".")[2]
    if field not in words and (name.isdigit() or name not in words):
        words = f"{field}: {words}"
    return one_line(f"rl-plane: error: {words}; fix: {fix_of(error)}")


def plane_error(error: Exception) -> PlaneError | None:
    """The error of a command in words for a person. None: a fault of ours, which needs its traceback."""
    if isinstance(error, PlaneError):
        return error
    if isinstance(error, ModuleNotFoundError):
        return missing_module(error)
    if isinstance(error, OSError) and error.filename is not None and not isinstance(error, BrokenPipeError):
        return PlaneError(f"{error.filename}: {error.strerror}", fix="let this user read and write there")
    return None


def exit_words(code: int) -> str:
    """The end of a process in words. `code`: negative for a signal."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def clock(at: float) -> str:
    """The time of day on this machine."""
    return datetime.fromtimestamp(at).strftime("%H:%M:%S")


def counted(workers: int) -> str:
    return f"{workers} worker{'' if workers == 1 else 's'}"


def ids(names: Sequence[str], most: int = 3) -> str:
    """The first names, then a count of the others."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def say(line: str) -> None:
    print(line, flush=True)


def note(line: str, level: str = "info") -> None:
    """Prints to stderr, so that it never mixes with the answer. `level`: of the line of a process that logs in JSON."""
    if log_format.is_json():
        line = log_format.json_line(level, "rl_plane", line, time.time())
    print(line, file=sys.stderr, flush=True)


def say_json(value: Any) -> None:
    say(json.dumps(value, default=str))


def say_ready(as_json: bool, command: str, words: str, **facts: Any) -> None:
    """Prints the line by which a person, or `up`, learns that a process is ready."""
    if as_json:
        say_json({READY: command, **facts})
    else:
        say(one_line(words))


def table(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> str:
    """A table of rows. `columns`: heading → key. A missing value is `-`."""
    cells = [list(columns)]
    cells += [[_cell(row.get(key)) for key in columns.values()] for row in rows]
    widths = [max(len(line[index]) for line in cells) for index in range(len(columns))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells
    )


def _cell(value: Any) -> str:
    return "-" if value is None or value == "" else one_line(value)
