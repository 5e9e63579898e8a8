"""The lines of `--log-format json`."""

from __future__ import annotations

import json
import logging
import sys

from rl_plane._util.log_format import JsonFormatter, fields


def test_a_line_has_its_fields_and_its_error() -> None:
    try:
        raise ValueError("no\nsuch thing")
    except ValueError:
        error = sys.exc_info()
    record = logging.LogRecord("a.b", logging.WARNING, "file", 1, "lost %d\nlines", (3,), error)
    record.__dict__.update(fields(update_id="u1", phases={"gate_s": 0.5}, message="not this one"))
    record.created = 1.8e9
    (text,) = JsonFormatter().format(record).splitlines()
    line = json.loads(text)
    assert line.pop("exception").endswith("ValueError: no\nsuch thing")
    assert line == {
        "time": "2027-01-15T08:00:00.000Z",
        "level": "warning",
        "logger": "a.b",
        "message": "lost 3\nlines",
        "update_id": "u1",
        "phases": {"gate_s": 0.5},
    }
