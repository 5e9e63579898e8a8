"""Moves weights over plain HTTP: an example of a transport in a package of its own.

The trainer holds the packed buckets in memory and serves them at `/<secret>/<number>`. Each rank of each engine fetches
them. Install this package beside the trainer and beside every worker, and publish with `transport="plain_http"`.
"""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Iterator, Mapping
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from rl_plane.errors import InvalidRequest, InvalidWeights, Unavailable
from rl_plane.protocol.transport_traits import TransportTraits
from rl_plane.transports.base import Sender, SenderContext, WeightTransport, check_fields
from rl_plane.transports.packed_delivery import PackedDelivery, check_kind
from rl_plane.weights.checkpoint import Kind
from rl_plane.weights.manifest import Manifest

BACKEND = "plain_http"
TIMEOUT_S = 20.0
"""The longest time in seconds without a byte on a connection. It bounds each wait, also of a cancelled update."""
MAX_MANIFEST_BYTES = 256 << 20
TRAITS = TransportTraits(source="the bytes of the trainer's HTTP server")


class PlainHttpTransport(WeightTransport):
    """The receiving half. It runs in the process that holds the model."""

    backend = BACKEND

    def open(self, request: Mapping[str, Any], kind: Kind) -> PackedDelivery:
        check_fields(BACKEND, request, "host", "port", "secret")
        host, port, secret = request.get("host"), request.get("port"), request.get("secret")
        if not (isinstance(host, str) and type(port) is int and isinstance(secret, str) and secret.isalnum()):
            raise InvalidRequest(
                "host, port or secret is missing", field="transport", fix="send what PlainHttpSender.open returned"
            )
        connection = HTTPConnection(host, port, timeout=TIMEOUT_S)
        try:
            manifest = Manifest.from_wire(json.loads(_fetch(connection, f"/{secret}/manifest")))
            check_kind(manifest, kind)
        except BaseException:
            connection.close()
            raise

        def buckets() -> Iterator[memoryview]:
            for number, bucket in enumerate(manifest.buckets):
                yield memoryview(_fetch(connection, f"/{secret}/{number}", bucket.nbytes))

        return PackedDelivery(manifest, buckets(), refetchable=False, owned=True, close=connection.close)


def _fetch(connection: HTTPConnection, path: str, nbytes: int | None = None) -> bytes:
    try:
        connection.request("GET", path)
        reply = connection.getresponse()
        body = reply.read(MAX_MANIFEST_BYTES if nbytes is None else nbytes + 1)
    except (OSError, HTTPException) as error:
        raise Unavailable(f"the trainer did not give the weights: {error}") from error
    if reply.status != 200 or (nbytes is not None and len(body) != nbytes):
        raise InvalidWeights(
            f"source_gone: {path} is not there", field="transport", fix="publish the weights again"
        )
    return body


class PlainHttpSender(Sender):
    """The sending half. It serves one version at a time, until the update ends."""

    backend = BACKEND
    receivers_from = "finish"  # the fleet may fetch once every bucket is here

    def __init__(self, host: str, port: int) -> None:
        self._pages: dict[str, bytes | bytearray] = {}
        self._manifest: Manifest | None = None
        self._buckets: list[bytearray] = []
        self._secret = ""
        pages = self._pages

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = TIMEOUT_S

            def do_GET(self) -> None:
                body = pages.get(self.path)
                self.send_response(200 if body is not None else 404)
                self.send_header("Content-Length", str(len(body or b"")))
                self.end_headers()
                self.wfile.write(body or b"")

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._host = host
        self._server = ThreadingHTTPServer((host, port), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, name="rl-plane-http", daemon=True).start()

    def open(self, manifest: Manifest) -> dict[str, Any]:
        self._manifest, self._secret = manifest, secrets.token_hex(16)
        self._buckets = [bytearray(bucket.nbytes) for bucket in manifest.buckets]
        return {"backend": BACKEND, "host": self._host, "port": self._server.server_port, "secret": self._secret}

    def buffer(self, number: int) -> memoryview:
        return memoryview(self._buckets[number])

    def send(self, number: int) -> None:
        self._pages[f"/{self._secret}/{number}"] = self._buckets[number]

    def finish(self, digests: Mapping[str, str] | None) -> None:
        assert self._manifest is not None
        manifest = self._manifest if digests is None else self._manifest.digested(digests)
        self._pages[f"/{self._secret}/manifest"] = json.dumps(manifest.to_wire()).encode()

    def close(self) -> None:
        self._pages.clear()
        self._buckets = []

    def destroy(self) -> None:
        self.close()
        self._server.shutdown()
        self._server.server_close()


def build(context: SenderContext) -> PlainHttpSender:
    context.check_options(BACKEND, "host", "port")
    return PlainHttpSender(*context.address())
