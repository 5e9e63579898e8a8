"""Helpers of `tests/unit/cli/test_cli_steer.py` and of other tests."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from rl_plane.cli.settings import SETTINGS

ID_A, ID_B = "aaaaaaaaaaaaaaaa", "bbbbbbbbbbbbbbbb"

DIGEST = "blake3:" + "ab" * 32

VERSION = {"run": "r", "sequence": 3, "label": "step_3", "digest": DIGEST}

SILENT_S = 60.0
"""The bound in seconds of calls to a facade that has a `delay`."""

HEAD = {"status": "ok", "epoch": 7, "fingerprint": "f" * 16, "elapsed_s": 0.25}


def starting_row(instance_id: str) -> dict[str, Any]:
    """A worker that loads its engine, as `state` lists it."""
    return {
        "instance_id": instance_id,
        "engine": "vllm",
        "host": "gpu7",
        "pid": 4711,
        "phase": "loading the model",
        "since": 1.8e9,
        "elapsed_s": 95.2,
        "in_phase_s": 81.4,
    }


class Facade:
    """Answers every request with `reply`, and remembers what it was asked."""

    def __init__(self) -> None:
        self.status, self.reply, self.headers = 200, b"{}", dict[str, str]()
        self.asked: list[dict[str, Any]] = []
        self.at_once: dict[str, Any] = {}
        """Path → the reply that is given without the `delay`."""
        self.delay = threading.Event()
        self.delay.set()
        facade = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                length = int(self.headers.get("Content-Length", 0))
                data = self.rfile.read(length)
                parts = urlsplit(self.path)
                facade.asked.append(
                    {
                        "method": self.command,
                        "path": parts.path,
                        "query": parse_qs(parts.query),
                        "body": json.loads(data) if data else None,
                        "headers": dict(self.headers),
                    }
                )
                if parts.path in facade.at_once:
                    self.reply(json.dumps(facade.at_once[parts.path]).encode())
                    return
                facade.delay.wait(SILENT_S)
                self.reply(facade.reply)

            def reply(self, data: bytes) -> None:
                self.send_response(facade.status)
                for key, value in facade.headers.items():
                    self.send_header(key, value)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                with contextlib.suppress(BrokenPipeError):  # a caller that was interrupted
                    self.wfile.write(data)

            do_GET = do_POST = answer

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,))
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def answers(self, reply: Any, status: int = 200) -> None:
        self.reply, self.status = json.dumps(reply).encode(), status

    def close(self) -> None:
        self.delay.set()
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def facade(monkeypatch: pytest.MonkeyPatch) -> Iterator[Facade]:
    for setting in SETTINGS.values():
        monkeypatch.delenv(setting.variable, raising=False)
    facade = Facade()
    monkeypatch.setenv("RL_PLANE_URL", facade.url)
    yield facade
    facade.close()
