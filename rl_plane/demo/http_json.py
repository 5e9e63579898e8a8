"""JSON over HTTP by the standard library, with a bound on each wait: all that a trainer needs to steer a fleet."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

from rl_plane.errors import DeadlineExceeded, PlaneError, Unavailable, error_from_wire

_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Everything is on this machine, whatever http_proxy says."""


def call_json(
    url: str, body: dict[str, Any] | None = None, timeout_s: float = 10.0, key: str = ""
) -> dict[str, Any]:
    """POST with a body, else GET. Every failure is a PlaneError: the server's own, or what kept us from it.

    `timeout_s` bounds each wait for the server, which answers these calls in one piece. `key`: asked again with
    the same one, the server gives its first answer.
    """
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"} | ({"Idempotency-Key": key} if key else {})
    request = urllib.request.Request(url, data, headers)
    try:
        with _DIRECT.open(request, timeout=timeout_s) as response:
            reply = json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            raise _told(url, error.code, error.read()) from error
    except TimeoutError as error:
        raise DeadlineExceeded(f"{url} did not answer within {timeout_s:g} s") from error
    except (OSError, ValueError) as error:  # refused, reset, or not JSON
        raise Unavailable(f"{url}: {error}") from error
    if not isinstance(reply, dict):
        raise Unavailable(f"{url} answered {type(reply).__name__}, not an object")
    return reply


def _told(url: str, status: int, data: bytes) -> PlaneError:
    try:
        wire = json.loads(data)
        wire = wire.get("error", wire)
        wire["message"] = f"{url.rsplit('/', 1)[-1]}: HTTP {status}: {wire['message']}"
        return error_from_wire(wire)
    except (ValueError, TypeError, KeyError, AttributeError):
        return PlaneError(f"{url}: HTTP {status}: {data[:200].decode(errors='replace')}", http=status)
