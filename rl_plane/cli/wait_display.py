"""Shows the progress of a long call on stderr: live at a terminal, else one line now and then."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rl_plane.cli.output import note
from rl_plane.cli.top_facts import seconds_left

TICK_S = 0.5
"""Seconds between two drawings, and before the first one: a call that ends earlier shows nothing."""
NOTE_EVERY_S = 10.0
"""Seconds between two lines about a wait, where no terminal shows its seconds."""
READ_EVERY_S = 1.0
"""Seconds between two reads of the state, while a call runs."""
STATE_BODY = {"min_workers": 0, "wait_s": 0}
"""The body of `state` that shows the running update of any fleet, at once."""
STATE_S = 5.0
"""The bound of one such read. A frontend answers within a second, and says after 2 s that a worker does not. A read
that fails shows nothing new."""

DISPLAY = "wait-display"
"""The name of the thread that shows the wait."""

ReadState = Callable[[], Mapping[str, Any]]


@contextmanager
def seconds_shown(op: str, read_state: ReadState | None = None, *, quiet: bool = False) -> Iterator[None]:
    """Shows for how long the block has run.

    Args:
        op: The name of the call.
        read_state: Reads the fleet's state, of which a terminal shows the running update. It may raise any error.
        quiet: Shows nothing at a terminal: the command prints JSON.
    """
    stop = threading.Event()
    if not sys.stderr.isatty():
        show = threading.Thread(target=_note_seconds, name=DISPLAY, args=(op, stop), daemon=True)
    elif quiet:
        yield
        return
    else:
        show = threading.Thread(target=_draw, name=DISPLAY, args=(op, stop, read_state), daemon=True)
    show.start()
    try:
        yield
    finally:
        stop.set()
        show.join(TICK_S)


def _words(op: str, seconds: float) -> str:
    return f"rl-plane: {op.replace('_', ' ')}: waiting, {seconds:.0f} s"


def _note_seconds(op: str, stop: threading.Event) -> None:
    start = time.monotonic()
    while not stop.wait(NOTE_EVERY_S):
        note(_words(op, time.monotonic() - start))


def _draw(op: str, stop: threading.Event, read_state: ReadState | None) -> None:
    """Draws the seconds and the running update at the terminal until `stop`, and removes them."""
    start = time.monotonic()
    if stop.wait(TICK_S):
        return
    from rich.console import Console, Group, RenderableType
    from rich.live import Live
    from rich.text import Text

    from rl_plane.cli.update_bar import update_lines

    newest: list[Mapping[str, Any]] = []
    if read_state is not None:
        # Apart from the drawing, which must end at once: a read may take seconds.
        threading.Thread(target=_read_on, args=(read_state, newest, stop), name="state", daemon=True).start()
    console = Console(stderr=True, highlight=False)
    with Live(console=console, auto_refresh=False, transient=True, redirect_stdout=False) as live:
        while not stop.wait(TICK_S):
            lines: list[RenderableType] = [Text(_words(op, time.monotonic() - start))]
            for state in newest[:1]:
                if state.get("update") is not None:
                    lines.append(update_lines(state["update"], seconds_left(state)))
            live.update(Group(*lines), refresh=True)


def _read_on(read_state: ReadState, newest: list[Mapping[str, Any]], stop: threading.Event) -> None:
    while not stop.is_set():
        with contextlib.suppress(Exception):  # the call itself reports what is wrong
            newest[:] = [read_state()]
        stop.wait(READ_EVERY_S)
