"""A collector for tests: takes spans by OTLP over HTTP, and hands them out."""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Status

ERROR = Status.STATUS_CODE_ERROR


@dataclass(frozen=True)
class Received:
    """One span as the collector got it. Ids are hex digits; a span without a parent has an empty one."""

    name: str
    service: str
    trace_id: str
    span_id: str
    parent_id: str
    began_ns: int
    ended_ns: int
    attributes: dict[str, Any]
    events: list[str]
    failed: bool
    resource: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        """An attribute of ours."""
        return self.attributes["rl_plane." + name]


class Collector:
    """The spans that have come. `headers` are those of the newest request."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.spans: list[Received] = []
        self.headers: dict[str, str] = {}
        self._changed = threading.Condition()

    def take(self, body: bytes, headers: dict[str, str]) -> None:
        request = ExportTraceServiceRequest.FromString(body)
        found = [
            _received(span, _attributes(group.resource.attributes))
            for group in request.resource_spans
            for scope in group.scope_spans
            for span in scope.spans
        ]
        with self._changed:
            self.spans += found
            self.headers = headers
            self._changed.notify_all()

    def wait_for(self, holds: Callable[[list[Received]], bool], bound_s: float = 30.0) -> list[Received]:
        """Waits until the spans are as the caller wants them, and returns them."""
        give_up = time.monotonic() + bound_s
        with self._changed:
            while not holds(self.spans):
                left_s = give_up - time.monotonic()
                assert left_s > 0, f"only these spans came: {[(one.service, one.name) for one in self.spans]}"
                self._changed.wait(left_s)
            return list(self.spans)

    def trace(self, trace_id: str, root: str, *names: str) -> list[Received]:
        """Waits until a trace has spans of these names, each as often as it is named, and the parent of each span.
        Returns all of it. `root`: the caller's span, which does not come."""

        def there(spans: list[Received]) -> bool:
            came = [span for span in spans if span.trace_id == trace_id]
            known, found = {root, *(span.span_id for span in came)}, [span.name for span in came]
            named = all(found.count(name) >= names.count(name) for name in names)
            return named and all(span.parent_id in known for span in came)

        return [span for span in self.wait_for(there) if span.trace_id == trace_id]


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}


def _received(span: Any, resource: dict[str, Any]) -> Received:
    return Received(
        name=span.name,
        service=resource["service.name"],
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        began_ns=span.start_time_unix_nano,
        ended_ns=span.end_time_unix_nano,
        attributes=_attributes(span.attributes),
        events=[event.name for event in span.events],
        failed=span.status.code == ERROR,
        resource=resource,
    )


@contextmanager
def collector(status: int = 200) -> Iterator[Collector]:
    """A collector at a free port. `status`: its answer to each request."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            assert self.path == "/v1/traces"
            if status == 200:
                found.take(body, dict(self.headers))
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(status)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        found = Collector(f"http://127.0.0.1:{server.server_address[1]}")
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield found
        finally:
            server.shutdown()
            thread.join()
