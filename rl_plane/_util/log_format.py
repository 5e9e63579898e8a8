"""The two formats of log lines on stderr: text for a person, or one JSON object for each line."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Literal

LogFormat = Literal["text", "json"]
LOG_FORMATS: tuple[LogFormat, ...] = ("text", "json")

VARIABLE = "RL_PLANE_LOG_FORMAT"
"""The variable of --log-format. Processes that a worker starts read it."""

_FIELDS = "rl_plane_fields"
_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def fields(**values: Any) -> dict[str, Any]:
    """The argument `extra` of a log call: the values become fields of the line in JSON. Text lines leave them out."""
    return {_FIELDS: values}


def json_line(level: str, logger: str, message: str, at: float, more: Mapping[str, Any] | None = None) -> str:
    """One line in JSON. `at`: Unix seconds. `more`: further fields, which do not replace those before."""
    time = datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    line = {"time": time, "level": level, "logger": logger, "message": message}
    return json.dumps(
        {**line, **{key: value for key, value in (more or {}).items() if key not in line}}, default=str
    )


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        more: Mapping[str, Any] = getattr(record, _FIELDS, {})
        if record.exc_info:
            more = {**more, "exception": self.formatException(record.exc_info)}
        return json_line(record.levelname.lower(), record.name, record.getMessage(), record.created, more)


def is_json() -> bool:
    """Whether this process logs in JSON."""
    return any(isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger().handlers)


def set_up_logging(level: str, log_format: LogFormat = "text") -> None:
    """Logs to stderr, because stdout is for the ready line. `level`: a name such as info."""
    if log_format == "text":
        logging.basicConfig(level=level.upper(), format=_TEXT)
        return
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.captureWarnings(True)
    sys.excepthook = lambda *error: logging.getLogger("rl_plane").critical("not handled", exc_info=error)
    os.environ[VARIABLE] = log_format


def inherited_format() -> LogFormat:
    """The format of the process that has started this one."""
    return "json" if os.environ.get(VARIABLE) == "json" else "text"
