"""`rl-plane events`: what has happened to the fleet, and what happens now, one line for each event."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

import click

from rl_plane.cli.output import clock, note, one_line, say, say_json
from rl_plane.cli.settings import Command, command, only_component
from rl_plane.errors import DeadlineExceeded, Unavailable
from rl_plane.fleet.http_client import read_events

AGAIN_S = 1.0
"""Seconds until a reader connects again after its stream has ended."""


def commands() -> list[click.Command]:
    doc = """Show what has happened to the fleet: updates, workers, changes by operators.

    A frontend keeps the newest 4,096 events of the last hour, also those of the frontends before it. The command ends
    after them. With --follow it waits for more events until Ctrl-C, and connects again when the frontend restarts."""
    return [command("events", doc, run_events, ("since_s", "follow", "components", "url", "admin_key", "json"))]


def run_events(given: Command) -> int:
    values = given.values
    for number, kind, data in _events(values):
        if values["json"]:
            say_json({"id": number, "event": kind, **data})
        else:
            say(event_line(kind, data))
        sys.stdout.flush()
    return 0


def _events(values: Mapping[str, Any]) -> Iterator[tuple[int | None, str, dict[str, Any]]]:
    since_s, last, follow = values["since_s"], None, values["follow"]
    component = only_component(values)
    connected = False
    while True:
        try:
            for number, kind, data in read_events(
                values["url"], values["admin_key"], since_s, last, follow, component
            ):
                connected, last = True, number if number is not None else last
                yield number, kind, data
        except (Unavailable, DeadlineExceeded) as error:
            if not connected:
                raise
            note(f"rl-plane: {one_line(error.message)}; connecting again")
        if not follow:
            return
        time.sleep(AGAIN_S)


def event_line(kind: str, data: Mapping[str, Any]) -> str:
    """One event in words."""
    at = data.get("at")
    return one_line(f"{clock(at) if at is not None else '--:--:--'} {event_words(kind, data)}")


def event_words(kind: str, data: Mapping[str, Any]) -> str:
    """One event in words, without its time."""
    if kind == "member":
        return f"worker {data['instance_id']} {data['change']}"
    if kind == "op":
        return f"{data['op']} by {data['asked_by'] or data.get('caller') or data['who']}: {data['outcome']}"
    if kind == "admission":
        version = f"version {data['version']['label']}" if data.get("version") else "no version"
        state = "open" if data["open"] else f"closed: {', '.join(data['reasons'])}"
        return f"worker {data['instance_id']} {state}; {'paused, ' if data['paused'] else ''}{version}"
    if kind == "update":
        return f"update {data['update_id']} ({data['label']}) {_update_words(data)}"
    return f"{kind}: {data.get('fix') or data.get('reason') or ''}"


def _update_words(data: Mapping[str, Any]) -> str:
    change = str(data["change"])
    if change == "progress":
        total = data["total_bytes"]
        share = f"{data['bytes'] / total:.0%}, " if total else ""
        return f"{data['phase']}, {share}{data['elapsed_s']:.0f} s: waits for {data['waits_for']}"
    if change == "began":
        return f"began, asked by {data.get('caller') or data['who']}"
    if error := data.get("error"):
        change += f": {error['code']}: {error['message']}"
    spent = ", ".join(f"{name.removesuffix('_s')} {s:.1f} s" for name, s in (data.get("phases") or {}).items())
    return change + (f" ({spent})" if spent and change == "finished" else "")
