"""The outcome of one check of the doctor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rl_plane.cli.output import one_line

Level = Literal["ok", "warning", "error"]


@dataclass(frozen=True, slots=True)
class CheckLine:
    """One line of the doctor."""

    level: Level
    check: str
    """The thing that was checked, in a word or two."""
    words: str
    fix: str = ""
    """The thing to do. Empty: nothing."""

    def line(self) -> str:
        fix = f"; fix: {self.fix}" if self.fix else ""
        return f"{self.level:<8} {self.check:<11} {one_line(self.words + fix)}"


def ok(check: str, words: str) -> CheckLine:
    return CheckLine("ok", check, words)


def warning(check: str, words: str, fix: str) -> CheckLine:
    return CheckLine("warning", check, words, fix)


def error(check: str, words: str, fix: str) -> CheckLine:
    return CheckLine("error", check, words, fix)


def size(nbytes: int) -> str:
    """Bytes in the largest unit that keeps a digit before the point."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= factor:
            return f"{nbytes / factor:.1f} {unit}"
    return f"{nbytes} bytes"
