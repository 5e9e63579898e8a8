"""The running update as a bar with its words, for `rl-plane top` and for the commands that wait for an update. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rl_plane.cli.output import counted, one_line

BAR_CELLS = 30


def update_lines(update: Mapping[str, Any], left_s: float | None) -> RenderableType:
    """The phase with a bar of the bytes, and the thing that the update waits for.

    Args:
        update: The field `update` of the op `state`.
        left_s: Seconds until all bytes have come. None: not known.
    """
    total, done = update["total_bytes"], update["bytes"]
    head = Table.grid(padding=(0, 1))
    head.add_row(
        Text(one_line(f"update {update['update_id'][:8]} ({update['label']})"), style="bold"),
        ProgressBar(total=total or 1, completed=done if total else 0, width=BAR_CELLS, pulse=not total),
        Text(_bytes_words(update, left_s)),
    )
    waits = f"{update['phase']}, {update['elapsed_s']:.0f} s so far, waits for {update['waits_for']}"
    return Group(head, Text("  " + one_line(waits)))


def _bytes_words(update: Mapping[str, Any], left_s: float | None) -> str:
    total = update["total_bytes"]
    if not total:
        return ""
    words = f"{update['bytes'] / 1e6:,.1f} of {total / 1e6:,.1f} MB on {counted(update['workers'])}"
    if update["bytes_per_s"]:
        words += f", {update['bytes_per_s'] / 1e6:,.1f} MB/s"
    return words + (f", {left_s:.0f} s left" if left_s else "")
