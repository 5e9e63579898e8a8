"""A check of the checker: each guard of the protocol can be switched off here, and the simulation must notice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock


async def _nothing(*args: Any, **more: Any) -> None:
    return None


def _accepts(*args: Any, **more: Any) -> None:
    return None


def _yes(*args: Any, **more: Any) -> bool:
    return True


async def _live(*args: Any, **more: Any) -> bool:
    return True


async def _unguarded_put(self: Any, key: str, value: bytes) -> int:
    return int(await self._bus.put(self._bucket, key, value))


# digest: a worker is admitted only with the committed one. decision: a version is committed only by its record.
# fence: the record is written only under the lock, by its newest holder. gate: closed workers and those without a
# serving lease take no requests, and tokens of other versions than the committed ones are not delivered.
GUARDS: dict[str, dict[str, Any]] = {
    "digest": {"worker.state.WorkerState.holds": _yes},
    "decision": {},
    "fence": {
        "rl_plane.lock.HeldLock.put": _unguarded_put,
        "rl_plane.lock._acquire": None,  # see `without`
    },
    "gate": {
        "worker.state.WorkerState.check_admitted": _accepts,
        "worker.state.WorkerState.check_lease": _accepts,
        "frontend.fleet_status.WorkerStatus.open": True,
        "frontend.committed.History.check": _accepts,
    },
}


async def _acquire_at_once(bus: Any, bucket: Any, mine: Any, *bounds: Any) -> Any:
    """No lock at all: everybody holds it."""
    from rl_plane.lock import HeldLock, fence_of
    from rl_plane.subjects import LOCK

    fence, _ = fence_of(await bus.get(bucket, LOCK))
    return HeldLock(bus, bucket, mine, fence, False)


@contextmanager
def without(guard: str) -> Iterator[None]:
    with ExitStack() as stack:
        for target, stand_in in GUARDS[guard].items():
            stack.enter_context(mock.patch(target, stand_in or _acquire_at_once))
        if guard == "fence":
            stack.enter_context(mock.patch("worker.lock_watch.LockWatch.is_live", _live))
            stack.enter_context(mock.patch("rl_plane.lock.HeldLock.renew", _nothing))
            stack.enter_context(mock.patch("rl_plane.lock.HeldLock.release", _nothing))
        yield
