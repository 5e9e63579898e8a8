"""`python -m tests.fuzz [--seconds 3600] [--seed 1]`: mutated files, messages, entries and bodies for the parsers and
for a real fleet. The exit code is 1 at the first fault, which the error describes."""

from __future__ import annotations

import argparse
import asyncio
import logging
import tempfile
import time
from pathlib import Path

from tests.fuzz import fleet, parsers

SHARE = 0.2
"""The share of the time for the parsers. They take some thousand inputs a second, and the fleet some hundred."""
INPUTS = 1000


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=3600.0, help="of fuzzing [3600]")
    parser.add_argument("--seed", type=int, default=1, help="other seeds give other inputs [1]")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="logs go there, and stay")
    arguments = parser.parse_args()
    logging.getLogger("rl_plane").setLevel(logging.ERROR)
    end, rounds = time.monotonic() + SHARE * arguments.seconds, 0
    while time.monotonic() < end:
        parsers.fuzz(arguments.seed + rounds, INPUTS)
        rounds += 1
    print(f"parsers: {rounds * INPUTS} inputs of each of {len(parsers.TARGETS)} targets")
    with tempfile.TemporaryDirectory(prefix="rl-plane-fuzz-") as scratch:
        directory = arguments.keep or Path(scratch)
        directory.mkdir(parents=True, exist_ok=True)
        seconds = (1 - SHARE) * arguments.seconds
        done = asyncio.run(fleet.fuzz(directory.resolve(), arguments.seed, seconds=seconds))
    print(f"fleet: {done * fleet.ROUND} inputs; an update committed afterwards")


if __name__ == "__main__":
    main()
