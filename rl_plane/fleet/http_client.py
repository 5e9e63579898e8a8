"""Calls a frontend over HTTP, with the standard library only."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from rl_plane._util.tracing import outgoing
from rl_plane.errors import (
    DeadlineExceeded,
    InvalidRequest,
    NotFound,
    PermissionDenied,
    PlaneError,
    Unauthorized,
    Unavailable,
    error_from_wire,
)
from rl_plane.fleet.calling_process import CLIENT_HEADER, this_process
from rl_plane.protocol.fleet_ops import FLEET_OPS

MAX_REPLY_BYTES = 64 << 20
"""The state of 10,000 workers has 10 MB."""

EVENTS_SILENT_S = 60.0
"""A frontend sends a comment each 15 s, so a stream that is silent for longer is lost."""

PROXY_STATUSES = (502, 503, 504)
"""With a page of its own, a proxy answers so while no frontend answers it."""

_BY_STATUS: dict[int, type[PlaneError]] = {
    400: InvalidRequest,
    401: Unauthorized,
    403: PermissionDenied,
    404: NotFound,
    **dict.fromkeys(PROXY_STATUSES, Unavailable),
}


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Refuses redirects, which would take the key to another host."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirects, urllib.request.ProxyHandler({}))


def call_facade(
    url: str, key: str | None, op: str, body: Mapping[str, Any], timeout_s: float, request_id: str = ""
) -> dict[str, Any]:
    """Carries out an op of the fleet through a frontend.

    Args:
        url: The frontend's address, with or without `/v1/rl`.
        key: Its admin key. None: it has none.
        op: A name in `FLEET_OPS`. For `enable` and `disable`, `workers` names one worker.
        body: The op's fields.
        timeout_s: Seconds for each read of the answer. The caller bounds the whole call.
        request_id: Makes an update idempotent.

    Raises:
        PlaneError: as the frontend raised it.
    """
    spec = FLEET_OPS[op]
    base = url.rstrip("/").removesuffix("/v1/rl")
    path = spec.path
    if spec.worker_in_path:
        (instance_id,) = body["workers"]
        path = path.replace("{id}", quote(instance_id, safe=""))
    address = f"{base}/v1/rl/{path}"
    if spec.method == "GET":
        query = {name: ",".join(value) if isinstance(value, list) else value for name, value in body.items()}
        reply = call_json(f"{address}?{urlencode(query)}" if query else address, None, key, timeout_s)
    else:
        reply = call_json(address, body, key, timeout_s, request_id)
    if not isinstance(reply.get("workers"), list):
        raise PlaneError(f"{base} answers, but is no frontend of rl-plane", fix="check the address (--url)")
    return reply


def call_json(
    address: str, body: Mapping[str, Any] | None, key: str | None, timeout_s: float, request_id: str = ""
) -> dict[str, Any]:
    """One JSON object from a frontend: POST with a body, else GET. The other arguments are those of `call_facade`."""
    data = None if body is None else json.dumps(body, allow_nan=False).encode()
    headers = {"Accept": "application/json", "Content-Type": "application/json", **(outgoing() or {})}
    if request_id:
        headers["Idempotency-Key"] = request_id
    base = "{0.scheme}://{0.netloc}".format(urlsplit(address))
    with _opened(base, address, data, headers, key, timeout_s) as reply:
        return _object(base, reply.read(MAX_REPLY_BYTES + 1))


@contextmanager
def _opened(
    base: str, address: str, data: bytes | None, headers: Mapping[str, str], key: str | None, timeout_s: float
) -> Iterator[http.client.HTTPResponse]:
    """Opens the answer of a frontend for the block. Errors of HTTP and of the network become PlaneErrors. `base`: the
    frontend's URL, for their messages."""
    headers = {**headers, CLIENT_HEADER: this_process()}
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    try:
        request = urllib.request.Request(address, data, headers)
        with _OPENER.open(request, timeout=timeout_s) as reply:
            yield reply
    except urllib.error.HTTPError as error:
        with error:
            raise _error(base, error.code, error.read(MAX_REPLY_BYTES)) from error
    except (urllib.error.URLError, OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, (TimeoutError, socket.timeout)):
            raise DeadlineExceeded(f"{base} did not answer within {timeout_s:g} s") from error
        if isinstance(reason, ssl.SSLError):
            raise Unavailable(
                f"{base} has no certificate that is trusted here: {reason.reason or reason}",
                fix="set SSL_CERT_FILE to the certificate of its CA, and use a name that the certificate has",
            ) from error
        raise Unavailable(
            f"no frontend answers at {base}: {reason or type(reason).__name__}",
            fix="start one (`rl-plane up`), or set --url / RL_PLANE_URL",
        ) from error


def read_events(
    url: str, key: str | None, since_s: int, after: int | None, follow: bool, component: str | None = None
) -> Iterator[tuple[int | None, str, dict[str, Any]]]:
    """Yields the events of a frontend: (id, kind, data). The stream ends when the frontend ends it.

    Args:
        url, key: those of `call_facade`.
        since_s: The kept events of so many seconds come first.
        after: The id of the last event that the caller has. None: it has none. Else this counts, and not `since_s`.
        follow: Waits for more events. Else only the kept ones come.
        component: A component that the frontend serves. None: the frontend's own.

    Raises:
        PlaneError: as the frontend raised it. Unavailable: the connection was lost. DeadlineExceeded: the frontend is
            silent.
    """
    base = url.rstrip("/").removesuffix("/v1/rl")
    named = {} if component is None else {"component": component}
    query = urlencode({"since_s": since_s, "follow": str(follow).lower(), **named})
    headers = {"Accept": "text/event-stream"}
    if after is not None:
        headers["Last-Event-ID"] = str(after)
    with _opened(base, f"{base}/v1/rl/events?{query}", None, headers, key, EVENTS_SILENT_S) as stream:
        fields: dict[str, str] = {}
        while raw := stream.readline(MAX_REPLY_BYTES):
            name, _, value = raw.decode().rstrip("\n").partition(": ")
            if name:
                fields[name] = value
            elif "data" in fields:  # an empty line ends an event
                number = int(fields["id"]) if "id" in fields else None
                yield number, fields.get("event", ""), _object(base, fields["data"].encode())
                fields = {}


def _object(base: str, data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError:
        value = None
    if len(data) > MAX_REPLY_BYTES or not isinstance(value, dict):
        raise PlaneError(f"{base} answers, but is no frontend of rl-plane", fix="check the address (--url)")
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
    words = f"{base} answers HTTP {status}, but is no frontend of rl-plane"
    return kind(words, fix="check the address (--url)", status=status)
