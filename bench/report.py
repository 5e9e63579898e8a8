"""The table: one row per thing that is measured, with its aim and whether it holds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from bench.fanout import OP, PATH, FanOutTimes

AIM_FROM_WORKERS = 8
"""The aims for a fan-out are for 8 workers and more; with one it is all set-up."""
CLIENT_AIM = 1.3
FACADE_AIM = 1.4
CALL_AIM = 1.5
KILL_AIM_S = 0.01
"""Within milliseconds, where the server tells of closed connections."""
PROBED_KILL_AIM_S = 2.0


def p99(seconds: Sequence[float]) -> float:
    return sorted(seconds)[math.ceil(0.99 * len(seconds)) - 1]


@dataclass(frozen=True, slots=True)
class Row:
    what: str
    workers: int | None
    samples: int
    median_s: float
    p99_s: float
    """With fewer than 100 samples, the largest."""
    beside: str | None = None
    """What it is compared with, measured in the same rounds."""
    beside_median_s: float | None = None
    beside_p99_s: float | None = None
    value: float | None = None
    """What the aim is about: the median of the rounds' ratios, or seconds. None: no aim."""
    aim: float | None = None
    """At most this; None: none."""
    missing: int = 0
    """Answers that did not come in time, of all rounds: a busy machine."""
    reply_bytes: int | None = None
    """Of one worker's reply, and of a plain subscriber's."""

    @property
    def holds(self) -> bool | None:
        return None if self.aim is None or self.value is None else self.value <= self.aim


def fan_out_rows(times: FanOutTimes) -> list[Row]:
    def row(what: str, way: str, beside: str, others: tuple[str, ...], aim: float | None) -> Row:
        ours, theirs = times.seconds[way], times.sums(*others)
        return Row(
            what,
            times.workers,
            len(ours),
            statistics.median(ours),
            p99(ours),
            beside,
            statistics.median(theirs),
            p99(theirs),
            times.ratio(way, *others),
            aim,
            times.missing[way],
            times.reply_bytes,
        )

    large = times.workers >= AIM_FROM_WORKERS
    return [
        row(f"RlClient.call_all({OP})", "client", "raw", ("raw",), CLIENT_AIM if large else None),
        row(f"GET {PATH}", "facade", "raw + empty", ("raw", "empty_route"), FACADE_AIM if large else None),
        row(f"RlClient.call({OP})", "call", "nc.request", ("raw_request",), CALL_AIM),
    ]


def time_row(what: str, seconds: Sequence[float], aim: float | None = None, *, worst: bool = False) -> Row:
    """`worst`: the aim is about the longest, not the median."""
    middle = statistics.median(seconds)
    return Row(what, None, len(seconds), middle, p99(seconds), value=max(seconds) if worst else middle, aim=aim)


# ---- as Markdown, which a terminal shows as well ----

_FAN_OUT = ("what", "workers", "median ms", "p99 ms", "beside", "median ms", "p99 ms", "ratio", "aim", "holds")
_TIMES = ("what", "times", "median ms", "largest ms", "aim ms", "holds")


def fan_out_table(rows: Sequence[Row]) -> str:
    return _table(
        _FAN_OUT,
        [
            (
                row.what,
                f"{row.workers:,}",
                _ms(row.median_s),
                _ms(row.p99_s),
                row.beside or "",
                _ms(row.beside_median_s),
                _ms(row.beside_p99_s),
                "" if row.value is None else f"{row.value:.2f}",
                "" if row.aim is None else f"≤ {row.aim}",
                _holds(row),
            )
            for row in rows
        ],
    )


def times_table(rows: Sequence[Row]) -> str:
    return _table(
        _TIMES,
        [
            (
                row.what,
                str(row.samples),
                _ms(row.median_s),
                _ms(row.p99_s),
                "" if row.aim is None else f"≤ {_ms(row.aim)}",
                _holds(row),
            )
            for row in rows
        ],
    )


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:,.2f}"


def _holds(row: Row) -> str:
    return {None: "", True: "yes", False: "NO"}[row.holds]


def _table(head: tuple[str, ...], lines: list[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(head, *lines, strict=True)]
    rule = tuple("-" * width for width in widths)
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"
        for line in (head, rule, *lines)
    )
