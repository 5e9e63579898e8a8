"""Shows at the terminal which processes of `rl-plane up` are ready, and what the others do, until all are."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rl_plane.cli.children import Printer
from rl_plane.cli.output import one_line
from rl_plane.cli.wait_display import READ_EVERY_S
from rl_plane.errors import PlaneError

if TYPE_CHECKING:
    from rich.console import RenderableType

DRAWINGS_PER_S = 2


def start_lines(total: int, waiting: Mapping[str, str], ready: int, seconds: float) -> RenderableType:
    """The bar, and a line for each process that is not ready.

    Args:
        total: The number of processes.
        waiting: The name of a process that is not ready → the thing that it does, in words.
        ready: The number of processes that are ready.
        seconds: Seconds since the start.
    """
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    from rl_plane.cli.update_bar import BAR_CELLS

    head = Table.grid(padding=(0, 1))
    words = f"rl-plane up: {ready} of {total} processes are ready, {seconds:.0f} s"
    head.add_row(Text(words), ProgressBar(total=total, completed=ready, width=BAR_CELLS))
    return Group(head, *(Text("  " + one_line(f"{name}: {does}")) for name, does in waiting.items()))


@contextmanager
def start_shown(
    printer: Printer, draw: Callable[[], RenderableType], read_phases: Callable[[], None]
) -> Iterator[None]:
    """Draws below the printer's lines during the block. Draws nothing if stderr is no terminal.

    Args:
        draw: Makes the drawing. Another thread calls it.
        read_phases: Is called each second, on a third thread. It may raise PlaneError.
    """
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    stop = threading.Event()

    def read_on() -> None:
        while not stop.wait(READ_EVERY_S):
            with contextlib.suppress(PlaneError):  # the frontend is not ready yet
                read_phases()

    console = Console(stderr=True, highlight=False)
    threading.Thread(target=read_on, name="phases", daemon=True).start()
    live = Live(
        console=console,
        get_renderable=draw,
        refresh_per_second=DRAWINGS_PER_S,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    with live:
        printer.at_terminal = lambda line: console.print(Text.from_ansi(line), soft_wrap=True)
        try:
            yield
        finally:
            stop.set()
            printer.at_terminal = None


class StartProgress:
    """The facts of the drawing."""

    def __init__(self, total: int) -> None:
        self._total, self._began_at = total, time.monotonic()
        self.phases: dict[str, str] = {}
        """instance_id → what the worker does, as a frontend has heard."""

    def learn(self, state: Mapping[str, Any]) -> None:
        """Takes the reply of the op `state`. A worker that starts no more is joining."""
        starting = state.get("starting") or ()
        phases = {one["instance_id"]: f"{one['phase']}, {one['elapsed_s']:.0f} s" for one in starting}
        self.phases = {**dict.fromkeys(self.phases, "joining the fleet"), **phases}

    def drawing(self, names: Sequence[tuple[str, str, bool]]) -> RenderableType:
        """`names`: of each process that was started its name, its instance id or "", and whether it is ready."""
        waiting = {
            name: self.phases.get(instance_id, "starting") for name, instance_id, is_ready in names if not is_ready
        }
        if not names:
            waiting = {"model": "being made from a seed"}
        ready = sum(is_ready for _, _, is_ready in names)
        return start_lines(self._total, waiting, ready, time.monotonic() - self._began_at)
