"""The facade over HTTP, with nothing but the standard library."""

from __future__ import annotations

import http.client
import json
import socket
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, urlencode

from rl_plane.errors import (
    DeadlineExceeded,
    InvalidRequest,
    NotFound,
    PlaneError,
    Unauthorized,
    Unavailable,
    error_from_wire,
)
from rl_plane.protocol.fleet_ops import FLEET_OPS

MAX_REPLY_BYTES = 64 << 20
"""A state of 10,000 workers has 10 MB."""

_BY_STATUS: dict[int, type[PlaneError]] = {400: InvalidRequest, 401: Unauthorized, 404: NotFound, 503: Unavailable}


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect would take the key to another host."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirects, urllib.request.ProxyHandler({}))


def call_facade(
    url: str, key: str | None, op: str, body: Mapping[str, Any], timeout_s: float, request_id: str = ""
) -> dict[str, Any]:
    """The reply, or the facade's error as it raised it. `timeout_s` bounds each read; the caller bounds all.

    For `enable` and `disable`, `workers` names one."""
    spec = FLEET_OPS[op]
    base = url.rstrip("/").removesuffix("/v1/rl")
    path = spec.path
    if "{id}" in path:
        (instance_id,) = body["workers"]
        path = path.replace("{id}", quote(instance_id, safe=""))
    address = f"{base}/v1/rl/{path}"
    headers = {"Accept": "application/json"}
    data = None
    if spec.method == "GET":
        query = {name: ",".join(value) if isinstance(value, list) else value for name, value in body.items()}
        address += f"?{urlencode(query)}" if query else ""
    else:
        data = json.dumps(body, allow_nan=False).encode()
        headers["Content-Type"] = "application/json"
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    if request_id:
        headers["Idempotency-Key"] = request_id
    request = urllib.request.Request(address, data=data, headers=headers, method=spec.method)
    try:
        with _OPENER.open(request, timeout=timeout_s) as reply:
            return _reply(base, reply.read(MAX_REPLY_BYTES + 1))
    except urllib.error.HTTPError as error:
        with error:
            raise _error(base, error.code, error.read(MAX_REPLY_BYTES)) from error
    except (urllib.error.URLError, OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, (TimeoutError, socket.timeout)):
            raise DeadlineExceeded(f"{base} did not answer within {timeout_s:g} s") from error
        raise Unavailable(
            f"no facade answers at {base}: {reason or type(reason).__name__}",
            fix="start one (`rl-plane up`), or set --url / RL_PLANE_URL",
        ) from error


def _reply(base: str, data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError:
        value = None
    if len(data) > MAX_REPLY_BYTES or not isinstance(value, dict) or not isinstance(value.get("workers"), list):
        raise PlaneError(f"{base} answers, but not as the facade does", fix="is --url right?")
    return value


def _error(base: str, status: int, data: bytes) -> PlaneError:
    try:
        wire = json.loads(data)
    except ValueError:
        wire = None
    if isinstance(wire, dict):
        inner = wire.get("error", wire)
        if isinstance(inner, dict) and "code" in inner and "message" in inner:
            lifted = {key: wire[key] for key in ("workers", "epoch", "fingerprint") if key in wire}
            return error_from_wire({**lifted, **inner})
    kind = _BY_STATUS.get(status, PlaneError)
    return kind(f"{base} answers HTTP {status}, but not as the facade does", fix="is --url right?", status=status)
