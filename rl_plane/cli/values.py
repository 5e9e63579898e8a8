"""Parsers of the settings' values: a string in, a value out, or Refused with what it must be."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rl_plane.errors import InvalidRequest
from rl_plane.protocol.subjects import check_instance_id, check_name
from rl_plane.protocol.validation import LABEL_CHARS, MAX_TIMEOUT_S, PAUSE_WORDS

Parse = Callable[[str], Any]


class Refused(ValueError):
    """A parser's answer to a bad value: what it must be."""


def seconds(low: float, high: float = MAX_TIMEOUT_S) -> Parse:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high or (low == 0.0 and math.copysign(1, value) < 0):
            raise Refused(f"give seconds from {low:g} to {high:g}")
        return value

    return parse


positive_seconds = seconds(0.001)


def whole(low: int, high: int) -> Parse:
    def parse(text: str) -> int:
        if not re.fullmatch(r"-?[0-9]{1,18}", text) or not low <= int(text) <= high:
            raise Refused(f"give a whole number from {low} to {high}")
        return int(text)

    return parse


def port(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,5}", text) or int(text) > 65535:
        raise Refused("give a port from 0 (a free one) to 65535")
    return int(text)


def port_or_off(text: str) -> int | None:
    if text == "off":
        return None
    try:
        return port(text)
    except Refused:
        raise Refused("give a port from 0 (a free one) to 65535, or `off`") from None


def one_of(*words: str) -> Parse:
    def parse(text: str) -> str:
        if text not in words:
            raise Refused(f"use one of {', '.join(words)}")
        return text

    return parse


def matching(pattern: str, fix: str) -> Parse:
    def parse(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise Refused(fix)
        return text

    return parse


def name(text: str) -> str:
    return _checked(check_name, "name", text)


def instance_id(text: str) -> str:
    return _checked(check_instance_id, "instance id", text)


def _checked(check: Callable[[str, str], str], what: str, text: str) -> str:
    try:
        return check(what, text)
    except InvalidRequest as error:
        raise Refused(error.facts["fix"]) from error


def path(text: str) -> Path:
    if "\0" in text:
        raise Refused("a path has no NUL")
    return Path(os.path.abspath(os.path.expanduser(text)))


def directory(text: str) -> Path:
    found = path(text)
    if not found.is_dir():
        raise Refused("name an existing directory")
    return found


def file(text: str) -> Path:
    found = path(text)
    if not found.is_file():
        raise Refused("name an existing file")
    return found


def file_or_off(text: str) -> Path | str:
    if text == "off":
        return text
    try:
        return file(text)
    except Refused:
        raise Refused("name an existing file, or give `off`") from None


def url(schemes: tuple[str, ...], such_as: str) -> Parse:
    def parse(text: str) -> str:
        try:
            parts = [urlsplit(item) for item in text.split(",")]
            good = all(part.scheme in schemes and part.hostname and part.port != 0 for part in parts)
        except ValueError:
            good = False
        if not good or not text.isprintable() or " " in text:
            raise Refused(f"give an address such as {such_as}")
        return text

    return parse


def key(text: str) -> str:
    if not text.isascii() or not text.isprintable() or " " in text:
        raise Refused("a key is of printable ASCII characters without spaces")
    return text


def pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise Refused("write key=value")
    return key, value


label = matching(rf"(?s).{{1,{LABEL_CHARS}}}", f"give 1 to {LABEL_CHARS} characters")
host = matching(r"[A-Za-z0-9._:%\[\]-]{1,255}", "give an address or a host name, such as 127.0.0.1")
pause_mode = one_of(*PAUSE_WORDS)
