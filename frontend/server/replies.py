"""Replies of both listeners: JSON out, and the shape of an error."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import orjson
from starlette.responses import Response

from rl_plane.errors import PlaneError, Unauthorized, Unavailable, Unsupported

MIN_RETRY_S = 1
"""`Retry-After` counts whole seconds."""

LIFTED = ("workers", "epoch", "fingerprint")
"""Facts of an error that stand at the top of the body, where a successful reply has them."""

ErrorShape = Callable[[PlaneError, float], dict[str, Any]]
"""Makes the body of an error reply from the error and the seconds that the call took."""


class MethodNotAllowed(PlaneError):
    code = "method_not_allowed"
    http_status = 405


def unanswered() -> Unavailable:
    """The error for a call that the frontend's end has cut. It is of the same type as that for a lost connection."""
    return Unavailable(
        "this frontend ended before it could answer, and what was asked may still be carried out",
        fix="repeat it at another frontend; an update under its own Idempotency-Key",
        retry_after_s=1.0,
    )


def _plain(value: Any) -> Any:
    """Replaces what JSON lacks: NaN and infinities become null, keys become strings, bytes become hex."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    if value is None or isinstance(value, (str, int)):
        return value
    return bytes(value).hex() if isinstance(value, (bytes, bytearray, memoryview)) else str(value)


def to_json(value: Any) -> bytes:
    """Encodes a value; NaN and infinities become null."""
    try:
        return orjson.dumps(value)
    except TypeError:  # keys that are not strings, bytes, integers over 64 bits, half a surrogate pair
        return json.dumps(_plain(value), separators=(",", ":")).encode()


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(to_json(value), status, headers, media_type="application/json")


def error_body(error: PlaneError, elapsed_s: float) -> dict[str, Any]:
    """Makes `{status: error, error: {code, message, …}, workers?, epoch?, fingerprint?, elapsed_s}`."""
    wire = error.to_wire()
    wire.pop("elapsed_s", None)
    lifted = {key: wire.pop(key) for key in LIFTED if key in wire}
    return {"status": "error", "error": wire, **lifted, "elapsed_s": elapsed_s}


def error_response(error: PlaneError, elapsed_s: float, shape: ErrorShape = error_body) -> Response:
    headers = {}
    if isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, MethodNotAllowed):
        headers["Allow"] = str(error.facts.get("allow", ""))
    if isinstance(error, Unsupported):
        headers["x-should-retry"] = "false"  # OpenAI's clients retry a 501 otherwise
    if error.http_status in (429, 503):
        headers["Retry-After"] = str(max(MIN_RETRY_S, math.ceil(error.facts.get("retry_after_s", MIN_RETRY_S))))
    return json_response(shape(error, elapsed_s), error.http_status, headers)
