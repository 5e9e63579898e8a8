"""How a version's weights lie in NATS, and the JetStream calls that both ends make.

A version has a stream of its own, whose messages are chunks of one length (the last of a part may be shorter): first
the manifest, then each bucket, then the digests of the tensors. So the manifest and the chunks' length say which
sequence holds what, and a chunk is written only as the one after those before. A stream is sealed once it is whole.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgpack

from rl_plane.errors import InvalidWeights, Unavailable
from rl_plane.transports.object_store.bulk_socket import NatsSocket
from rl_plane.weights.manifest import Manifest

BACKEND = "object_store"

MAX_CHUNK_BYTES = 1 << 20
"""Beyond the usual limit of a NATS message larger ones gain nothing; below it they cost the server more."""
HEADROOM_BYTES = 4096
"""For the headers that go with a chunk: a server counts them as payload."""
MAX_MANIFEST_BYTES = 64 << 20
"""Of some 500,000 tensors."""
DIGEST_BYTES = 32

ANSWER_S = 5.0
"""JetStream answers within milliseconds; what takes so long is tried again on a new connection."""
RETRY_S = 0.1
"""Between two tries while the server is away, or a chunk is not there yet."""

PUBLISHER = "rl_plane_publisher"
"""Stream metadata: who made it."""
LAYOUT = "rl_plane_layout"
"""Stream metadata: what `Layout` says, as JSON."""

_NO_STREAM, _NO_MESSAGE = 10059, 10037


class NoSuchObject(Exception):
    """There is no such stream, or no such message in it."""


@dataclass(frozen=True, slots=True)
class Layout:
    chunk_bytes: int
    manifest_bytes: int

    def pieces(self, nbytes: int) -> int:
        return -(-nbytes // self.chunk_bytes)

    def cut(self, data: memoryview) -> list[memoryview]:
        return [data[at : at + self.chunk_bytes] for at in range(0, len(data), self.chunk_bytes)]

    def starts(self, manifest: Manifest) -> list[int]:
        """The first sequence of each bucket, and then of the digests."""
        found = [1 + self.pieces(self.manifest_bytes)]
        for bucket in manifest.buckets:
            found.append(found[-1] + self.pieces(bucket.nbytes))
        return found

    def encode(self) -> str:
        return json.dumps({"v": 1, "chunk_bytes": self.chunk_bytes, "manifest_bytes": self.manifest_bytes})

    @classmethod
    def decode(cls, told: Any) -> Layout:
        """InvalidWeights for what is no layout."""
        try:
            found = json.loads(told)
            sizes = found["chunk_bytes"], found["manifest_bytes"]
            good = found["v"] == 1 and all(type(size) is int and size > 0 for size in sizes)
        except (TypeError, ValueError, KeyError):
            good = False
        if not good or sizes[0] > MAX_CHUNK_BYTES or sizes[1] > MAX_MANIFEST_BYTES:
            raise InvalidWeights(
                "the object is of no layout that is known here",
                field="transport.object",
                fix="publish it with rl_plane.transports.object_store.sender, of this version of rl_plane",
            )
        return cls(*sizes)


def encode_manifest(manifest: Manifest) -> bytes:
    return bytes(msgpack.packb(manifest.to_wire()))


def decode_manifest(raw: bytes) -> Manifest:
    try:
        wire = msgpack.unpackb(raw)
    except (ValueError, msgpack.UnpackException):
        wire = None
    return Manifest.from_wire(wire)


def encode_digests(manifest: Manifest, digests: Mapping[str, str] | None) -> bytes:
    """In the manifest's order; zeros where none were made: the layout is the same."""
    if digests is None:
        return bytes(DIGEST_BYTES * len(manifest.specs))
    return bytes.fromhex("".join(digests[name] for name in manifest.specs))


def with_digests(manifest: Manifest, raw: memoryview) -> Manifest:
    """`raw`: what `encode_digests` made."""
    if not any(raw):
        return manifest
    each = [raw[at : at + DIGEST_BYTES].hex() for at in range(0, len(raw), DIGEST_BYTES)]
    return manifest.digested(dict(zip(manifest.specs, each, strict=True)))


def ask(connection: NatsSocket, call: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """JetStream's answer. NoSuchObject when there is no such stream or message, Unavailable when it refuses,
    ConnectionError when nobody answers now."""
    answer = connection.request(f"$JS.API.{call}", body, ANSWER_S)
    error = answer.get("error")
    if error is None:
        if not answer:
            raise ConnectionError("no JetStream answers")
        return answer
    if error.get("err_code") in (_NO_STREAM, _NO_MESSAGE):
        raise NoSuchObject
    if error.get("code") == 503:  # while a server starts, or a cluster chooses its leader
        raise ConnectionError(str(error.get("description")))
    raise refused(call, error)


def refused(what: str, error: dict[str, Any]) -> Unavailable:
    return Unavailable(
        f"NATS refused {what}: {str(error.get('description'))[:200]}",
        fix="JetStream must be enabled for this account, with room for a few versions of the weights",
    )
