"""The past of a worker or an update, from the frontend's events and the history. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rl_plane.cli.explain.known_facts import KnownFacts, Row
from rl_plane.cli.follow_events import event_words
from rl_plane.cli.output import clock, one_line

MAX_LINES = 40
"""The newest lines that are shown: what fits on a screen."""

Line = tuple[float, str]
"""Unix seconds, and what happened."""


def shown(lines: list[Line]) -> list[str]:
    """The newest lines, oldest first, each once."""
    ordered = sorted(dict.fromkeys(lines))
    left_out = len(ordered) - MAX_LINES
    head = [f"… {left_out} earlier lines: rl-plane events --since 1h"] if left_out > 0 else []
    return head + [one_line(f"{clock(at)} {words}") for at, words in ordered[-MAX_LINES:]]


def of_worker(facts: KnownFacts, instance_id: str) -> list[Line]:
    """The past of one worker: its events, its departures, and the updates that it did not follow."""
    lines = [
        (float(data["at"]), event_words(kind, data))
        for kind, data in facts.events
        if data.get("instance_id") == instance_id
    ]
    lines += [
        (float(one["left_at"]), f"it left: {one['why']}")
        for one in facts.left
        if one["instance_id"] == instance_id
    ]
    for entry in facts.updates:
        row = (entry.get("workers") or {}).get(instance_id)
        at = entry.get("ended_at") or entry.get("began_at")
        if at is None or row is None:
            continue
        name = f"update {entry['update_id']} ({entry['label']})"
        if row.get("status") != "ok":
            error = row.get("error") or {}
            lines.append((float(at), f"it failed in {name}: {error.get('code')}: {error.get('message')}"))
        elif instance_id in (entry.get("excluded") or ()):
            lines.append((float(at), f"{name} continued without it"))
    return lines


def of_update(facts: KnownFacts, update_id: str, entry: Row | None) -> list[Line]:
    """The past of one update: its events, its phases, and each worker that failed."""
    lines = [
        (float(data["at"]), event_words(kind, data))
        for kind, data in facts.events
        if kind == "update" and data.get("update_id") == update_id and data["change"] != "progress"
    ]
    if entry is None:
        return lines
    began = entry.get("began_at")
    if began is not None:
        if not any(data.get("change") == "began" for _, data in _events_of(facts, update_id)):
            lines.append((float(began), f"it began, asked by {entry.get('caller') or entry.get('who')}"))
        lines += _phases(float(began), entry.get("phases") or {})
    ended = entry.get("ended_at")
    if ended is not None:
        lines += [(float(ended), f"worker {key}: {_error(row)}") for key, row in _failed(entry)]
        if not any(data.get("change") in ("finished", "aborted") for _, data in _events_of(facts, update_id)):
            lines.append((float(ended), f"it ended: {entry['outcome']}"))
    return lines


def _events_of(facts: KnownFacts, update_id: str) -> Iterator[tuple[str, Row]]:
    return ((kind, data) for kind, data in facts.events if data.get("update_id") == update_id)


def _phases(began: float, phases: Mapping[str, Any]) -> Iterator[Line]:
    """One line for each phase that took a while, at its end."""
    at = began
    for name, spent in phases.items():
        at += float(spent)
        if name != "other_s" and float(spent) >= 0.1:
            yield at, f"the phase {name.removesuffix('_s')} took {float(spent):.1f} s"


def _failed(entry: Row) -> Iterator[tuple[str, Row]]:
    return ((key, row) for key, row in (entry.get("workers") or {}).items() if row.get("status") != "ok")


def _error(row: Row) -> str:
    error = row.get("error") or {}
    fix = f"; fix: {error['fix']}" if error.get("fix") else ""
    return f"{error.get('code')}: {error.get('message')}{fix}"
