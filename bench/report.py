"""The table: one row per thing that is measured, with its aim and whether it holds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from operator import add, truediv

from bench.broadcasts import BroadcastTimes
from bench.canaries import CanaryTimes
from bench.commits import CommitTimes
from bench.deltas import DeltaTimes
from bench.fanout import OP, PATH, FanOutTimes
from bench.gaps import GapTimes
from bench.generation import FRONTEND, PROCESSES, VLLM_SERVER, WORKER, StreamTimes
from bench.published import PublishedTimes
from bench.pulls import PullTimes
from bench.shared_memory import COPY, IpcTimes
from bench.stored import UNVERIFIED, StoredTimes

AIM_FROM_WORKERS = 8
"""The aims for a fan-out are for 8 workers and more; with one it is all set-up."""
CLIENT_AIM = 1.3
FACADE_AIM = 1.4
CALL_AIM = 1.5
KILL_AIM_S = 0.01
"""Within milliseconds, where the server tells of closed connections."""
PROBED_KILL_AIM_S = 2.0
CONTROL_AIM = 2.0
GAP_AIM = 2.0
CANARY_AIM = 1.05
FORWARD_AIM = 1.0
"""The canary lengthens the pause by no more than one forward of its tokens."""
FILE_AIM = 1.25
"""0.8 × the speed of a plain read."""
OBJECT_AIM = 0.1
"""Ten times as fast as nats-py's own get."""
DELTA_AIM = 1.0
"""Faster than to read it all."""
COPY_AIM = 1.25
"""0.8 × the speed of a copy."""
PULL_AIM = 1.25
"""0.8 × the speed of a bare read."""
BROADCAST_AIM = 1.11
"""0.9 × the speed of a bare broadcast."""
HASHED_ALONE = ", XXH3 alone of the same bytes"
"""By all who hash them, at once: no way that verifies takes less on the same cores. Where that is above the aim, no
code can reach it."""
FIRST_TOKEN_AIM_S = 0.002
"""Later than without the plane, on an idle fleet."""
SERVER_AIM = 1.11
"""0.9 × the tokens per second of vLLM's own server."""
WHOLE_AIM = 0.5
"""A whole reply is sent at its end, so its tokens need not travel one by one."""
WHOLE_TIME_AIM = 1.05
"""Rollouts end no later than at vLLM's own server."""
WHOLE_SERVER_AIM = 1.0
"""No more CPU than vLLM's own server."""
OBSERVED_AIM = 1.05
"""Within the noise of these machines."""
FRONTENDS_AIM = 0.6
"""Two frontends: nearly twice the tokens per second of one."""


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
    """The limit or peer that it is compared with, measured in the same rounds."""
    beside_median_s: float | None = None
    beside_p99_s: float | None = None
    value: float | None = None
    """The figure that the aim is about: the median of the rounds' ratios, or seconds. None: no aim."""
    aim: float | None = None
    """At most this; None: none."""
    missing: int = 0
    """Answers that did not come in time, of all rounds: a busy machine."""
    reply_bytes: int | None = None
    """The bytes of one worker's reply, and of a plain subscriber's."""

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


def compared(
    what: str,
    workers: int | None,
    ours: Sequence[float],
    beside: str,
    theirs: Sequence[float],
    aim: float | None = None,
) -> Row:
    """`ours` and `theirs` of the same rounds."""
    return Row(
        what,
        workers,
        len(ours),
        statistics.median(ours),
        p99(ours),
        beside,
        statistics.median(theirs),
        p99(theirs),
        statistics.median(map(truediv, ours, theirs)),
        aim,
    )


def commit_rows(times: CommitTimes) -> list[Row]:
    ours, raw = times.seconds["update"], times.seconds["raw"]
    return [compared("update", times.workers, ours, f"{times.gathers} raw", raw, CONTROL_AIM)]


def gap_rows(times: GapTimes) -> list[Row]:
    def row(what: str, seconds: list[float], copies: list[float], aim: float | None) -> Row:
        return compared(what, 1, seconds, f"copy of {times.nbytes / 1e6:.0f} MB", copies, aim)

    return [
        row("gap of a stream, staged", times.gaps["staged"], times.copies["staged"], GAP_AIM),
        row("slowest step while staged", times.meanwhile, times.copies["staged"], None),
        row("gap of a stream, unstaged", times.gaps["unstaged"], times.copies["unstaged"], None),
    ]


