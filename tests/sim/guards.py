"""A check of the checker: each guard of the protocol can be switched off here, and the simulation must notice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from rl_plane.bus.connection import WrongSequence
from rl_plane.bus.lock import HeldLock, fence_of
from rl_plane.bus.state_store import record_of
from rl_plane.commit.canary_rules import Verdict
from rl_plane.commit.steps import Written
from rl_plane.protocol.record import DesiredPause
from rl_plane.protocol.subjects import LOCK, RECORD


async def _nothing(*args: Any, **more: Any) -> None:
    return None


def _accepts(*args: Any, **more: Any) -> None:
    return None


def _yes(*args: Any, **more: Any) -> bool:
    return True


async def _live(*args: Any, **more: Any) -> bool:
    return True


async def _not_paused(*args: Any, **more: Any) -> DesiredPause:
    return DesiredPause(False)


async def _read_only(self: Any) -> None:
    await self.read_record()


def _first_change(self: Any) -> Any:
    changes = self._changes(self.record)
    return changes[0] if changes else None


def _no_changes(*args: Any, **more: Any) -> list[Any]:
    return []


def _undecided(record: Any) -> Any:
    """A step of the machine that yields nothing: the record is not written."""
    return Written(record, 1)
    yield


async def _unguarded_put(self: Any, key: str, value: bytes, ttl_s: int | None = None) -> int:
    return int(await self._bus.put(self._bucket, key, value, ttl_s=ttl_s))


async def _unguarded_write(self: Any, record: Any, last: int) -> Any:
    await self._bus.put(self._bucket, RECORD, record.encode())
    return record


async def _write_again(self: Any, record: Any) -> Any:
    """Refused, it is written over whatever was written meanwhile, if that says the same."""
    try:
        return await self._put(record, self._sequence)
    except WrongSequence:
        entry = await self._bus.get(self._bucket, RECORD)
        if record_of(entry) != self._mine:
            raise self._replaced() from None
        return await self._put(record, entry.sequence)


def _passes(*args: Any, **more: Any) -> Verdict:
    return Verdict(True, "nothing")


def _one_nonce() -> str:
    return ""


async def _acquire_at_once(bus: Any, bucket: Any, mine: Any, *bounds: Any) -> Any:
    """No lock at all: everybody holds it."""
    fence, _ = fence_of(await bus.get(bucket, LOCK))
    return HeldLock(bus, bucket, mine, fence)


GUARDS: dict[str, dict[str, Any]] = {
    # A worker is admitted only with the committed digest.
    "digest": {"worker.reconcile.worker_core.WorkerCore._changes": _no_changes},
    # A version is committed only by its record.
    "decision": {
        "rl_plane.commit.machine.decide": _undecided,
        "rl_plane.commit.sessions.decide": _undecided,
        "rl_plane.commit.commands.decide": _undecided,
    },
    # The record is written only under the lock, by its newest holder, and workers obey only this holder.
    "fence": {
        "rl_plane.bus.lock.HeldLock.put": _unguarded_put,
        "rl_plane.bus.lock.HeldLock.renew": _nothing,
        "rl_plane.bus.sealed_record.SealedRecord._put": _unguarded_write,
        "rl_plane.bus.lock.HeldLock.release": _nothing,
        "rl_plane.bus.lock._acquire": _acquire_at_once,
        "worker.reconcile.lock_watch.LockWatch.is_live": _live,
    },
    # A coordinator writes the record only in the place of what it has left itself.
    "seal": {"rl_plane.bus.sealed_record.SealedRecord.write": _write_again},
    # A worker bars a coordinator that is gone from the record before it drops what that one has staged.
    "bar": {"worker.reconcile.coordinator_watch.CoordinatorWatch._is_barred": _live},
    # A holder knows its own lock from any other's.
    "nonce": {"rl_plane.bus.lock._nonce": _one_nonce},
    # A worker serves weights only if its engine computes with them what it should.
    "canary": {"worker.reconcile.numerics.evaluate_worker": _passes},
    # Only a worker that computes with the committed weights counts as serving them.
    "answer": {"rl_plane.commit.rules.serves": _yes, "rl_plane.commit.coordinator.serves": _yes},
    # Closed workers and those without a serving lease take no requests, frontends without one route none, and tokens
    # of other versions than the committed ones are not delivered.
    "gate": {
        "worker.reconcile.worker_state.WorkerState.check_admitted": _accepts,
        "worker.reconcile.worker_state.WorkerState.check_lease": _accepts,
        "frontend.routing.fleet_status.WorkerStatus.open": True,
        "rl_plane.protocol.serving_lease.ServingLease.holds": _yes,
        "frontend.routing.span_check.SpanCheck.take": _accepts,
    },
    # A pinned update is of the fleet that it names.
    "epoch": {
        "rl_plane.membership.worker_calls.check_pin": _accepts,
        "rl_plane.fleet.fleet_call.check_pin": _accepts,
        "rl_plane.fleet.fleet.check_pin": _accepts,
    },
    # An op is done by the process that it names.
    "incarnation": {"worker.reconcile.worker_state.WorkerState.check_changing": _accepts},
}

FIXES: dict[str, dict[str, Any]] = {
    # What was once found wrong, and put right: docs/faults.md describes each.
    "serving-lease": {
        "worker.reconcile.worker_state.WorkerState.check_lease": _accepts,
        "rl_plane.protocol.serving_lease.ServingLease.holds": _yes,
    },
    "reconnect-grace": {"rl_plane.membership.view.RECONNECT_GRACE_S": 0.0},
    "raised-epoch": {"rl_plane.membership.view.MembershipView._raise_epoch": _nothing},
    "raised-fence": {"worker.reconcile.lock_watch.LockWatch._raise_fence": _nothing},
    "missed-pause": {"worker.reconcile.follower.read_pause": _not_paused},
    "checked-overwrite": {"worker.receive.weight_receiver.check_overwrite": _accepts},
    "fitting-first": {"worker.reconcile.worker_core.WorkerCore._missing": _first_change},
    "frontend-witness": {"rl_plane.membership.view.MembershipView.keep_record": _read_only},
    "own-record": {"worker.runtime.registration.Registration.keep": _nothing},
    "finisher": {"frontend.facade.update_recovery.UpdateRecovery._complete": _nothing},
}


@contextmanager
def without(guard: str) -> Iterator[None]:
    with ExitStack() as stack:
        for target, stand_in in {**GUARDS, **FIXES}[guard].items():
            stack.enter_context(mock.patch(target, stand_in))
        yield
