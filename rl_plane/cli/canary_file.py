"""Reads and checks the file of `--canary` before a command changes the fleet."""

from __future__ import annotations

from pathlib import Path

from rl_plane.cli.output import BadSetting
from rl_plane.errors import InvalidRequest
from rl_plane.protocol.canary import MAX_CANARY_BYTES, Canary, parse_canary
from rl_plane.protocol.strict_json import parse_json_object

FLAG = "--canary"


def read_canary(path: Path) -> Canary:
    """The canary in a JSON file. BadSetting names the wrong part of the file, and the fix."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_CANARY_BYTES + 1)
    except OSError as error:
        raise BadSetting(f"{path} can't be read: {error.strerror}", field=FLAG, fix="name another file") from error
    if len(data) > MAX_CANARY_BYTES:
        raise BadSetting(
            f"{path} has more than {MAX_CANARY_BYTES:,} bytes",
            field=FLAG,
            fix='give a file such as {"sequences": [[1, 2, 3]]}',
        )
    try:
        values = parse_json_object(data)
    except InvalidRequest as error:  # it calls the file a body
        raise BadSetting(f"{path}: {error.message}", **{**error.facts, "field": FLAG}) from error
    try:
        return parse_canary(values, "canary")
    except InvalidRequest as error:
        field = str(error.facts["field"])
        words = error.message if error.message.startswith(field) else f"{field}: {error.message}"
        raise BadSetting(f"{path}: {words}", **{**error.facts, "field": field}) from error
