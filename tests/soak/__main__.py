"""`python -m tests.soak [--seconds 600] [--seed 1] [--engine hf]…`: a fleet under load, updates and kills, with every
token checked. Prints one screen; the exit code is 1 if there was a fault."""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from tests.soak.run import soak

CLIENTS = 8
"""Enough that each worker has several requests at once, and two cores are busy without being drowned."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="of load and trouble [600]")
    parser.add_argument("--seed", type=int, default=1, help="other seeds, another life [1]")
    parser.add_argument(
        "--engine", action="append", choices=["hf", "vllm", "sglang"], help="one worker each [two of hf]"
    )
    parser.add_argument("--clients", type=int, default=CLIENTS, help=f"[{CLIENTS}]")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="logs and weights go there, and stay")
    arguments = parser.parse_args()
    engines = arguments.engine or ["hf", "hf"]
    with tempfile.TemporaryDirectory(prefix="rl-plane-soak-") as scratch:
        directory = arguments.keep or Path(scratch)
        directory.mkdir(parents=True, exist_ok=True)
        report = asyncio.run(
            soak(directory.resolve(), arguments.seconds, arguments.seed, engines, arguments.clients)
        )
    print(report.text())
    return 0 if report.good else 1


if __name__ == "__main__":
    sys.exit(main())
