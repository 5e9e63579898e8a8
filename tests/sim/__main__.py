"""`python -m tests.sim [--seeds N] [--first SEED] [--without GUARD]`: a failure prints the trace, the seed and the
invariant; the seed is one command to repeat."""

from __future__ import annotations

import argparse
import os
import sys
import time
from contextlib import nullcontext

from tests.sim.guards import GUARDS, without
from tests.sim.run import run_seed


def main() -> int:
    if os.environ.get("PYTHONHASHSEED") != "0":
        # The order of sets is part of a run, so it must not differ from one to the next.
        os.execve(
            sys.executable,
            [sys.executable, "-m", "tests.sim", *sys.argv[1:]],
            os.environ | {"PYTHONHASHSEED": "0"},
        )
    parser = argparse.ArgumentParser(prog="python -m tests.sim")
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--without", choices=GUARDS, help="switch a guard off: then a violation must be found")
    arguments = parser.parse_args()
    with without(arguments.without) if arguments.without else nullcontext():
        return run(arguments.first, arguments.seeds)


def run(first: int, seeds: int) -> int:
    start = time.monotonic()
    served = committed = refused = 0
    for seed in range(first, first + seeds):
        result = run_seed(seed)
        served, committed, refused = served + result.served, committed + result.committed, refused + result.aborted
        if result.violation is not None:
            print("\n".join(result.trace))
            print(f"seed {seed}: {result.violation}")
            print(f"again: python -m tests.sim --seeds 1 --first {seed}")
            return 1
    print(
        f"{seeds} seeds clean in {time.monotonic() - start:.0f} s: {served} completions, {committed} updates "
        f"committed, {refused} refused or aborted"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
