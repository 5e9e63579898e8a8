"""Makes the screen of `rl-plane top` from its facts. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rl_plane.cli.output import one_line
from rl_plane.cli.show import left_words, starting_words, version_words
from rl_plane.cli.top_facts import TopFacts, in_order, seconds_left, version_lag
from rl_plane.cli.update_bar import update_lines

SHOWN_STARTING = 5
SHOWN_LEFT = 3
SHOWN_EVENTS = 8
MAX_ROWS = 1000
"""The workers of a screen without a height: `--once`."""
HEAD_LINES = 10
"""The lines of a screen beside the tables and lists: the head, the update and the headings."""

Reply = Mapping[str, Any]


def screen(facts: TopFacts, height: int | None = None) -> RenderableType:
    """The whole screen. `height`: the lines of the terminal; workers beyond it are counted. None: there is no limit."""
    parts: list[RenderableType] = [_head(facts, "" if height is None else ", q leaves")]
    if facts.lost_since is not None:
        words = f"no answer since {facts.lost_since} ({facts.lost_s:.0f} s), trying again: {facts.why}"
        parts.append(Text(one_line(words), style="bold red"))
    if (state := facts.state) is not None:
        parts += _body(facts, state, height)
    if facts.events:
        parts += [Text(), Text("EVENTS", style="bold")]
        parts += [Text(one_line(line), no_wrap=True, overflow="ellipsis") for line in facts.events[-SHOWN_EVENTS:]]
    return Group(*parts)


def _head(facts: TopFacts, how: str) -> Text:
    state = facts.state
    words = Text(no_wrap=True, overflow="ellipsis")
    words.append("rl-plane top ", style="bold")
    words.append(one_line(f"{facts.url} at {facts.clock}{how}") + "\n")
    if state is None:
        return words.append("no state is known yet")
    words.append("ready" if state["ready"] else "not ready", style="green" if state["ready"] else "yellow")
    count = f"{len(state['workers'])}" + (f" of {state['expected']}" if state.get("expected") else "")
    words.append(one_line(f", {state['pause_state']}, {count} workers, epoch {state['epoch']}"))
    if state.get("version"):
        words.append(one_line(f", version {version_words(state['version'])}"))
    if facts.rates is not None:
        tokens = {label: rate.tokens for label, rate in facts.rates.items()}
        rollouts = {label: rate.rollouts for label, rate in facts.rates.items()}
        words.append("\n" + one_line(f"tokens/s: {_by_version(tokens)}; rollouts/s: {_by_version(rollouts)}"))
    return words


def _by_version(rates: Mapping[str, float]) -> str:
    by_version = ", ".join(f"{rate:,.1f} by {label}" for label, rate in sorted(rates.items()))
    return f"{sum(rates.values()):,.1f} ({by_version or '-'})"


def _body(facts: TopFacts, state: Reply, height: int | None) -> list[RenderableType]:
    parts: list[RenderableType] = [Text()]
    if (update := state.get("update")) is not None:
        parts += [update_lines(update, seconds_left(state)), Text()]
    starting = (state.get("starting") or [])[:SHOWN_STARTING]
    left = [one for one in state.get("left") or () if not one["back"]][:SHOWN_LEFT]
    beside = HEAD_LINES + len(starting) + len(left) + min(SHOWN_EVENTS, len(facts.events))
    rows = in_order(state)
    shown = rows[: MAX_ROWS if height is None else max(1, height - beside)]
    parts.append(_workers(state, shown))
    if len(rows) > len(shown):
        parts.append(Text(f"and {len(rows) - len(shown)} more workers", style="dim"))
    parts += [Text(one_line(starting_words(one)), style="yellow") for one in starting]
    for one in left:
        words = f"{one['instance_id']} left {one['ago_s']:.0f} s ago: {left_words(one)}"
        parts.append(Text(one_line(words), style="red", no_wrap=True, overflow="ellipsis"))
    return parts


def _workers(state: Reply, rows: list[Reply]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("INSTANCE", "ENGINE", "VERSION"):
        table.add_column(heading, no_wrap=True)
    for heading in ("LAG", "RUNNING", "WAITING"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("ADMISSION", no_wrap=True, overflow="ellipsis")
    for row in rows:
        if row.get("status") != "ok":
            words = (row.get("error") or {}).get("message") or row.get("reason") or ""
            cells = [row["instance_id"], "-", "-", "-", "-", "-", f"{row.get('status')}: {words}"]
            table.add_row(*(Text(one_line(cell)) for cell in cells), style="red")
            continue
        lag, admission = version_lag(state, row), row["admission"]
        update = row.get("update")
        words = "open" if admission["open"] else f"closed: {', '.join(map(str, admission['reasons']))}"
        words += ", paused" if row["pause_state"] == "paused" else ""
        if update and update["total_bytes"]:
            words += f", has {update['bytes'] / update['total_bytes']:.0%} of {update['label']}"
        cells = [
            row["instance_id"],
            row["engine"],
            version_words(row["version"]) if row.get("version") else "-",
            "-" if lag is None else str(lag),
            str(row["running"]),
            str(row["waiting"]),
            words,
        ]
        style = "" if admission["open"] and not lag else "yellow"
        table.add_row(*(Text(one_line(cell)) for cell in cells), style=style)
    return table
