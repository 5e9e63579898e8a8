"""A fleet that `rl-plane up` has started with traces, and helpers to look at a trace."""

from __future__ import annotations

import json
import secrets
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.http_calls import CALL_S, post_json
from tests.support.otlp_receiver import Received
from tests.support.started_command import READY_S, Started


class TracedFleet:
    """A fleet whose processes send traces to `endpoint`. The checkpoints are below `root`."""

    def __init__(
        self,
        folder: Path,
        endpoint: str,
        *argv: str,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.root = folder / "weights"
        self.root.mkdir()
        options = ("--weight-root", str(self.root), "--rl-port", "0", "--http-port", "0", *argv)
        self.started = Started(
            folder, "up", "--engine", "fake", "--otel-endpoint", endpoint, *options, **(environ or {})
        )
        self.ready = self.started.line(READY_S, ready="up")
        self.rl_url, self.http_url = self.ready["rl_url"], self.ready["http_url"]
        self.workers: dict[str, int] = {row["instance_id"]: row["pid"] for row in self.ready["workers"]}

    def get(self, path: str) -> dict[str, Any]:
        with urllib.request.urlopen(self.rl_url + path, timeout=CALL_S) as answer:
            reply: dict[str, Any] = json.load(answer)
        return reply

    def post(self, path: str, body: dict[str, Any], **headers: str) -> dict[str, Any]:
        """The reply, also of a call that fails."""
        url = (self.rl_url if path.startswith("/v1/rl/") else self.http_url) + path
        return post_json(url, body, headers)

    def text(self, path: str, body: dict[str, Any], **headers: str) -> str:
        """The body of a good reply."""
        request = urllib.request.Request(self.http_url + path, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=CALL_S) as answer:
            found: bytes = answer.read()
        return found.decode()

    def log(self) -> str:
        return self.started.errors.read_text()


def fresh() -> tuple[str, str, str]:
    """A caller's trace and span, and the header that carries them."""
    trace_id, span_id = secrets.token_hex(16), secrets.token_hex(8)
    return trace_id, span_id, f"00-{trace_id}-{span_id}-01"


def one(spans: list[Received], name: str) -> Received:
    (found,) = [span for span in spans if span.name == name]
    return found


def each(spans: list[Received], name: str) -> list[Received]:
    return sorted((span for span in spans if span.name == name), key=lambda span: span.began_ns)


def check_tree(spans: list[Received], root: str) -> None:
    """Each span has its parent in the trace, and the parent has begun before it. `root`: the caller's span."""
    known = {span.span_id: span for span in spans}
    assert len(known) == len(spans)
    for span in spans:
        assert span.began_ns <= span.ended_ns
        if span.parent_id != root:
            assert known[span.parent_id].began_ns <= span.began_ns, span.name
