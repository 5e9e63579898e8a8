"""A frontend whose answers to the ops of an update a test writes, and a sender without receivers."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from rl_plane.errors import PlaneError
from rl_plane.protocol.fleet_ops import FLEET_OPS
from rl_plane.publish import WeightPublisher
from rl_plane.publish.publish_options import PublishLimits
from rl_plane.transports.base import Sender, SenderContext
from rl_plane.weights.manifest import Manifest

WORKER = {"instance_id": "a" * 16, "status": "ok", "host": "h", "transports": ["filesystem"], "world_size": 1}
HEAD = {"status": "ok", "epoch": 1, "fingerprint": "f" * 16, "elapsed_s": 0.0, "workers": [WORKER]}
DROP = "drop"
"""The frontend takes the call, and ends before it answers."""

Answer = str | int | PlaneError | Mapping[str, Any] | Callable[[], Mapping[str, Any]]
"""DROP, the status of a proxy's own page, an error, or the fields of a reply."""


class ScriptedFacade:
    """Gives each op the next of its answers, and the last one again and again."""

    def __init__(self) -> None:
        self.answers: dict[str, list[Answer]] = {}
        self.asked: list[tuple[str, str]] = []
        """(op, request id or update id) of each call."""
        self.bodies: dict[str, dict[str, Any]] = {}
        """The body of the last call of each op."""
        ops = {("POST" if spec.method != "GET" else "GET", spec.path): op for op, spec in FLEET_OPS.items()}
        facade = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                op = ops[self.command, self.path.partition("?")[0].removeprefix("/v1/rl/")]
                body = facade.bodies[op] = json.loads(data) if data else {}
                facade.asked.append((op, body.get("update_id") or self.headers["Idempotency-Key"] or ""))
                answers = facade.answers.get(op, [{}])
                answer = answers.pop(0) if len(answers) > 1 else answers[0]
                if answer == DROP:
                    return
                if isinstance(answer, int):
                    self.reply(answer, b"<html>a proxy's page</html>")
                elif isinstance(answer, PlaneError):
                    self.reply(answer.http_status, json.dumps({"error": answer.to_wire()}).encode())
                else:
                    assert not isinstance(answer, str)
                    fields = answer() if callable(answer) else answer
                    self.reply(200, json.dumps({**HEAD, **fields}).encode())

            def reply(self, status: int, data: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = answer

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def ids_of(self, op: str) -> list[str]:
        return [named for asked, named in self.asked if asked == op]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def scripted() -> Iterator[ScriptedFacade]:
    facade = ScriptedFacade()
    yield facade
    facade.close()


class NotedSender(Sender):
    """Takes buckets, and notes `open`, `keep` and `close`."""

    backend = "filesystem"
    receivers_from = "finish"

    def __init__(self) -> None:
        self.events: list[str] = []
        self._sizes: list[int] = []

    def open(self, manifest: Manifest) -> dict[str, Any]:
        self.events.append("open")
        self._sizes = [bucket.nbytes for bucket in manifest.buckets]
        return {"backend": "filesystem", "path": "/nothing"}

    def buffer(self, number: int) -> memoryview:
        return memoryview(bytearray(self._sizes[number]))

    def send(self, number: int) -> None:
        pass

    def finish(self, digests: Mapping[str, str] | None) -> None:
        pass

    def keep(self, adapter: str | None = None, onto_previous: bool = False, earlier: int | None = None) -> None:
        self.events.append("keep")

    def close(self) -> None:
        self.events.append("close")

    def destroy(self) -> None:
        pass


class NotedPushingSender(NotedSender):
    """A NotedSender whose receivers listen first."""

    fingerprint = "f" * 16


def publisher_to(
    facade: ScriptedFacade, source: Any, sender: Sender, *, others_s: float = 60.0, **options: Any
) -> WeightPublisher:
    """A publisher that sends to the facade by `sender`, and asks again at once."""

    class Own(WeightPublisher):
        limits = PublishLimits(others_s=others_s, again_s=0.001)

        def make_sender(self, backend: str, context: SenderContext) -> Sender:
            return sender

    return Own(source, facade.url, transport="filesystem", encoding="full", **options)