def canary_rows(times: CanaryTimes) -> list[Row]:
    size = f"{times.nbytes / 1e6:,.0f} MB"
    frozen, off = times.pauses[None], times.pauses["off"]
    return [
        compared(f"update of {size}", 1, times.updates[None], "canary off", times.updates["off"], CANARY_AIM),
        compared(
            "its pause", 1, frozen, "canary off + 1 forward", list(map(add, off, times.forwards)), FORWARD_AIM
        ),
        time_row("one forward of the canary's tokens", times.forwards),
    ]


def stored_rows(times: StoredTimes) -> list[Row]:
    return [
        compared(
            f"{what}{way}, {times.nbytes / 1e6:,.0f} MB",
            1,
            times.seconds[ours + way],
            beside,
            times.seconds[theirs + way],
            aim,
        )
        for what, ours, beside, theirs, aim in (
            ("filesystem", "file", "plain read", "plain", FILE_AIM),
            ("filesystem", "file", "plain read into used memory", "used", FILE_AIM),
            ("object_store", "object", "nats-py get", "nats_get", OBJECT_AIM),
            ("object_store", "object", "plain read", "plain", None),
            ("object_store, publishing", "publish", "nats-py put", "nats_put", None),
        )
        for way in ("", UNVERIFIED)
    ]


def delta_rows(times: DeltaTimes) -> list[Row]:
    words = f"delta, {times.nbytes / 1e6:,.0f} MB of bf16, 1 % changed: {times.share:.1%} of the bytes"
    return [
        compared(f"{words}, {what}", None, times.seconds[what], "plain read", times.seconds["plain"], DELTA_AIM)
        for what in ("encode", "apply")
    ]


def ipc_rows(times: IpcTimes) -> list[Row]:
    def row(what: str, way: str, aim: float | None = COPY_AIM) -> Row:
        words = f"ipc, {times.nbytes / 1e6:,.0f} MB{what}"
        return compared(words, 1, times.seconds[way], COPY, times.seconds[COPY], aim)

    return [
        row(", digests not checked", "received"),
        row("", "checked"),
        row(", layout tensors, digests not checked", "lent"),
        row(", layout tensors", "lent and checked"),
        row(HASHED_ALONE, "hashed", None),
        row(", staged, digests not checked", "staged"),
        row(", staged", "checked and staged"),
    ]


def pull_rows(times: PullTimes) -> list[Row]:
    bare, size = times.seconds["bare"], f"{times.nbytes / 1e6:,.0f} MB"

    def row(what: str, way: str, aim: float | None) -> Row:
        return compared(f"nixl, {size}{what}", times.receivers, times.seconds[way], "bare nixl reads", bare, aim)

    return [
        row(", digests not checked", "pull", PULL_AIM),
        row("", "verified", PULL_AIM),
        row(HASHED_ALONE, "hashed", None),
        row(", staged, digests not checked", "staged", PULL_AIM),
        row(", staged", "verified and staged", PULL_AIM),
    ]


def broadcast_rows(times: BroadcastTimes) -> list[Row]:
    bare, size = times.seconds["bare"], f"{times.nbytes / 1e6:,.0f} MB"

    def row(what: str, way: str, aim: float | None) -> Row:
        return compared(f"gloo, {size}{what}", times.receivers, times.seconds[way], "bare broadcasts", bare, aim)

    return [
        row(", lent, digests not checked", "lent", BROADCAST_AIM),
        row(", digests not checked", "received", BROADCAST_AIM),
        row("", "checked", BROADCAST_AIM),
        row(HASHED_ALONE, "hashed", None),
        row(", lent, staged, digests not checked", "lent and staged", BROADCAST_AIM),
        row(", staged", "checked and staged", BROADCAST_AIM),
    ]


def published_rows(times: PublishedTimes) -> list[Row]:
    return [
        compared(f"publish by {name}, {times.nbytes / 1e6:,.0f} MB", 1, seconds, COPY, times.copies[name])
        for name, seconds in times.seconds.items()
    ]


