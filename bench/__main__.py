"""`python -m bench [--quick] [--json FILE]`: the plane's speed beside raw nats-py (docs/benchmarks.md).

Exit code 0 whenever it could measure: a missed aim is said in the table.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from bench.deaths import measure_deaths, measure_joins
from bench.fanout import measure_fan_out
from bench.report import KILL_AIM_S, PROBED_KILL_AIM_S, Row, fan_out_rows, fan_out_table, time_row, times_table
from rl_plane.nats_server import NatsServer
from worker.engines.fake import make_fake_model

ROUNDS = {1: 1000, 8: 1000, 32: 500, 100: 300, 1000: 60}
"""Workers → rounds: some seconds of measuring for each size."""
QUICK_ROUNDS = {1: 20, 8: 20, 32: 10}
KILLS, PROBED_KILLS, JOINS = 20, 5, 50
QUICK_KILLS, QUICK_PROBED_KILLS, QUICK_JOINS = 2, 1, 3


async def bench(model: Path, quick: bool) -> tuple[list[Row], list[Row]]:
    fan_outs: list[Row] = []
    for workers, rounds in (QUICK_ROUNDS if quick else ROUNDS).items():
        _say(f"fan-out to {workers:,} workers, {rounds} rounds …")
        server = NatsServer()
        server.start()
        try:
            rows = fan_out_rows(await measure_fan_out(server.url, model, workers, rounds))
        finally:
            server.stop()
        fan_outs += rows
        for row in rows:
            if row.missing:
                _say(f"{row.what}: {row.missing} of {workers * rounds:,} answers did not come in time")
    _say("kills and joins …")
    starts, deaths = await measure_deaths(model, QUICK_KILLS if quick else KILLS, advisories=True)
    _, probed = await measure_deaths(model, QUICK_PROBED_KILLS if quick else PROBED_KILLS, advisories=False)
    joins = await measure_joins(QUICK_JOINS if quick else JOINS)
    times = [
        time_row("SIGKILL → gone, our nats.conf", deaths, KILL_AIM_S),
        time_row("SIGKILL → gone, any other NATS server", probed, PROBED_KILL_AIM_S, worst=True),
        time_row("registering → listed", joins),
        time_row("process started → listed (fake engine)", starts),
    ]
    return fan_outs, times


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _written(row: Row) -> dict[str, object]:
    return {**asdict(row), "holds": row.holds}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few rounds, at most 32 workers: to see that it runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there too")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rl-plane-bench-") as scratch:
        fan_outs, times = asyncio.run(bench(make_fake_model(Path(scratch) / "model", 0), arguments.quick))
    print(f"Python {platform.python_version()}, {os.cpu_count()} cores, {platform.platform()}\n")
    print(fan_out_table(fan_outs), end="\n\n")
    print(times_table(times))
    if arguments.json:
        written = {"fan_outs": [_written(row) for row in fan_outs], "times": [_written(row) for row in times]}
        arguments.json.write_text(json.dumps(written, indent=2) + "\n")


if __name__ == "__main__":
    main()
