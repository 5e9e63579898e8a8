"""The live table: a line for each step. A terminal also shows the running step, in place."""

from __future__ import annotations

from typing import TextIO

from rl_plane.demo.story import StepRecord

HEADER = "step  version   reward                        workers  rollout   update  logprob diff  canary diff"
BAR = 20
"""Characters of the reward's bar."""


class LiveTable:
    def __init__(self, out: TextIO, planned: int) -> None:
        self._out = out
        self._planned = planned
        self._in_place = out.isatty()
        self._headed = False

    def phase(self, step: int, phase: str) -> None:
        if self._in_place:
            self._head()
            self._out.write(f"\r\x1b[K{step:4}  {phase} … ({step} of {self._planned})")
            self._out.flush()

    def step(self, record: StepRecord) -> None:
        self._head()
        self._line(row(record))

    def note(self, text: str) -> None:
        """A line between the rows."""
        self._line(text)

    def end(self) -> None:
        """Clears an unfinished line."""
        if self._in_place:
            self._out.write("\r\x1b[K")
            self._out.flush()

    def _head(self) -> None:
        if not self._headed:
            self._headed = True
            self._line(HEADER)

    def _line(self, text: str) -> None:
        self._out.write(("\r\x1b[K" if self._in_place else "") + text + "\n")
        self._out.flush()


def _small(value: float | None) -> str:
    return "-".rjust(11) if value is None else f"{value:11.1e}"


def row(record: StepRecord) -> str:
    bar = ("█" * round(record.reward * BAR)).ljust(BAR, "·")
    return (
        f"{record.step:4}  {record.version:<9} {record.reward:5.3f} {bar}   {record.workers:7}"
        f"  {record.rollout_s:6.2f}s  {record.update_s:6.2f}s  {record.max_logprob_diff:12.1e}"
        f"  {_small(record.canary_difference)}"
    )