def stream_rows(times: StreamTimes) -> list[Row]:
    """Rows of the `fake` engine."""
    size = _streams(times)

    def later(ours: list[float], direct: list[float]) -> list[float]:
        return [max(0.0, one - other) for one, other in zip(ours, direct, strict=True)]

    first, bare_first = (later(times.firsts(way), times.firsts("direct")) for way in ("plane", "bare"))
    fast, two = times.per_thousand("unpaced"), times.per_thousand("two frontends")
    return [
        time_row(f"first token later, {size}", first, FIRST_TOKEN_AIM_S if times.streams == 1 else None),
        time_row(f"first token later by the bare path, {size}", bare_first),
        time_row(f"1,000 tokens, {size}", fast),
        compared(
            f"1,000 tokens, {size}, two frontends",
            None,
            two,
            "one",
            fast,
            FRONTENDS_AIM if times.streams > 1 else None,
        ),
        *(
            time_row(f"CPU of {name} for 1,000 tokens, {size}", times.cpu_per_thousand("unpaced", name))
            for name in PROCESSES
        ),
        compared(
            f"CPU for 1,000 paced tokens in whole replies, {size}",
            None,
            times.cpu_per_thousand("whole", *PROCESSES),
            "in streams",
            times.cpu_per_thousand("plane", *PROCESSES),
            WHOLE_AIM,
        ),
    ]


def observed_rows(times: StreamTimes) -> list[Row]:
    """Rows of a fleet with observers."""
    size = _streams(times)
    seen, alone = times.per_thousand("with observers"), times.per_thousand("without observers")
    cpu, cpu_alone = (times.cpu_per_thousand(way, *PROCESSES) for way in ("with observers", "without observers"))
    return [
        compared(f"1,000 tokens, with observers, {size}", None, seen, "without observers", alone, OBSERVED_AIM),
        compared(f"CPU for 1,000 tokens, with observers, {size}", None, cpu, "without observers", cpu_alone, None),
    ]


def server_rows(times: StreamTimes) -> list[Row]:
    """Rows of vLLM."""
    size = _streams(times)

    def row(what: str, ours: list[float], theirs: list[float], aim: float | None = None) -> Row:
        return compared(f"vLLM, {what}, {size}", None, ours, "its own server", theirs, aim)

    return [
        row("1,000 tokens", times.per_thousand("plane"), times.per_thousand("vllm"), SERVER_AIM),
        row(
            "CPU beside the engine's for 1,000 tokens",
            times.cpu_per_thousand("plane", *PROCESSES),
            times.cpu_per_thousand("vllm", VLLM_SERVER),
        ),
        row(
            "1,000 tokens in whole replies",
            times.per_thousand("plane whole"),
            times.per_thousand("vllm whole"),
            WHOLE_TIME_AIM,
        ),
        row(
            "CPU beside the engine's for 1,000 tokens in whole replies",
            times.cpu_per_thousand("plane whole", *PROCESSES),
            times.cpu_per_thousand("vllm whole", VLLM_SERVER),
            WHOLE_SERVER_AIM,
        ),
        *(
            compared(
                f"vLLM, CPU of {name} for 1,000 tokens in whole replies, {size}",
                None,
                times.cpu_per_thousand("plane whole", name),
                "in streams",
                times.cpu_per_thousand("plane", name),
                WHOLE_AIM,
            )
            for name in (FRONTEND, WORKER)
        ),
    ]


def _streams(times: StreamTimes) -> str:
    return f"{times.streams} stream{'s' * (times.streams > 1)}"


def time_row(what: str, seconds: Sequence[float], aim: float | None = None, *, worst: bool = False) -> Row:
    """`worst`: the aim is about the longest, not the median."""
    middle = statistics.median(seconds)
    return Row(what, None, len(seconds), middle, p99(seconds), value=max(seconds) if worst else middle, aim=aim)


# ---- as Markdown, which a terminal shows as well ----

_RATIOS = ("what", "workers", "median ms", "p99 ms", "beside", "median ms", "p99 ms", "ratio", "aim", "holds")
_TIMES = ("what", "times", "median ms", "largest ms", "aim ms", "holds")


def ratio_table(rows: Sequence[Row]) -> str:
    return _table(
        _RATIOS,
        [
            (
                row.what,
                "" if row.workers is None else f"{row.workers:,}",
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
