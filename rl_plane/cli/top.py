"""`rl-plane top`: a live screen of the fleet, and `--once`, which prints one."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import threading
import time
import tty
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click

from rl_plane.cli.end_signals import ended_by_signals
from rl_plane.cli.follow_events import event_line
from rl_plane.cli.output import BadSetting, clock
from rl_plane.cli.settings import Command, command, only_component
from rl_plane.cli.top_facts import Rates, TopFacts, WorkCounts, rates_by_version
from rl_plane.cli.wait_display import STATE_BODY, STATE_S
from rl_plane.errors import PlaneError
from rl_plane.fleet.http_client import call_facade, read_events

EVERY_S = 1.0
"""Seconds between two reads of the state, and between two tries to connect."""
SINCE_S = 600
"""The screen begins with the events of the last ten minutes."""
KEPT_EVENTS = 100
"""More lines than a screen has."""
SHOW_S = 0.5
"""Seconds between two drawings of the screen. A key works at once."""
NO_TERMINAL_CELLS = 160
"""The width of a screen that is printed into a file: wide enough for every column."""
LEAVE = ("q", "Q")


def commands() -> list[click.Command]:
    doc = """Show the fleet live: the running update, each worker, tokens per second, the last events.

    q or Ctrl-C leaves. Without a terminal give --once, which prints one screen."""
    return [command("top", doc, run_top, ("once", "components", "url", "admin_key"))]


def run_top(given: Command) -> int:
    from rich.console import Console

    from rl_plane.cli.top_screen import screen

    values = given.values
    is_terminal = sys.stdout.isatty()
    if not is_terminal and not values["once"]:
        raise BadSetting("stdout is no terminal", field="--once", fix="use a terminal, or --once for one screen")
    reader = FleetReader(values["url"], values["admin_key"], only_component(values))
    reader.read_state()
    if values["once"]:
        reader.read_kept_events()
        time.sleep(EVERY_S)  # tokens per second need two counts
        reader.read_state()
        Console(width=None if is_terminal else NO_TERMINAL_CELLS, highlight=False).print(screen(reader.facts()))
        return 0
    _live(reader)
    return 0


def _live(reader: FleetReader) -> None:
    """Shows the screen until a key or a signal. The terminal is then as it was."""
    from rich.console import Console
    from rich.live import Live

    from rl_plane.cli.top_screen import screen

    console = Console(highlight=False)
    try:
        with ended_by_signals():
            reader.start()
            with _keys() as pressed, Live(console=console, screen=True, auto_refresh=False) as live:
                while pressed(SHOW_S) not in LEAVE:
                    live.update(screen(reader.facts(), console.size.height), refresh=True)
    finally:
        reader.stop()


def _no_key(seconds: float) -> str:
    time.sleep(seconds)
    return ""


@contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Gives a function that waits so many seconds for a key, which is empty if none comes. Without a terminal at stdin
    it only waits."""
    if not sys.stdin.isatty():
        yield _no_key
        return
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)

    def pressed(seconds: float) -> str:
        if not select.select([fd], [], [], seconds)[0]:
            return ""
        return os.read(fd, 1).decode(errors="replace") or LEAVE[0]  # the terminal has gone

    try:
        tty.setcbreak(fd)
        yield pressed
    finally:
        with contextlib.suppress(termios.error):  # the terminal has gone
            termios.tcsetattr(fd, termios.TCSADRAIN, before)


class FleetReader:
    """Reads the state each second and follows the events, each on a thread, until `stop`."""

    def __init__(self, url: str, key: str | None, component: str | None = None) -> None:
        """`component`: None means the frontend's own."""
        self._url, self._key, self._component = url, key, component
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._state: dict[str, Any] | None = None
        self._counts: WorkCounts | None = None
        self._rates: dict[str, Rates] | None = None
        self._lost: tuple[float, PlaneError] | None = None
        """Unix seconds since which the frontend does not answer, and the error of the last call."""
        self._events: deque[str] = deque(maxlen=KEPT_EVENTS)
        self._last_id: int | None = None

    def start(self) -> None:
        # Daemons: a read that hangs does not keep the process.
        threading.Thread(target=self._read_on, name="state", daemon=True).start()
        threading.Thread(target=self._follow, name="events", daemon=True).start()

    def stop(self) -> None:
        self._stop.set()

    def facts(self) -> TopFacts:
        """All that is known now."""
        with self._lock:
            lost = self._lost
            return TopFacts(
                url=self._url,
                clock=clock(time.time()),
                state=self._state,
                lost_since=clock(lost[0]) if lost is not None else None,
                lost_s=time.time() - lost[0] if lost is not None else 0.0,
                why=lost[1].message if lost is not None else "",
                rates=self._rates,
                events=tuple(self._events),
            )

    def read_state(self) -> None:
        """Reads the state once. PlaneError: the frontend does not answer, or refuses."""
        named = {} if self._component is None else {"component": [self._component]}
        state = call_facade(self._url, self._key, "state", {**STATE_BODY, **named}, STATE_S)
        counts = WorkCounts.of(state, time.monotonic())
        with self._lock:
            if self._counts is not None:
                self._rates = rates_by_version(self._counts, counts)
            self._state, self._counts, self._lost = state, counts, None

    def read_kept_events(self) -> None:
        """Reads the events that the frontend has kept."""
        for number, kind, data in self._read_events(None, follow=False):
            self._take(number, kind, data)

    def _read_events(self, last: int | None, *, follow: bool) -> Iterator[tuple[int | None, str, dict[str, Any]]]:
        return read_events(self._url, self._key, SINCE_S, last, follow, self._component)

    def _read_on(self) -> None:
        while not self._stop.wait(EVERY_S):
            try:
                self.read_state()
            except PlaneError as error:
                with self._lock:
                    self._lost = (self._lost or (time.time(), error))[0], error

    def _follow(self) -> None:
        while True:
            # The other thread shows that the frontend does not answer.
            with contextlib.suppress(PlaneError):
                for number, kind, data in self._read_events(self._last_id, follow=True):
                    self._take(number, kind, data)
            if self._stop.wait(EVERY_S):
                return

    def _take(self, number: int | None, kind: str, data: dict[str, Any]) -> None:
        self._last_id = number if number is not None else self._last_id
        if kind == "update" and data["change"] == "progress":
            return  # the state has it
        with self._lock:
            self._events.append(event_line(kind, data))
