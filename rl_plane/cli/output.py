"""What the commands print: ready lines, tables, and errors in one line with the fix."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rl_plane.errors import (
    Conflict,
    DeadlineExceeded,
    InvalidRequest,
    Locked,
    PlaneError,
    Unauthorized,
    Unavailable,
    Unsupported,
)

READY = "ready"
"""The key of a ready line in JSON; its value names the command."""

EXTRA_OF_MODULE = {
    "blake3": "worker",
    "yaml": "worker",
    "torch": "hf",
    "transformers": "hf",
    "tokenizers": "hf",
    "safetensors": "hf",
    "numpy": "hf",
    "psutil": "hf",
    "jinja2": "hf",
    "prometheus_client": "frontend",
    "starlette": "frontend",
    "uvicorn": "frontend",
    "matplotlib": "demo",
    "vllm": "vllm",
    "sglang": "sglang",
}
"""Which of our extras brings a third party's module."""

OURS = ("rl_plane", "worker", "frontend")

_FIXES: tuple[tuple[type[PlaneError], str], ...] = (
    (Unauthorized, "set RL_PLANE_ADMIN_KEY to the facade's key"),
    (Locked, "repeat it when the other update has ended"),
    (Unavailable, "repeat it in a moment; see `rl-plane state`"),
    (DeadlineExceeded, "see `rl-plane state`, or wait longer (--timeout-s)"),
    (Conflict, "see `rl-plane state`, then repeat it"),
    (Unsupported, "use another engine, or leave it out"),
    (InvalidRequest, "correct the request"),
    (PlaneError, "see the log of the worker or the frontend"),
)
"""What to do when the error itself does not say."""


def one_line(text: object) -> str:
    """Without control characters (they come from outside), and without a password in an address."""
    shown = " ".join(str(text).split())
    shown = "".join(char if char.isprintable() else "?" for char in shown)
    return re.sub(r"(\w://)[^/@\s]+@", r"\1…@", shown)


def fix_of(error: PlaneError) -> str:
    if fix := error.facts.get("fix"):
        return str(fix)
    return next(fix for kind, fix in _FIXES if isinstance(error, kind))


def error_line(error: PlaneError) -> str:
    return one_line(f"rl-plane: error: {error.message.rstrip('.')}; fix: {fix_of(error)}")


def missing_module(error: ModuleNotFoundError) -> PlaneError:
    """The error that names the extra to install."""
    top = (error.name or "").partition(".")[0]
    if top in OURS:
        return PlaneError(f"this installation lacks {error.name}", fix="install rl-plane again, of one version")
    extra = EXTRA_OF_MODULE.get(top)
    fix = f"pip install 'rl-plane[{extra}]'" if extra else f"pip install {top}"
    return PlaneError(f"the Python module {top} is not installed", fix=fix)


def counted(workers: int) -> str:
    return f"{workers} worker{'' if workers == 1 else 's'}"


def say(line: str) -> None:
    print(line, flush=True)


def note(line: str) -> None:
    """For a person who waits; never mixed with the answer."""
    print(line, file=sys.stderr, flush=True)


def say_json(value: Any) -> None:
    say(json.dumps(value, default=str))


def say_ready(as_json: bool, command: str, words: str, **facts: Any) -> None:
    """The one line by which a person, or `up`, learns that a process serves."""
    if as_json:
        say_json({READY: command, **facts})
    else:
        say(one_line(words))


def table(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> str:
    """`columns`: heading → key. Missing values are `-`."""
    cells = [list(columns)]
    cells += [[_cell(row.get(key)) for key in columns.values()] for row in rows]
    widths = [max(len(line[index]) for line in cells) for index in range(len(columns))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells
    )


def _cell(value: Any) -> str:
    return "-" if value is None or value == "" else one_line(value)
