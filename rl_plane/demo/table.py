"""The live table: a line for each step. A terminal also shows the running step, in place."""

from __future__ import annotations

from typing import TextIO

from rl_plane.demo.story import StepRecord

HEADER = "step  version   reward                        workers  rollout   update  logprob diff  canary diff"
BAR = 20
"""Characters of the reward's bar."""
DRAWINGS_PER_S = 2


class LiveTable:
    def __init__(self, out: TextIO, planned: int) -> None:
        from rich.console import Console

        self._console = Console(
            file=out, force_terminal=out.isatty(), soft_wrap=True, markup=False, highlight=False
        )
        self._status = self._console.status("", refresh_per_second=DRAWINGS_PER_S)
        self._planned = planned
        self._headed = False

    def phase(self, step: int, phase: str) -> None:
        """Shows the running step below the lines. Nothing if `out` is no terminal."""
        self._status.update(f"{step:4}  {phase} … ({step} of {self._planned})")
        self._status.start()

    def step(self, record: StepRecord) -> None:
        if not self._headed:
            self._headed = True
            self.note(HEADER)
        self.note(row(record))

    def note(self, text: str) -> None:
        """A line between the rows."""
        self._console.print(text)

    def end(self) -> None:
        """Clears the running step."""
        self._status.stop()


def _small(value: float | None) -> str:
    return "-".rjust(11) if value is None else f"{value:11.1e}"


def row(record: StepRecord) -> str:
    bar = ("█" * round(record.reward * BAR)).ljust(BAR, "·")
    return (
        f"{record.step:4}  {record.version:<9} {record.reward:5.3f} {bar}   {record.workers:7}"
        f"  {record.rollout_s:6.2f}s  {record.update_s:6.2f}s  {record.max_logprob_diff:12.1e}"
        f"  {_small(record.canary_difference)}"
    )
