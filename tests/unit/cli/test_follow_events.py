"""The words of `rl-plane events`, and a reader that connects again."""

from __future__ import annotations

import signal
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

import pytest

from rl_plane.cli import follow_events, main

ONE = {"update_id": "u", "label": "one", "who": "frontend@a:1", "caller": "train.py@b:2"}


@pytest.mark.parametrize(
    ("kind", "data", "words"),
    [
        ("member", {"instance_id": "a", "change": "left"}, "worker a left"),
        ("op", {"op": "pause", "who": "w", "asked_by": "key-1", "outcome": "ok"}, "pause by key-1: ok"),
        ("update", {**ONE, "change": "began"}, "update u (one) began, asked by train.py@b:2"),
        (
            "update",
            {**ONE, "change": "aborted", "error": {"code": "update_aborted", "message": "why"}},
            "update u (one) aborted: update_aborted: why",
        ),
        (
            "update",
            {**ONE, "change": "finished", "phases": {"gate_s": 0.25}},
            "update u (one) finished (gate 0.2 s)",
        ),
        (
            "update",
            {
                **ONE,
                "change": "progress",
                "phase": "prepare",
                "bytes": 1,
                "total_bytes": 4,
                "elapsed_s": 3.0,
                "waits_for": "the trainer's bytes",
            },
            "update u (one) prepare, 25%, 3 s: waits for the trainer's bytes",
        ),
        (
            "admission",
            {"instance_id": "a", "open": False, "reasons": ["behind"], "paused": True, "version": None},
            "worker a closed: behind; paused, no version",
        ),
        ("missed", {"fix": "read the state"}, "missed: read the state"),
        ("end", {"reason": "slow"}, "end: slow"),
    ],
)
def test_each_event_has_words(kind: str, data: dict[str, Any], words: str) -> None:
    assert follow_events.event_line(kind, data) == f"--:--:-- {words}"
    assert follow_events.event_line(kind, {**data, "at": 1.0}).endswith(f":01 {words}")


class BreakingFrontend(ThreadingHTTPServer):
    """Sends one event on each connection and breaks it off. The third reader is interrupted, as by Ctrl-C."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str | None]] = []
        """The query and the last event of each reader."""
        super().__init__(("127.0.0.1", 0), _Breaking)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Prints nothing: an interrupted reader resets its connection."""


class _Breaking(BaseHTTPRequestHandler):
    server: BreakingFrontend

    def do_GET(self) -> None:
        asked = self.server.asked
        asked.append((urlsplit(self.path).query, self.headers["Last-Event-ID"]))
        if len(asked) == 3:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            return
        event = f'id: {len(asked)}\nevent: end\ndata: {{"reason": "stopping"}}\n\n'.encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Content-Length", str(len(event) + 100))
        self.end_headers()
        self.wfile.write(event)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def test_a_follower_connects_again_after_the_last_event_that_it_has(capsys: pytest.CaptureFixture[str]) -> None:
    with BreakingFrontend() as frontend:
        threading.Thread(target=frontend.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{frontend.server_address[1]}"
        assert main.run(["events", "--follow", "--component", "reference", "--url", url]) == 130
        frontend.shutdown()
    assert [after for _, after in frontend.asked] == [None, "1", "2"]
    assert all("follow=true" in query and "component=reference" in query for query, _ in frontend.asked)
    assert capsys.readouterr().out.count("end: stopping") == 2


def test_a_frontend_that_never_answered_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        url = f"http://127.0.0.1:{gone.getsockname()[1]}"
    assert main.run(["events", "--follow", "--url", url]) == 1
    assert url in capsys.readouterr().err
