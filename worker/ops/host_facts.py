"""Looks at the worker's machine for `describe`: memory, weight roots, clock, transports. It changes nothing."""

from __future__ import annotations

import asyncio
import os
import platform
import threading
import time
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from rl_plane._util.own_version import own_version
from rl_plane._util.tasks import on_daemon_thread
from rl_plane.errors import PlaneError
from rl_plane.protocol.worker_ops import HostReply, RootReply
from rl_plane.weights.rooted_files import check_beneath
from worker.receive.host_room import least_room
from worker.receive.lacking_transports import LACKING

LOOK_S = 0.6
"""Seconds for one look at the disks. The op answers within a second, and a network file system may hang for ever."""
MAX_ENTRIES = 10_000
"""The names that a listing's digest covers. A larger directory has none."""
MAX_ROOTS = 16
"""The configured roots that one reply lists."""
SHM = Path("/dev/shm")


class HostFacts:
    """Answers one look at a time, so that a file system which hangs takes one thread and no more."""

    def __init__(self, roots: Sequence[Path], nats: Callable[[], dict[str, Any]], look_s: float = LOOK_S) -> None:
        """`roots`: the configured weight roots. `nats`: what this worker's connection knows of the server."""
        self._roots = roots
        self._nats = nats
        self._look_s = look_s
        self._looking = threading.Lock()

    async def reply(self, asked: Sequence[str]) -> HostReply:
        """The facts. `asked`: directories to look at too, beneath a configured root."""
        paths = list(dict.fromkeys([*map(str, self._roots[:MAX_ROOTS]), *asked]))
        looked = await self._bounded(lambda: [look_at_root(path, self._roots) for path in paths])
        room, limit = least_room()
        shm = _free(SHM)
        return HostReply(
            version=own_version(),
            host=platform.node(),
            clock=time.time(),
            nats=self._nats(),
            free_memory_bytes=room,
            memory_limit=limit,
            shm_free_bytes=shm,
            lacking=dict(LACKING),
            roots=looked if looked is not None else [_hangs(path, self._look_s) for path in paths],
        )

    async def _bounded(self, look: Callable[[], list[RootReply]]) -> list[RootReply] | None:
        """The result of `look`, on a thread that the exit of the process does not wait for. None: it takes too long, or
        an earlier one still does."""
        if not self._looking.acquire(blocking=False):
            return None

        def work() -> list[RootReply]:
            try:
                return look()
            finally:
                self._looking.release()

        try:
            async with asyncio.timeout(self._look_s):
                return await on_daemon_thread(work, "look")
        except TimeoutError:
            return None


def look_at_root(path: str, roots: Sequence[Path]) -> RootReply:
    """A directory as this process sees it. It looks only beneath `roots`."""
    found = RootReply(path=path, error=None, device=None, inode=None, entries=None, digest=None, free_bytes=None)
    try:
        real = os.path.realpath(path)
        check_beneath(real, path, list(roots), "weight_roots")
        status = os.stat(real)
        found["device"], found["inode"] = status.st_dev, status.st_ino
        found["free_bytes"] = _free(Path(real))
        with os.scandir(real) as entries:
            names = sorted(entry.name for entry, _ in zip(entries, range(MAX_ENTRIES + 1), strict=False))
    except PlaneError as error:
        found["error"] = f"{error.message}: {error.facts.get('fix')}"
        return found
    except OSError as error:
        found["error"] = error.strerror or type(error).__name__
        return found
    except ValueError as error:  # a NUL or half a surrogate pair is in the path
        found["error"] = str(error)
        return found
    found["entries"] = len(names)
    if len(names) <= MAX_ENTRIES:
        found["digest"] = blake2b("\0".join(names).encode(errors="surrogateescape"), digest_size=8).hexdigest()
    return found


def _hangs(path: str, look_s: float) -> RootReply:
    why = f"the file system does not answer within {look_s:g} s"
    return RootReply(path=path, error=why, device=None, inode=None, entries=None, digest=None, free_bytes=None)


def _free(path: Path) -> int | None:
    """The bytes that this user may still write there. None: there is no such place."""
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize
