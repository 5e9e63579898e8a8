"""`rl-plane ready`: whether the fleet is ready, and what is missing."""

from __future__ import annotations

import queue
import threading
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
from rl_plane.errors import DeadlineExceeded, NotFound, PlaneError, Unavailable
from rl_plane.fleet.http_client import read_events
from rl_plane.protocol.fleet_ops import MAX_WAIT_S

ASK_S = 8.0
"""Seconds for one question."""
RECHECK_S = 5.0
"""The fleet is asked again after this time without an event: a worker's silence makes none."""
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
    ended = threading.Event()
    try:
        return _run_until(given, ended)
    finally:
        ended.set()


def _run_until(given: Command, ended: threading.Event) -> int:
    values = given.values
    body: dict[str, Any] = {"wait_s": 0.0}
    if values["components"]:
        body["component"] = list(values["components"])
    if values["expect_ready"] is not None:
        body["min_workers"] = values["expect_ready"]
    start = time.monotonic()
    give_up = start + values["wait_s"]
    happens = _events(given, ended) if values["wait_s"] and not over_nats(given) else None
    told = ""
    while True:
        left_s = max(0.0, give_up - time.monotonic())
        bound_s = values["timeout_s"] or ASK_S
        if left_s and over_nats(given):  # this process watches the fleet itself
            body["wait_s"] = min(left_s, MAX_WAIT_S)
            bound_s += body["wait_s"]
        try:
            reply = ask("ready", body, bound_s, given)
        except (Unavailable, DeadlineExceeded, NotFound) as error:
            if isinstance(error, NotFound) and not over_nats(given):
                raise  # the frontend serves no such component, or the address is no frontend's
            left_s = give_up - time.monotonic()
            if left_s <= 0:
                return _not_ready(given, error)
            if error.message != told:
                told = error.message
                note(f"rl-plane: not ready yet: {one_line(told)}")
            if happens is None:
                time.sleep(min(left_s, AGAIN_S))
            else:
                _wait(happens, min(left_s, RECHECK_S))
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


def _events(given: Command, ended: threading.Event) -> queue.Queue[None]:
    """Gets an item for each event of the components that are asked about, as a frontend streams them, until `ended`."""
    values = given.values
    happens: queue.Queue[None] = queue.Queue()

    def follow(component: str | None) -> None:
        while not ended.is_set():
            try:
                for _ in read_events(values["url"], values["admin_key"], 0, None, True, component):
                    happens.put(None)
                    if ended.is_set():
                        return
            except PlaneError:
                pass  # the question to the fleet has the same error
            happens.put(None)
            ended.wait(AGAIN_S)

    for component in values["components"] or (None,):
        threading.Thread(target=follow, args=(component,), name="events", daemon=True).start()
    return happens


def _wait(happens: queue.Queue[None], bound_s: float) -> None:
    """Waits for the next event, and takes all further events that have come by then."""
    try:
        happens.get(timeout=bound_s)
        while True:
            happens.get_nowait()
    except queue.Empty:
        return
