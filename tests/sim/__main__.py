"""`python -m tests.sim [--seeds N] [--first SEED]`: runs seeds; a failure prints the seed, the invariant, the trace."""

from __future__ import annotations

import argparse
import sys
import time

from tests.sim.run import run_seed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim")
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    arguments = parser.parse_args()
    start = time.monotonic()
    totals = [0, 0, 0]
    for seed in range(arguments.first, arguments.first + arguments.seeds):
        result = run_seed(seed)
        totals = [totals[0] + result.served, totals[1] + result.committed, totals[2] + result.aborted]
        if result.violation is not None:
            print("\n".join(result.trace))
            print(f"seed {seed}: {result.violation}")
            print(f"again: python -m tests.sim --seeds 1 --first {seed}")
            return 1
    elapsed = time.monotonic() - start
    print(
        f"{arguments.seeds} seeds clean in {elapsed:.0f} s: {totals[0]} completions, {totals[1]} updates committed, "
        f"{totals[2]} refused or aborted"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
