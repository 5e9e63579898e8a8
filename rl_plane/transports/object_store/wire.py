"""The layout of a version in NATS, and the JetStream calls that both halves of `object_store` make.

A version has a stream of its own. Its messages are chunks of one length, except that the last chunk of a part may be
shorter. The parts are the manifest, each bucket, and the digests of the tensors. So the manifest and the length of a
chunk say which sequence number holds what. Each chunk is written with the sequence number that it must get. A stream is
sealed once it is complete.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgpack

from rl_plane.errors import InvalidWeights, Unavailable
from rl_plane.transports.object_store.bulk_socket import NatsSocket
from rl_plane.weights.manifest import Manifest, are_digests

BACKEND = "object_store"

MAX_CHUNK_BYTES = 1 << 20
"""The longest chunk, at NATS's usual limit for a message. Smaller chunks cost the server more."""
HEADROOM_BYTES = 4096
"""Room for the headers of a chunk, which the server counts as payload."""
MAX_MANIFEST_BYTES = 64 << 20
"""The longest manifest: about 500,000 tensors."""
DIGEST_BYTES = 64
"""The length of a tensor's digest: its hex digits as ASCII, and zeros after a shorter one."""

ANSWER_S = 5.0
"""The time for an answer in seconds; then the call is tried again on a new connection. JetStream takes milliseconds."""
RETRY_S = 0.1
"""Seconds between two tries, while the server is away or a chunk is not there yet."""

PUBLISHER = "rl_plane_publisher"
"""The key of a stream's metadata with the name of its publisher."""
LAYOUT = "rl_plane_layout"
"""The key of a stream's metadata with its Layout, as JSON."""

_NO_STREAM, _NO_MESSAGE = 10059, 10037


class NoSuchObject(Exception):
    """The stream does not exist, or has no such message."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The lengths that say where everything is in a stream."""

    chunk_bytes: int
    manifest_bytes: int

    def pieces(self, nbytes: int) -> int:
        """The number of chunks of a part of so many bytes."""
        return -(-nbytes // self.chunk_bytes)

    def cut(self, data: memoryview) -> list[memoryview]:
        """The chunks of a part."""
        return [data[at : at + self.chunk_bytes] for at in range(0, len(data), self.chunk_bytes)]

    def starts(self, manifest: Manifest) -> list[int]:
        """The sequence number of the first chunk of each bucket, and then of the digests."""
        found = [1 + self.pieces(self.manifest_bytes)]
        for bucket in manifest.buckets:
            found.append(found[-1] + self.pieces(bucket.nbytes))
        return found

    def encode(self) -> str:
        return json.dumps({"v": 1, "chunk_bytes": self.chunk_bytes, "manifest_bytes": self.manifest_bytes})

    @classmethod
    def decode(cls, text: Any) -> Layout:
        """Parses a stream's metadata. Raises InvalidWeights if it is not a layout."""
        try:
            found = json.loads(text)
            sizes = found["chunk_bytes"], found["manifest_bytes"]
            good = found["v"] == 1 and all(type(size) is int and size > 0 for size in sizes)
        except (TypeError, ValueError, KeyError):
            good = False
        if not good or sizes[0] > MAX_CHUNK_BYTES or sizes[1] > MAX_MANIFEST_BYTES:
            raise InvalidWeights(
                "the object has a layout that this version does not know",
                field="transport.object",
                fix="publish it again with the same version of rl_plane",
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
    """The digests in the manifest's order; zeros if the trainer has made none, so that the layout stays the same."""
    if digests is None:
        return bytes(DIGEST_BYTES * len(manifest.specs))
    return b"".join(digests[name].encode().ljust(DIGEST_BYTES, b"\0") for name in manifest.specs)


def with_digests(manifest: Manifest, raw: memoryview) -> Manifest:
    """The manifest with the digests that `encode_digests` has written. Raises InvalidWeights for other bytes."""
    if not any(raw):
        return manifest
    each = [
        bytes(raw[at : at + DIGEST_BYTES]).rstrip(b"\0").decode("ascii", "replace")
        for at in range(0, len(raw), DIGEST_BYTES)
    ]
    if not are_digests(each):
        raise InvalidWeights(
            "the object's digests can't be read", field="transport.object", fix="publish the weights again"
        )
    return manifest.digested(dict(zip(manifest.specs, each, strict=True)))


def ask(connection: NatsSocket, call: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """Calls JetStream's API, and returns the answer.

    Raises:
        NoSuchObject: the stream or the message does not exist.
        Unavailable: JetStream refuses.
        ConnectionError: no JetStream answers at the moment.
    """
    answer = connection.request(f"$JS.API.{call}", body, ANSWER_S)
    error = answer.get("error")
    if error is None:
        if not answer:
            raise ConnectionError("no JetStream answers")
        return answer
    if error.get("err_code") in (_NO_STREAM, _NO_MESSAGE):
        raise NoSuchObject
    if error.get("code") == 503:  # the server is starting, or the cluster is choosing its leader
        raise ConnectionError(str(error.get("description")))
    raise refused(call, error)


def refused(what: str, error: dict[str, Any]) -> Unavailable:
    """The error for an answer by which JetStream refuses something."""
    return Unavailable(
        f"NATS refused {what}: {str(error.get('description'))[:200]}",
        fix="JetStream must be enabled for this account, with room for a few versions of the weights",
    )
