"""The envelope of every control message: msgpack, or JSON when the first byte is `{` or white space.

RlClient, a frontend or any NATS client sends a request to a worker or to the fleet subject. The reply has the format of
the request.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgpack
from pydantic import Field, ValidationError

from rl_plane.errors import InvalidRequest, PlaneError
from rl_plane.protocol.stored import Stored
from rl_plane.protocol.strict_json import parse_json_object
from rl_plane.protocol.validation import invalid_from_pydantic

PROTOCOL_VERSION = 1

MAX_MESSAGE_BYTES = 1_000_000
"""Below the default max_payload of NATS (1 MiB), with room for headers. The server closes a connection that sends
more."""

MAX_ID_CHARS = 128
MAX_INTEGER = 1 << 53
"""The largest integer that JSON carries exactly in every language. Sequences, epochs and Unix ms stay far below."""

Format = Literal["msgpack", "json"]
Status = Literal["ok", "error", "skipped"]
"""`skipped`: the worker is a pipeline stage, and the body has the `reason`."""

_JSON_START = b"{ \t\r\n"


_Text = Annotated[str, Field(strict=True)]
_Count = Annotated[int, Field(strict=True, ge=0, le=MAX_INTEGER)]


@dataclass(frozen=True, slots=True)
class Request(Stored):
    """A request. Only `op` is required on the wire."""

    op: _Text
    body: dict[_Text, Any] = field(default_factory=dict)
    id: Annotated[str, Field(strict=True, max_length=MAX_ID_CHARS)] = ""
    epoch: _Count | None = None
    """The membership epoch that the caller means. The process that fans the request out checks it."""
    fingerprint: _Text | None = None
    targets: tuple[_Text, ...] | None = None
    """Instance ids. None: all."""
    fence: _Count | None = None
    """The sender's fence. Workers refuse a lower fence than the highest that they have seen."""
    incarnation: _Text | None = None
    """The process that the request is for. Another process refuses it."""
    timeout_ms: _Count | None = None
    """The time for which the sender waits. The receiver counts from the arrival, so clocks need not agree."""

    def to_wire(self) -> dict[str, Any]:
        wire: dict[str, Any] = {"v": PROTOCOL_VERSION, "op": self.op, "body": self.body}
        if self.id:
            wire["id"] = self.id
        for key in ("epoch", "fingerprint", "fence", "incarnation", "timeout_ms"):
            if (value := getattr(self, key)) is not None:
                wire[key] = value
        if self.targets is not None:
            wire["targets"] = list(self.targets)
        return wire


@dataclass(frozen=True, slots=True)
class Reply:
    op: str
    id: str = ""
    status: Status = "ok"
    body: Mapping[str, Any] = field(default_factory=dict)
    error: PlaneError | None = None
    instance_id: str = ""
    incarnation: str = ""
    rank_results: list[dict[str, Any]] | None = None
    elapsed_s: float = 0.0

    def to_wire(self) -> dict[str, Any]:
        wire: dict[str, Any] = {
            "v": PROTOCOL_VERSION,
            "id": self.id,
            "instance_id": self.instance_id,
            "incarnation": self.incarnation,
            "op": self.op,
            "status": self.status,
            "elapsed_s": self.elapsed_s,
        }
        if self.error is not None:
            wire["error"] = self.error.to_wire()
        else:
            wire["body"] = self.body
        if self.rank_results is not None:
            wire["rank_results"] = self.rank_results
        return wire


def encode(wire: dict[str, Any], form: Format = "msgpack") -> bytes:
    if form == "json":
        return json.dumps(wire, allow_nan=False, separators=(",", ":")).encode()
    packed: bytes = msgpack.packb(wire, use_bin_type=True)
    return packed


def encode_for_each(request: Request, incarnations: Iterable[str]) -> list[bytes]:
    """Encodes the request for each of these processes. Everything but the incarnation is encoded once, because an
    update's body is large and the fleet may be too."""
    common = encode(request.to_wire())
    assert 0x80 <= common[0] < 0x8F, (
        "a msgpack map with fewer than 15 fields has its length in the first byte, so one more field adds 1 to it"
    )
    head = bytes([common[0] + 1]) + common[1:] + msgpack.packb("incarnation")
    return [head + msgpack.packb(incarnation) for incarnation in incarnations]


def format_of(data: bytes) -> Format:
    return "json" if data[:1] and data[:1] in _JSON_START else "msgpack"


def decode(data: bytes) -> dict[str, Any]:
    """Decodes a map. InvalidRequest names what is wrong."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise InvalidRequest(f"the message has {len(data)} bytes; at most {MAX_MESSAGE_BYTES} are read")
    if format_of(data) == "json":
        return parse_json_object(data)
    try:
        value = msgpack.unpackb(data, raw=False, strict_map_key=True)
    except (ValueError, RecursionError, msgpack.exceptions.UnpackException) as error:
        raise InvalidRequest(
            f"the message is not msgpack, and does not start like JSON: {str(error) or type(error).__name__}",
            field="body",
            fix='send one msgpack or JSON map, such as {"op":"state"}',
        ) from error
    if not isinstance(value, dict):
        raise InvalidRequest(f"the message is a {type(value).__name__}, not a map", fix='such as {"op":"state"}')
    return value


def request_from_wire(wire: dict[str, Any]) -> Request:
    """Parses a request. InvalidRequest names the first wrong field."""
    version = wire.get("v", PROTOCOL_VERSION)
    if version != PROTOCOL_VERSION or isinstance(version, bool):
        raise InvalidRequest(
            f"v is {version!r}; this side speaks {PROTOCOL_VERSION}",
            field="v",
            fix=f"send v={PROTOCOL_VERSION} or leave it out",
        )
    absent = {"v", *(key for key in ("body", "id") if wire.get(key) is None)}
    try:
        return Request.from_wire({key: value for key, value in wire.items() if key not in absent})
    except ValidationError as error:
        raise invalid_from_pydantic(error) from error


def engine_replies(reply: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of a fleet's merged reply, without the rows of pipeline stages, which did nothing."""
    return [row for row in reply["workers"] if row.get("status") != "skipped"]
