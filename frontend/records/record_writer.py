"""Writes rollout records on a thread of its own, into files that are bounded in size and number. Generation never waits
for it: what does not fit into the queue is dropped and counted."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from frontend.completions.rollout_record import RolloutRecord
from frontend.server.replies import to_json
from rl_plane._util.limited_log import LimitedLog
from rl_plane.errors import InvalidRequest

log = logging.getLogger("frontend.records.record_writer")

FILE_BYTES = 64 << 20
"""A file is closed above this size. An editor still opens it, and half a million tokens with logprobs fit."""
MAX_QUEUED_TOKENS = 1 << 21
"""Tokens that may wait for the thread: about 200 MB with logprobs. A disk that is as slow drops records."""
RETRY_S = 30.0
"""The pause after an error of the disk. An operator needs longer to make room."""
CLOSE_S = 5.0
"""The time in which the queue is written at the end of the frontend."""
PATTERN = "rollouts-*.jsonl"


class RecordWriter:
    """Owns the folder from `start` to `close`.

    Raises:
        InvalidRequest: by `start`, if the folder can't be written, or another frontend records there.
    """

    def __init__(
        self,
        folder: Path,
        files: int,
        *,
        file_bytes: int = FILE_BYTES,
        queued_tokens: int = MAX_QUEUED_TOKENS,
        retry_s: float = RETRY_S,
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        """`clock`: the time that names the files, in nanoseconds."""
        self.counts = {"written": 0, "dropped": 0, "failed": 0}
        """Records by what became of them. `dropped`: the queue was full. `failed`: the disk refused them."""
        self._folder = folder
        self._files = files
        self._file_bytes = file_bytes
        self._queued_tokens = queued_tokens
        self._retry_s = retry_s
        self._clock = clock
        self._queue: queue.SimpleQueue[RolloutRecord | None] = queue.SimpleQueue()
        self._queued = self._taken = 0
        """Tokens that were queued, and that the thread has taken. Each side writes one of the two."""
        self._dropping = LimitedLog(log)
        self._closed = False
        self._file: BinaryIO | None = None
        self._path = folder
        """The path of the open file."""
        self._size = 0
        self._confirmed = False
        """The disk has confirmed a record of the open file."""
        self._buffered = 0
        """Records that the disk has not confirmed yet."""
        self._failed_at: float | None = None
        """Monotonic seconds of the last error of the disk. None: the last write went well."""
        self._lock = -1
        self._thread = threading.Thread(target=self._run, name="rollout records", daemon=True)

    def start(self) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = os.open(self._folder / ".lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise InvalidRequest(
                f"another frontend records in {self._folder}", field="record", fix="give each a folder of its own"
            ) from None
        except OSError as error:
            raise InvalidRequest(
                f"can't record in {self._folder}: {error.strerror}",
                field="record",
                fix="give a folder to write in",
            ) from error
        size = self._files * self._file_bytes >> 20
        log.info("completions are recorded in %s: %d files, %d MiB at most", self._folder, self._files, size)
        self._thread.start()

    def put(self, record: RolloutRecord) -> None:
        """Queues a record, or drops it. Returns at once. Only one thread may call it."""
        tokens = record.tokens
        if self._closed or self._queued - self._taken + tokens > self._queued_tokens:
            self.counts["dropped"] += 1
            self._dropping.warning("a rollout record was dropped: %s takes them too slowly", self._folder)
            return
        self._queued += tokens
        self._queue.put(record)

    def close(self) -> None:
        """Writes what is queued, for at most CLOSE_S. It blocks."""
        self._closed = True
        self._queue.put(None)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            log.warning("%s did not take all rollout records within %g s", self._folder, CLOSE_S)
            return  # the thread still has the files
        os.close(self._lock)

    # ---- the thread ----

    def _run(self) -> None:
        while (record := self._queue.get()) is not None:
            self._taken += record.tokens
            self._take(record)
        try:
            self._flush()
        except OSError as error:
            self._on_error(error)
        self._close_file()

    def _take(self, record: RolloutRecord) -> None:
        if self._failed_at is not None and time.monotonic() < self._failed_at + self._retry_s:
            self.counts["failed"] += 1
            return
        try:
            line = to_json(record.to_wire()) + b"\n"
            self._write(line)
        except OSError as error:
            self._on_error(error)
        except Exception:
            self.counts["failed"] += 1
            log.exception("a rollout record could not be written")  # the thread must continue

    def _write(self, line: bytes) -> None:
        self._buffered += 1
        if self._file is None:
            name = self._folder / f"rollouts-{self._clock() // 1_000_000:013d}.jsonl"
            flags = os.O_CREAT | os.O_APPEND | os.O_WRONLY | os.O_CLOEXEC
            self._file, self._path = os.fdopen(os.open(name, flags, 0o600), "ab"), name
            self._size = 0
            self._confirmed = os.fstat(self._file.fileno()).st_size > 0  # a file of the same millisecond
        self._size += len(line)
        self._file.write(line)
        is_full = self._size >= self._file_bytes
        if is_full or self._queue.empty():
            self._flush()
        if is_full:
            self._close_file()

    def _flush(self) -> None:
        if self._file is None:
            return
        self._file.flush()
        if not self._confirmed:
            self._confirmed = True
            self._make_room()
        self.counts["written"] += self._buffered
        if self._buffered and self._failed_at is not None:
            self._failed_at = None
            log.info("rollout records are written again: %d were lost", self.counts["failed"])
        self._buffered = 0

    def _make_room(self) -> None:
        """Deletes the oldest files, also those of earlier frontends. Only a file that has a record may replace them.

        The file that is written stays. By its name it is not the newest if the clock was set back."""
        found = [one for one in sorted(self._folder.glob(PATTERN)) if one != self._path]
        for old in found[: max(0, len(found) + 1 - self._files)]:
            old.unlink(missing_ok=True)

    def _on_error(self, error: OSError) -> None:
        self.counts["failed"] += self._buffered
        self._buffered = 0
        if self._failed_at is None:
            log.warning(
                "rollout records are lost: %s: %s; fix: make room there. The frontend tries again every %g s, and "
                "generation continues",
                self._folder,
                error.strerror or error,
                self._retry_s,
            )
        self._failed_at = time.monotonic()
        refused = self._file is not None and not self._confirmed
        self._close_file()  # its last line may be cut off, so the next record begins another file
        if refused:
            with contextlib.suppress(OSError):
                self._path.unlink()

    def _close_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError:
                pass  # the disk is full still; the descriptor is closed all the same
