"""The notices that frontends list or show as events: a worker's process loads its engine or has ended, and a process
with `RlClient` has carried out a changing op.

A notice changes nothing in the fleet. It is not proved: NATS does not say which key has published a message. But the
key of one worker can publish only one kind of these notices: that this worker starts.
"""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, field_validator

from rl_plane.errors import InvalidRequest
from rl_plane.protocol.envelope import decode, encode
from rl_plane.protocol.fleet_ops import FLEET_OPS
from rl_plane.protocol.subjects import USER_KEY, check_instance_id
from rl_plane.protocol.validation import PRINTABLE, Body, parse_body

MAX_BYTES = 4096
"""The bytes of one notice. The texts and numbers of one have less than a third of them."""
MAX_CHARS = 256
"""The characters of each text. The longest texts are a host's name, and a process's name with its host."""
MAX_S = 1e9
"""More seconds than any process runs."""

EVERY_S = 1.0
"""Seconds between two notices of a worker that starts."""

_Short = Annotated[str, Field(max_length=MAX_CHARS, pattern=PRINTABLE)]
_Number = Annotated[int, Field(ge=0, le=1 << 53)]
_Seconds = Annotated[float, Field(ge=0, le=MAX_S)]


class _Notice(Body):
    def encode(self) -> bytes:
        return encode(self.model_dump())

    @classmethod
    def received(cls, subject: str, data: bytes) -> tuple[str, Self]:
        """The instance id at the end of the subject, and the notice. InvalidRequest: one of them is malformed."""
        return check_instance_id("subject", subject.rpartition(".")[2]), cls.decode(data)

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """InvalidRequest: it is no such notice."""
        if len(data) > MAX_BYTES:
            raise InvalidRequest(f"the notice has {len(data)} bytes; at most {MAX_BYTES} are read")
        return parse_body(cls, decode(data))


class StartNotice(_Notice):
    """A worker's process says each second that it is not a member yet."""

    engine: _Short
    host: _Short
    pid: _Number
    phase: _Short
    """The thing that it does, in words."""
    elapsed_s: _Seconds
    """Seconds since the process began to start the engine."""
    in_phase_s: _Seconds
    server_id: _Short
    """With `client_id`: the connection that sends the notice, as the server's advisories name it."""
    client_id: _Number


class ExitNotice(_Notice):
    """The supervisor of a worker's process says how the process has ended."""

    engine: _Short
    host: _Short
    pid: _Number
    exit_code: Annotated[int, Field(ge=-64, le=255)]
    """Negative: the number of the signal that has killed it."""


class OpNotice(_Notice):
    """A process that has no listener says which changing op it has carried out."""

    op: _Short
    who: _Short
    """The process that has coordinated the op, as the history names it."""
    key: Annotated[str, Field(pattern=rf"^({USER_KEY})?$")] = ""
    """The public key by which that process is connected. Empty: it has none."""
    outcome: _Short
    """`ok`, or the error's code."""

    @field_validator("op")
    @classmethod
    def _changes(cls, op: str) -> str:
        if op not in FLEET_OPS or FLEET_OPS[op].method == "GET":
            raise InvalidRequest(f"{op!r} is no changing op", field="op", fix="name an op that changes")
        return op
