"""The types of the settings that click does not have. A wrong text is a `click.BadParameter` that says what to give."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click

from rl_plane.errors import InvalidRequest
from rl_plane.protocol.subjects import check_instance_id, check_name
from rl_plane.protocol.validation import LABEL_CHARS, MAX_TIMEOUT_S
from rl_plane.weights.allowed_urls import UrlPrefix


class Text(click.ParamType[Any]):
    """A value that `parse` makes of a text. `parse` raises a ValueError or an InvalidRequest for a wrong one."""

    def __init__(self, name: str, parse: Callable[[str], Any], fix: str) -> None:
        self.name, self._parse, self._fix = name, parse, fix

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        return self.name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value  # a default
        try:
            return self._parse(value)
        except (ValueError, InvalidRequest):
            shown = "" if getattr(param, "secret", False) else f"{value[:200]!r}: "
            self.fail(shown + self._fix, param, ctx)


class Seconds(click.FloatRange):
    """Seconds within a range. NaN is in none."""

    name = "SECONDS"

    def __init__(self, low: float, high: float = MAX_TIMEOUT_S) -> None:
        super().__init__(low, high)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        found: float = super().convert(value, param, ctx)
        if math.isnan(found):
            self.fail(f"{value!r} is no number of seconds", param, ctx)
        return found


def matching(name: str, pattern: str, fix: str) -> Text:
    def parse(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(text)
        return text

    return Text(name, parse, fix)


def url(schemes: tuple[str, ...], such_as: str) -> Text:
    def parse(text: str) -> str:
        parts = [urlsplit(item) for item in text.split(",")]
        good = all(part.scheme in schemes and part.hostname and part.port != 0 for part in parts)
        if not good or not text.isprintable() or " " in text:
            raise ValueError(text)
        return text

    return Text("URL", parse, f"give an address such as {such_as}")


def _collector(text: str) -> str:
    parts = urlsplit(text)
    good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    if not good or parts.username or parts.query or parts.fragment or not text.isprintable() or " " in text:
        raise ValueError(text)
    return text


def _path(text: str) -> Path:
    if "\0" in text or not text:
        raise ValueError(text)
    return Path(os.path.abspath(os.path.expanduser(text)))


def _existing(text: str, there: Callable[[Path], bool]) -> Path:
    found = _path(text)
    if not there(found):
        raise ValueError(text)
    return found


def _port_or_off(text: str) -> int | str:
    if text != "off" and not 0 <= int(text) <= 65535:
        raise ValueError(text)
    return text if text == "off" else int(text)


def _weight_url(text: str) -> str:
    UrlPrefix.parse(text)  # a ValueError if it is none
    return text


def _duration(text: str) -> int:
    found = re.fullmatch(r"([0-9]{1,7})([smh]?)", text)
    if found is None:
        raise ValueError(text)
    return int(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[found[2]]


WORD = matching("TEXT", r"(?s).+", "give a value, or leave it out")
PAIR = matching("K=V", r"(?s)[^=]+=.*", "write key=value")
PATH = Text("DIR", _path, "give a path")
DIRECTORY = Text("DIR", lambda text: _existing(text, Path.is_dir), "name an existing directory")
PATH_TO_FILE = Text("FILE", _path, "give a path")
FILE = Text("FILE", lambda text: _existing(text, Path.is_file), "name an existing file")
FILE_OR_OFF = Text("FILE", lambda text: text if text == "off" else FILE._parse(text), f"{FILE._fix}, or `off`")
DURATION = Text("TIME", _duration, "give seconds, or a number with s, m or h, such as 10m")
COLLECTOR = Text(
    "URL",
    _collector,
    "give an address such as http://127.0.0.1:4318, without a user; OTEL_EXPORTER_OTLP_HEADERS may have a key",
)
PORT = click.IntRange(0, 65535)
PORT_OR_OFF = Text("PORT", _port_or_off, "give a port from 0 (a free one) to 65535, or `off`")
NAME = Text("NAME", lambda text: check_name("name", text), "use 1 to 64 letters, digits, _ or -")
INSTANCE_ID = Text("ID", lambda text: check_instance_id("id", text), "give 16 lower-case hex digits")
LABEL = matching("LABEL", rf"(?s).{{1,{LABEL_CHARS}}}", f"give 1 to {LABEL_CHARS} characters")
HOST = matching("HOST", r"[A-Za-z0-9._:%\[\]-]{1,255}", "give an address or a host name, such as 127.0.0.1")
KEY = matching("KEY", r"[!-~]+", "give printable ASCII characters without spaces")
WEIGHT_URL = Text(
    "PREFIX", _weight_url, "give a scheme, a host and perhaps a path: https://bucket.example/weights"
)
