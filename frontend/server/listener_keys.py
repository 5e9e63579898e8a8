"""The keys of one listener, and who calls."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path

from rl_plane.errors import InvalidRequest, PlaneError
from rl_plane.protocol.http_keys import MAX_FILE_BYTES, Caller, hash_key, parse_keys_file

log = logging.getLogger("frontend.server.listener_keys")

RELOAD_S = 1.0
"""Seconds between two looks at the file. A key that was taken out works at most this long."""
ANYBODY = Caller("", "admin")
"""The caller on a listener without keys."""


class KeyFile:
    """The keys of a file, which both listeners read. A change is seen without a restart.

    Raises:
        InvalidRequest: at the start, the file is missing, others may write it, or an entry is wrong. Later, the keys
            before stay, and the log says why.
    """

    def __init__(self, path: Path, reload_s: float = RELOAD_S) -> None:
        self.path = path
        self._reload_s = reload_s
        self._keys: Mapping[str, Caller] = {}
        self._stamp: tuple[int, ...] = ()
        self._looked_at = 0.0
        self._read()

    def find(self, hashed: str) -> Caller | None:
        now = time.monotonic()
        if now - self._looked_at >= self._reload_s:
            self._looked_at = now
            try:
                self._read()
            except PlaneError as error:
                log.error("%s was not read again, and its former keys stay: %s", self.path, error.message)
        return self._keys.get(hashed)

    def _read(self) -> None:
        try:
            status = os.stat(self.path)
            # The ctime also changes with the mode and the owner, which mend a file that was refused.
            stamp = (status.st_ctime_ns, status.st_size, status.st_ino)
            if stamp == self._stamp:
                return
            self._stamp = stamp  # an error is logged once for each change
            if status.st_mode & 0o022:
                raise InvalidRequest(
                    f"others may write {self.path}", field="keys_file", fix=f"chmod 600 {self.path}"
                )
            if status.st_size > MAX_FILE_BYTES:
                raise InvalidRequest(
                    f"{self.path} has {status.st_size} bytes", field="keys_file", fix=f"at most {MAX_FILE_BYTES}"
                )
            data = self.path.read_bytes()
        except OSError as error:
            raise InvalidRequest(
                f"can't read {self.path}: {error.strerror}",
                field="keys_file",
                fix="make it with `rl-plane keys http-add`, and let this process read it",
            ) from error
        try:
            self._keys = parse_keys_file(data)
        except InvalidRequest as error:
            where = error.facts.get("field")
            raise InvalidRequest(
                f"{self.path}: {error.message}", field=f"keys_file: {where}", fix=error.facts.get("fix")
            ) from error


class Keys:
    """The keys that open one listener: its own key, and the keys of a file."""

    def __init__(self, own: tuple[str, Caller] | None = None, file: KeyFile | None = None) -> None:
        self._own = {} if own is None else {hash_key(own[0].encode()): own[1]}
        self._file = file

    def __bool__(self) -> bool:
        return bool(self._own) or self._file is not None

    def find(self, key: bytes) -> Caller | None:
        """The owner of a key. The hash of a guess says nothing about the hash of a key, so a plain lookup is safe."""
        hashed = hash_key(key)
        return self._own.get(hashed) or (self._file.find(hashed) if self._file is not None else None)
