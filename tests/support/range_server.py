"""A file server with range requests, on loopback, that misbehaves as a test says.

In this process: `RangeServer(directory)`. As a process of its own, which can be killed:
`python -m tests.support.range_server DIRECTORY HOLD_AFTER` prints its port, and holds each answer after so many bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import select
import subprocess
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

START_S = 30.0
HELD_S = 60.0
"""The longest time for which a held answer waits for the test."""


@dataclass
class Asked:
    """One request that came."""

    path: str
    query: str
    range: str | None
    headers: dict[str, str]


@dataclass
class Behaviour:
    """The faults of the server. A test may change them at any time."""

    ranges: bool = True
    validators: bool = True
    weak: bool = False
    coding: str | None = None
    content_range: str | None = None
    """Replaces the header of each answer."""
    key: str | None = None
    """The query that each URL must have, as a signature."""
    cut_after: deque[int] = field(default_factory=deque)
    """The body of each next answer ends after so many bytes, and the connection with it."""
    statuses: defaultdict[str, deque[int]] = field(default_factory=lambda: defaultdict(deque))
    """The next answers for a file."""
    retry_after: str = "0"
    redirects: dict[str, str] = field(default_factory=dict)
    """A file's name, or `*`, to the URL of its redirect. `{name}` is the file's."""
    before: dict[str, Callable[[], object]] = field(default_factory=dict)
    """A file's name → what happens before its next answer, once."""
    drip: bool = False
    """Sends one byte at a time."""
    hold_after: int | None = None
    """Each answer waits after so many bytes, until `go`."""
    go: threading.Event = field(default_factory=threading.Event)
    held: threading.Event = field(default_factory=threading.Event)
    asked: list[Asked] = field(default_factory=list)

    def files_asked(self) -> list[str]:
        return [one.path.rpartition("/")[2] for one in self.asked]


class RangeServer:
    """Serves a directory on a free port of loopback."""

    def __init__(self, directory: Path, behaviour: Behaviour | None = None, tls: Any = None) -> None:
        self.behaviour = plan = behaviour or Behaviour()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = HELD_S

            def do_GET(self) -> None:
                parts = urlsplit(self.path)
                name = parts.path.rpartition("/")[2]
                asked = Asked(parts.path, parts.query, self.headers.get("Range"), dict(self.headers.items()))
                plan.asked.append(asked)
                if (happens := plan.before.pop(name, None)) is not None:
                    happens()
                with contextlib.suppress(OSError):
                    self._answer(name, directory / unquote(parts.path).lstrip("/"), parts.query)

            def _answer(self, name: str, path: Path, query: str) -> None:
                location = plan.redirects.get(name, plan.redirects.get("*"))
                if plan.statuses[name]:
                    self._short(plan.statuses[name].popleft(), {"Retry-After": plan.retry_after})
                elif location is not None:
                    self._short(302, {"Location": location.format(name=name)})
                elif plan.key is not None and query != plan.key:
                    self._short(403, {})
                elif not path.is_file():
                    self._short(404, {})
                else:
                    self._file(path)

            def _short(self, status: int, headers: dict[str, str]) -> None:
                self.send_response(status)
                for key, value in headers.items():
                    self.send_header(key, value)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def _file(self, path: Path) -> None:
                data, status = path.read_bytes(), path.stat()
                etag = '"' + hashlib.sha256(data).hexdigest()[:16] + '"'
                etag = f"W/{etag}" if plan.weak else etag
                modified = self.date_time_string(int(status.st_mtime))
                match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or "")
                wanted = self.headers.get("If-Range")
                if wanted is not None and wanted not in (etag, modified):
                    match = None
                if match is None or not plan.ranges:
                    self.send_response(200)
                    body = data
                elif int(match[1]) >= len(data):
                    self.send_response(416)
                    body = b""
                else:
                    first, last = int(match[1]), min(int(match[2]), len(data) - 1)
                    self.send_response(206)
                    words = plan.content_range or f"bytes {first}-{last}/{len(data)}"
                    self.send_header("Content-Range", words)
                    body = data[first : last + 1]
                if plan.validators:
                    self.send_header("ETag", etag)
                    self.send_header("Last-Modified", modified)
                if plan.coding is not None:
                    self.send_header("Content-Encoding", plan.coding)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self._body(body)

            def _body(self, body: bytes) -> None:
                if plan.cut_after:
                    self.wfile.write(body[: plan.cut_after.popleft()])
                    self.close_connection = True
                elif plan.drip:
                    for at in range(len(body)):
                        self.wfile.write(body[at : at + 1])
                        if plan.go.wait(0.05):
                            break
                elif plan.hold_after is not None and len(body) > plan.hold_after:
                    self.wfile.write(body[: plan.hold_after])
                    self.wfile.flush()
                    plan.held.set()
                    plan.go.wait(HELD_S)
                    self.wfile.write(body[plan.hold_after :])
                else:
                    self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        scheme = "http" if tls is None else "https"
        self.port = self._server.server_address[1]
        self.url = f"{scheme}://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.behaviour.go.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> RangeServer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class ServerProcess:
    """A RangeServer in a process of its own."""

    def __init__(self, directory: Path, hold_after: int) -> None:
        command = [sys.executable, "-m", "tests.support.range_server", str(directory), str(hold_after)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        out = self._process.stdout
        assert out is not None
        assert select.select([out], [], [], START_S)[0], "the server did not start"
        self.url = f"http://127.0.0.1:{int(out.readline())}"
        self._out = out

    def wait_held(self) -> None:
        """Waits until an answer has stopped in the middle."""
        assert select.select([self._out], [], [], START_S)[0], "no answer has stopped"
        assert self._out.readline() == "held\n"

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        self.kill()
        self._out.close()


if __name__ == "__main__":
    server = RangeServer(Path(sys.argv[1]), Behaviour(hold_after=int(sys.argv[2])))
    print(server.port, flush=True)
    server.behaviour.held.wait()
    print("held", flush=True)
    while os.getppid() != 1:
        time.sleep(0.2)
