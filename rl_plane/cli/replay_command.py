"""`rl-plane replay PATH` sends recorded rollouts again, and compares what comes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import click

from rl_plane.cli.output import say, say_json, table
from rl_plane.cli.settings import Command, command
from rl_plane.fleet.http_client import call_json
from rl_plane.rollouts.replay import Replayed, Verdict, read_records, replay

TIMEOUT_S = 600.0
"""Seconds for one completion. The longest take minutes."""
SHOWN = 20
"""The records that are listed, the worst first."""
COLUMNS = {
    "RECORD": "id",
    "VERDICT": "verdict",
    "EQUAL TOKENS": "tokens",
    "OF": "of_tokens",
    "LARGEST DIFFERENCE": "largest_difference",
    "WHY": "why",
}
WORST_FIRST: tuple[Verdict, ...] = ("differs", "failed", "other_weights", "skipped", "equal")


def commands() -> list[click.Command]:
    doc = """Send recorded rollouts again, and compare tokens and logprobs.

    PATH is a file or the folder of `rl-plane frontend --record`. The exit code is 1 if the same weights gave other
    tokens, or the fleet gave an error."""
    settings = ("http_url", "api_key", "records", "timeout_s", "json")
    return [command("replay", doc, run_replay, settings, click.Argument(["path"], metavar="PATH"))]


def run_replay(given: Command) -> int:
    """Replays the records, and shows how many were equal."""
    values = given.values
    address = values["http_url"].rstrip("/") + "/v1/completions"
    timeout_s = values["timeout_s"] or TIMEOUT_S
    found = list(
        replay(
            read_records(Path(values["path"])),
            lambda body: call_json(address, body, values["api_key"], timeout_s),
            values["records"],
        )
    )
    counts = Counter(one.verdict for one in found)
    if values["json"]:
        say_json({"records": len(found), **dict(counts), "replayed": [one.to_wire() for one in found]})
    else:
        shown = [one for one in sorted(found, key=_order) if one.verdict != "equal"][:SHOWN]
        if shown:
            say(table([one.to_wire() for one in shown], COLUMNS))
        say(
            f"{len(found)} records: "
            + ", ".join(f"{counts[verdict]} {_WORDS[verdict]}" for verdict in WORST_FIRST)
        )
    return 1 if counts["differs"] or counts["failed"] else 0


_WORDS: dict[Verdict, str] = {
    "differs": "differ",
    "failed": "failed",
    "other_weights": "by other weights",
    "skipped": "skipped",
    "equal": "equal",
}


def _order(one: Replayed) -> tuple[int, int]:
    return WORST_FIRST.index(one.verdict), one.tokens
