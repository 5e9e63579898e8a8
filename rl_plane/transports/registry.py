"""Finds the senders that are installed, and orders the senders that `auto` may take."""

from __future__ import annotations

import platform
from collections.abc import Collection, Mapping, Sequence
from importlib.metadata import EntryPoint
from typing import Any

from rl_plane._util.plugins import SENDERS, plugins
from rl_plane.errors import InvalidRequest, NoWorkers, PlaneError, Unsupported
from rl_plane.protocol.transport_traits import known_transports, traits_of
from rl_plane.transports.base import Sender, SenderContext, colocated

AUTO = "auto"


def installed() -> Mapping[str, EntryPoint]:
    """Backend to entry point. Nothing is imported before a backend is chosen."""
    return plugins(SENDERS)


def candidates(
    transport: str,
    workers: Sequence[Mapping[str, Any]],
    senders: Collection[str],
    *,
    with_root: bool,
    trainer_stays: bool = True,
    host: str | None = None,
) -> list[str]:
    """The backends that this trainer and all of these workers have, best first.

    Args:
        transport: the name of a backend, or `auto`.
        workers: rows of the op `workers`.
        senders: the backends that are installed here.
        with_root: the trainer has named a shared directory.
        trainer_stays: workers can heal from the trainer after a commit.
        host: this machine's name; None asks the system.

    Raises:
        NoWorkers: `workers` is empty.
        InvalidRequest: no such sender is installed.
        Unsupported: some worker lacks the transport, or no transport is common to all.
    """
    if not workers:
        raise NoWorkers("there is no worker to send to", field="workers", fix="start one: `rl-plane worker`")
    if transport != AUTO:
        if transport not in senders:
            raise InvalidRequest(
                f"there is no sender {transport!r}",
                field="transport",
                fix=f"use one of {', '.join(sorted(senders))}",
            )
        lacking = [str(worker["instance_id"]) for worker in workers if transport not in worker["transports"]]
        if lacking:
            shared = ", ".join(_common(workers, senders)) or "none"
            raise Unsupported(
                f"no {transport} transport on {', '.join(lacking)}",
                field="transport",
                fix=f"install it there, or use a transport that all have: {shared}",
            )
        return [transport]
    here = colocated(workers, host or platform.node())
    common = _common(workers, senders)
    found = [
        name
        for name, traits in known_transports().items()
        if name in common
        and traits.auto
        and (here or not traits.one_host)
        and (with_root or not traits.needs_root)
    ]
    if not trainer_stays:
        found.sort(key=lambda name: not traits_of(name).lasting)
    if found:
        return found
    raise Unsupported(
        f"no transport is usable: of this trainer's ({', '.join(sorted(senders))}) the workers have "
        f"{', '.join(common) or 'none'}",
        field="transport",
        fix="for filesystem, name a directory beneath the workers' weight roots: root=DIR (--root DIR)",
    )


def _common(workers: Sequence[Mapping[str, Any]], senders: Collection[str]) -> list[str]:
    return sorted(name for name in senders if all(name in worker["transports"] for worker in workers))


def is_passed_over(error: PlaneError) -> bool:
    """True if another transport may work although this one failed: it lacks a package, or an option is wrong for it."""
    return isinstance(error, Unsupported) or str(error.facts.get("field")).startswith("options.")


def none_can_be_made(refused: Mapping[str, PlaneError]) -> PlaneError:
    """The error if every candidate was passed over. `refused`: each with its own error."""
    if len(refused) == 1:
        return next(iter(refused.values()))
    reasons = (f"{name}: {error.message} ({error.facts.get('fix')})" for name, error in refused.items())
    return Unsupported(
        f"no transport of the workers can be used here: {'; '.join(reasons)}",
        field="transport",
        fix="follow the fix of one of them",
    )


def make_sender(backend: str, context: SenderContext) -> Sender:
    """Makes the sender of an installed backend."""
    sender: Sender = installed()[backend].load()(context)
    return sender
