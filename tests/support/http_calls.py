"""Calls of a listener over HTTP, without a client library."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

CALL_S = 60.0
"""The bound in seconds of one call."""


def post_json(url: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> dict[str, Any]:
    """The reply, also of a call that fails."""
    request = urllib.request.Request(url, json.dumps(body).encode(), dict(headers))
    try:
        with urllib.request.urlopen(request, timeout=CALL_S) as answer:
            reply: dict[str, Any] = json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            reply = json.load(error)
    return reply
