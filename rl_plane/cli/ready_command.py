"""`rl-plane ready`: whether the fleet is ready, and what is missing."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

import click

from rl_plane.cli.explain.finding import Finding
from rl_plane.cli.explain.findings import findings
from rl_plane.cli.explain.read_facts import read_facts
from rl_plane.cli.output import counted, fix_of, note, one_line, say, say_json
from rl_plane.cli.settings import Command, command
from rl_plane.cli.steer import REACH, ask, over_nats
from rl_plane.cli.wait_display import NOTE_EVERY_S
from rl_plane.errors import DeadlineExceeded, NotFound, PlaneError, Unavailable

ASK_S = 8.0
"""Seconds for one question, beside the wait that it asks for."""
WAIT_S = NOTE_EVERY_S / 2
"""The longest wait of one question. After it the command says what is still missing, also if the frontend is frozen. No
question takes so long that `wait_display` has something to say."""
AGAIN_S = 0.5
"""Seconds until a frontend, or NATS, that does not answer is tried again."""
KINDS = ("nats", "fleet", "worker")
"""The kinds of findings that keep a fleet from being ready."""


def commands() -> list[click.Command]:
    doc = """Say whether the fleet is ready: exit 0, else 1, with one line for each thing that is missing.

    It is ready while each engine answers and enough workers serve the committed version: --expect of them, else as many
    as the frontend expects, and at least one."""
    return [command("ready", doc, run_ready, ("wait_s", "expect_ready", "components", *REACH))]


def run_ready(given: Command) -> int:
    values = given.values
    body: dict[str, Any] = {"wait_s": 0.0}  # the first answer says at once what is missing
    if values["components"]:
        body["component"] = list(values["components"])
    if values["expect_ready"] is not None:
        body["min_workers"] = values["expect_ready"]
    start = time.monotonic()
    give_up = start + values["wait_s"]
    told = ""
    while True:
        try:
            reply = ask("ready", body, (values["timeout_s"] or ASK_S) + body["wait_s"], given)
        except (Unavailable, DeadlineExceeded, NotFound) as error:
            if isinstance(error, NotFound) and not over_nats(given):
                raise  # the frontend serves no such component, or the address is no frontend's
            left_s = give_up - time.monotonic()
            if left_s <= 0:
                return _not_ready(given, error)
            if error.message != told:
                told = error.message
                note(f"rl-plane: not ready yet: {one_line(told)}")
            time.sleep(min(left_s, AGAIN_S))
            body["wait_s"] = min(max(0.0, give_up - time.monotonic()), WAIT_S)
        else:
            return _ready(reply, time.monotonic() - start, values["json"])


def _ready(reply: dict[str, Any], waited_s: float, as_json: bool) -> int:
    rows = [row for row in reply["workers"] if row.get("status") == "ok" and row.get("ready")]
    if as_json:
        say_json({"ready": True, "serving": len(rows), "waited_s": waited_s, "reasons": []})
        return 0
    labels = sorted({str(row["version"]["label"]) for row in rows if row.get("version")})
    say(one_line(f"ready: {counted(len(rows))} serve {', '.join(labels) or 'no version'}"))
    return 0


def _not_ready(given: Command, error: PlaneError) -> int:
    reasons = _reasons(given, error)
    if given.values["json"]:
        say_json({"ready": False, "message": error.message, "reasons": [asdict(one) for one in reasons]})
    else:
        say(one_line(f"not ready: {error.message}"))
        for one in reasons:
            say(one_line(one.line()))
    return 1


def _reasons(given: Command, error: PlaneError) -> list[Finding]:
    """The things that are missing. The error itself, if the fleet can't be asked."""
    try:
        facts = read_facts(given, past=False, wanted=given.values["expect_ready"] or 0)
    except PlaneError as unread:
        asked = "fleet" if over_nats(given) else "frontend"
        return [Finding(asked, asked, f"can't be asked: {unread.message}", fix_of(unread))]
    found = [one for one in findings(facts) if one.kind in KINDS]
    return found or [Finding("fleet", "fleet", f"is not ready: {error.message}", fix_of(error, "state"))]
