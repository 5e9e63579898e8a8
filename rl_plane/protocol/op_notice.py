"""The notice of a changing op that a process with `RlClient` sends to the frontends, whose events show it.

The notice is not proved: NATS does not tell a receiver whose key has published a message.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rl_plane.errors import InvalidRequest
from rl_plane.protocol.envelope import decode, encode
from rl_plane.protocol.fleet_ops import FLEET_OPS
from rl_plane.protocol.subjects import USER_KEY
from rl_plane.protocol.validation import PRINTABLE, Body, parse_body

MAX_CHARS = 256
"""The length of each field. The longest is `who`: a name, a host and a process id."""

_Short = Annotated[str, Field(max_length=MAX_CHARS, pattern=PRINTABLE)]


class OpNotice(Body):
    op: _Short
    who: _Short
    """The process that has coordinated the op, as the history names it."""
    key: Annotated[str, Field(pattern=rf"^({USER_KEY})?$")] = ""
    """The public key by which that process is connected. Empty: it has none."""
    outcome: _Short
    """`ok`, or the error's code."""

    def encode(self) -> bytes:
        return encode(self.model_dump())

    @classmethod
    def decode(cls, data: bytes) -> OpNotice:
        """InvalidRequest: it is no such notice."""
        notice = parse_body(cls, decode(data))
        if notice.op not in FLEET_OPS or FLEET_OPS[notice.op].method == "GET":
            raise InvalidRequest(f"{notice.op!r} is no changing op", field="op", fix="name an op that changes")
        return notice
