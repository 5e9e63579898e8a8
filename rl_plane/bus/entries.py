"""Decodes the entries of buckets, which any process with access to NATS can have written."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar

from pydantic import ValidationError

from rl_plane._util.limited_log import LimitedLog
from rl_plane.protocol.subjects import Entry

log = logging.getLogger("rl_plane.bus.entries")

REMEMBERED_ENTRIES = 1024
"""The number of undecodable entries that a reader remembers, so that it logs each once. After so many others it logs an
entry again."""
MAX_REASON_CHARS = 200

Value = TypeVar("Value")

_warnings = LimitedLog(log)
_logged: OrderedDict[tuple[str, int], None] = OrderedDict()


def decoded(entry: Entry | None, decode: Callable[[bytes], Value]) -> Value | None:
    """Returns the value of an entry. None: the key is absent or empty, or `decode` fails.

    An entry that can't be decoded counts as absent, so the next write replaces it. Each revision is logged once."""
    if entry is None or not entry.value:
        return None
    try:
        return decode(entry.value)
    except Exception as error:  # whatever the bytes make of the decoder
        _log_once(entry, error)
        return None


def is_unreadable(entry: Entry | None, value: object | None) -> bool:
    """Reports whether an entry has bytes of which `decoded` made no value. An absent key or a marker has none."""
    return entry is not None and entry.value is not None and value is None


def _log_once(entry: Entry, error: Exception) -> None:
    revision = (entry.key, entry.sequence)
    if revision in _logged:
        return
    _logged[revision] = None
    while len(_logged) > REMEMBERED_ENTRIES:
        _logged.popitem(last=False)
    _warnings.warning(
        "the entry %.100s at revision %d can't be read, and counts as absent until the next write: %s",
        ascii(entry.key),
        entry.sequence,
        ascii(_reason(error))[:MAX_REASON_CHARS],
    )


def _reason(error: Exception) -> str:
    """Says what is wrong, without the entry's values: a session has what its trainer has sent."""
    if not isinstance(error, ValidationError):
        return f"{type(error).__name__}: {error}"
    first = error.errors(include_input=False, include_url=False, include_context=False)[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
