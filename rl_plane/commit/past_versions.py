"""Finds a committed version of the history, and the request that brings it back. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rl_plane.commit.history import UpdateEntry
from rl_plane.errors import Conflict, NotFound
from rl_plane.membership.core import Member
from rl_plane.protocol.record import VersionSource
from rl_plane.protocol.transport_traits import directory_transport
from rl_plane.protocol.versions import WeightVersion

SHOWN_VERSIONS = 20
"""The most versions that an error lists as targets of a roll-back. It lists at most as many model directories."""


def rollback_target(
    newest_first: Sequence[UpdateEntry], run: str, label: str | None, sequence: int | None
) -> UpdateEntry:
    """The committed version with this label or sequence. NotFound lists the versions that the history has."""
    known = [(entry, entry.version) for entry in newest_first if entry.outcome == "committed"]
    mine = [(entry, version) for entry, version in known if version is not None and version.run == run]
    unserved = [entry for entry, version in mine if entry.unserved and _is_named(version, label, sequence)]
    mine = [(entry, version) for entry, version in mine if not entry.unserved]
    found = [entry for entry, version in mine if _is_named(version, label, sequence)]
    if unserved and not found:
        raise Conflict(
            f"every worker failed the numeric canary of {unserved[0].label}, so no worker has ever served it",
            field="rollback",
            fix="publish it again with on_canary_failure=warn, or go back to another version",
        )
    there = [{"sequence": version.sequence, "label": version.label} for _, version in mine[:SHOWN_VERSIONS]]
    names = ", ".join(f"{one['sequence']} ({one['label']})" for one in there)
    if not found:
        what = f"sequence {sequence}" if sequence is not None else f"label {label!r}"
        raise NotFound(
            f"the history has no committed version with {what}",
            field="rollback",
            fix=f"it has {names}" if names else "nothing was committed yet",
            versions=there,
        )
    if len({entry.digest for entry in found}) > 1:
        raise NotFound(
            f"several versions with different weights have the label {label!r}",
            field="rollback.label",
            fix=f"name the sequence; there are {names}",
            versions=there,
        )
    return found[0]


def _is_named(version: WeightVersion, label: str | None, sequence: int | None) -> bool:
    return version.sequence == sequence if sequence is not None else version.label == label


def target_of(entry: UpdateEntry, loaded: Iterable[str]) -> dict[str, Any]:
    """The target of an update that brings this version back. `loaded`: the adapters that are loaded now."""
    if entry.target is None or entry.target["kind"] == "base":
        return {"kind": "base"}  # the adapters that are loaded now stay, also if the old update dropped others
    target = dict(entry.target)
    if target["op"] == "unload":
        raise Conflict(
            f"{entry.label} unloaded the adapter {target['name']!r}: there are no weights to go back to",
            field="rollback",
            fix="name a version that was loaded, or unload the adapter",
        )
    target["op"] = "swap" if target["name"] in loaded else "load"
    return target


def before_of(entry: UpdateEntry) -> VersionSource | None:
    """The source of the version that a delta or a partial version changed. None: the version was sent in full."""
    return VersionSource.from_wire(entry.before) if entry.before is not None else None


def source_of(entry: UpdateEntry, members: Iterable[Member]) -> dict[str, Any]:
    """Returns the transport that brings a committed version again. Raises Conflict if there is none."""
    label, before = entry.label, before_of(entry)
    if not entry.refetchable or (before is not None and not before.from_scratch):
        raise Conflict(
            f"the weights of {label} can't be fetched from their source again",
            field="rollback",
            fix="publish them again, and update by transport",
        )
    if entry.transport is not None:
        return dict(entry.transport)
    # Sequence 0 is each worker's own model. One transport brings it to all if all started from the same path.
    paths = sorted({str(member.info["model_path"]) for member in members})
    if len(paths) != 1:
        raise Conflict(
            f"the workers started from {len(paths)} model directories, so no one transport brings {label} to all",
            field="rollback",
            fix="update by transport, from a directory that all workers can read",
            paths=paths[:SHOWN_VERSIONS],
        )
    return directory_transport(paths[0])
