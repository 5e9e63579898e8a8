"""An HTTP server that answers the dashboard's calls as the frontend of a large fleet would. There are no workers."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from typing import Any

from frontend.dashboard import FILES, HEADERS

EVENT_EVERY_S = 0.02


def _version(sequence: int) -> dict[str, Any]:
    return {"run": "a-run", "sequence": sequence, "label": f"step_{sequence}", "digest": f"xxh3:{sequence}"}


def _worker(number: int, turn: int) -> dict[str, Any]:
    """Each seventh worker is closed, others each time; all loads change."""
    is_open = (number + turn) % 7 != 0
    return {
        "instance_id": f"{number:016x}",
        "incarnation": "1",
        "status": "ok",
        "ready": is_open,
        "in_state_s": turn,
        "pause": {"paused": False},
        "admission": {"open": is_open, "reasons": [] if is_open else ["behind: the source does not answer"]},
        "version": _version(7 if is_open else 6),
        "sequence": 7 if is_open else 6,
        "update": {
            "update_id": "the-id",
            "bytes": min(1000, turn * 10 + number),
            "total_bytes": 1000,
            "bytes_per_s": 10.0,
            "since_progress_s": 0.1,
            "waits_for": "the trainer's bytes",
        },
        "running": (number + turn) % 5,
        "waiting": 0,
        "tokens_made": turn * 100,
        "requests_ended": turn,
    }


def large_state(count: int, turn: int) -> dict[str, Any]:
    """The state of a fleet of `count` workers. Each `turn` changes every worker."""
    workers = [_worker(number, turn) for number in range(count)]
    return {
        "epoch": 1,
        "expected": count,
        "left": [],
        "starting": [],
        "pause_state": "running",
        "version": _version(7),
        "sequence": 7,
        "adapters": {},
        "update": {
            "update_id": "the-id",
            "label": "step_8",
            "phase": "prepare",
            "caller": "train.py@gpu3:4711",
            "asked_by": "",
            "who": "frontend@head:812",
            "transport": "gloo",
            "elapsed_s": float(turn),
            "in_phase_s": float(turn),
            "deadline_in_s": 300.0,
            "idle_limit_s": None,
            "waits_for": "the trainer's bytes",
            "bytes": sum(row["update"]["bytes"] for row in workers),
            "total_bytes": 1000 * count,
            "bytes_per_s": 1e4,
        },
        "workers": workers,
    }


def _updates(count: int) -> list[dict[str, Any]]:
    phases = {"wait_s": 0.1, "prepare_s": 2.0, "gate_s": 0.2, "commit_s": 0.5, "open_s": 0.1, "other_s": 0.1}
    workers = {f"{number:016x}": {"status": "ok"} for number in range(count)}
    return [
        {
            "update_id": f"update-{sequence}",
            "label": f"step_{sequence}",
            "outcome": "committed",
            "began_at": 1.0,
            "ended_at": 4.0,
            "who": "trainer",
            "version": _version(sequence),
            "phases": phases,
            "workers": workers,
            "canary": {"difference": 1e-6, "failed": 0, "tolerance": 0.01},
        }
        for sequence in range(7, 0, -1)
    ]


@contextmanager
def large_fleet(count: int) -> Iterator[str]:
    """Serves such a fleet until the block ends. Yields the server's URL. Each look at the state sees all workers
    changed."""
    updates, stop = json.dumps({"updates": _updates(count)}).encode(), threading.Event()
    turns = iter(range(1, 1_000_000))
    answers: dict[str, Callable[[], bytes]] = {
        "/v1/rl/state": lambda: json.dumps(large_state(count, next(turns))).encode(),
        "/v1/rl/updates": lambda: updates,
        "/v1/rl/workers": lambda: json.dumps({"epoch": 1, "workers": []}).encode(),
        "/v1/rl/about": lambda: json.dumps({"component": "policy", "components": {"policy": {}}}).encode(),
        "/metrics": lambda: b"",
    }

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *arguments: object) -> None:
            """Logs nothing."""

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path == "/v1/rl/events":
                self._stream()
                return
            if path in FILES:
                name, media_type = FILES[path]
                self._answer(resources.files("frontend.dashboard").joinpath(name).read_bytes(), media_type)
            else:
                self._answer(answers[path](), "application/json")

        def _answer(self, body: bytes, media_type: str) -> None:
            self.send_response(200)
            for name, value in {**HEADERS, "Content-Type": media_type, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def _stream(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            number = 0
            while not stop.wait(EVENT_EVERY_S):
                number += 1
                data = {"instance_id": f"{number % count:016x}", "open": True, "paused": False, "at": number}
                try:
                    self.wfile.write(f"id: {number}\nevent: admission\ndata: {json.dumps(data)}\n\n".encode())
                except OSError:
                    return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        stop.set()
        server.shutdown()
        thread.join()
        server.server_close()
