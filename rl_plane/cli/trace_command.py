"""`rl-plane trace`: past updates as a file that a trace viewer opens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from rl_plane.cli.output import BadSetting, say, say_json
from rl_plane.cli.settings import Command, command
from rl_plane.cli.steer import REACH, ask, body_of
from rl_plane.cli.trace_events import trace_of
from rl_plane.errors import NotFound

VIEWER = "https://ui.perfetto.dev"


def commands() -> list[click.Command]:
    doc = f"""Write past updates and their phases to a file for a trace viewer, such as {VIEWER}.

    UPDATE is an update's id, the beginning of one, or a label. Without it the file has the newest updates, as many as
    --limit says."""
    update = click.Argument(["update"], required=False, metavar="UPDATE")
    settings = ("trace_file", "limit", "components", *REACH)
    return [command("trace", doc, run_trace, settings, update)]


def run_trace(given: Command) -> int:
    """Writes the file, and says what is in it."""
    path: Path = given.values["trace_file"]
    reply = ask("updates", *body_of("updates", given), given)
    heads = reply.get("components") or {"rl_plane": reply}
    chosen = {name: _chosen(head["updates"], given.values["update"]) for name, head in heads.items()}
    found = {name: entries for name, entries in chosen.items() if entries}
    if not found:
        raise NotFound(
            f"none of the newest {given.values['limit']} updates is {given.values['update']!r}"
            if given.values["update"]
            else "there was no update yet",
            fix="take an id or a label from `rl-plane updates`, or give a larger --limit",
        )
    try:
        path.write_text(json.dumps(trace_of(found)))
    except OSError as error:
        raise BadSetting(
            f"{path} can't be written: {error.strerror}", field="--output", fix="give another file"
        ) from error
    labels = [entry["label"] for entries in found.values() for entry in reversed(entries)]
    if given.values["json"]:
        say_json({"file": str(path), "updates": labels})
    else:
        say(f"{path} has the updates {', '.join(labels)}: open it at {VIEWER}")
    return 0


def _chosen(entries: Sequence[Mapping[str, Any]], given: str | None) -> Sequence[Mapping[str, Any]]:
    """The update that is meant; all if none is named."""
    if given is None:
        return [entry for entry in entries if "began_at" in entry]
    exact = [entry for entry in entries if given in (entry["update_id"], entry["label"])]
    return exact[:1] or [entry for entry in entries if entry["update_id"].startswith(given)]
