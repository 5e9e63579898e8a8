"""`python -m tests.sim [--seeds N] [--first SEED] [--jobs N] [--without GUARD] [--cluster] [--partitions]`: a failure
prints the trace, the seed, the invariant, and the one command that repeats it."""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial

from tests.sim.coverage import TRANSITIONS
from tests.sim.guards import FIXES, GUARDS, without
from tests.sim.run import Result, adapters, run_seed

CHUNKS_PER_PROCESS = 250
"""Runs of one process. A thousand runs leave little behind in its memory; twenty thousand would leave too much."""


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
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes; all cores")
    parser.add_argument(
        "--without", choices=[*GUARDS, *FIXES], help="switch a guard or a fix off: then a violation must be found"
    )
    parser.add_argument("--cluster", action="store_true", help="with what the protocol does not claim to bear")
    parser.add_argument("--partitions", action="store_true", help="in every run, not in some")
    parser.add_argument("--trace", action="store_true", help="print what happened in each seed")
    parser.add_argument("--go-on", action="store_true", help="after a failure too, with one line for each")
    parser.add_argument(
        "--transitions", action="store_true", help="list the transitions that were reached, with seeds"
    )
    arguments = parser.parse_args()
    with without(arguments.without) if arguments.without else nullcontext():
        return run(arguments)


def _results(first: int, seeds: int, jobs: int, cluster: bool, partitions: bool) -> Iterator[Result]:
    """Yields the outcomes in the order of the seeds: the first failure is the same for any number of processes."""
    one = partial(run_seed, cluster=cluster, partitions=partitions)
    adapters()
    gc.freeze()  # what is here now is not looked at after each seed
    if jobs == 1 or seeds == 1:
        yield from map(one, range(first, first + seeds))
        return
    with multiprocessing.get_context("fork").Pool(jobs, maxtasksperchild=CHUNKS_PER_PROCESS) as pool:
        yield from pool.imap(one, range(first, first + seeds), chunksize=4)


def run(arguments: argparse.Namespace) -> int:
    start = time.monotonic()
    served = committed = refused = failed = migrated = 0
    reached: Counter[str] = Counter()
    guard = f" --without {arguments.without}" if arguments.without else ""
    guard += " --cluster" if arguments.cluster else ""
    guard += " --partitions" if arguments.partitions else ""
    for result in _results(
        arguments.first, arguments.seeds, arguments.jobs, arguments.cluster, arguments.partitions
    ):
        served, committed, refused = served + result.served, committed + result.committed, refused + result.refused
        migrated += result.migrated
        reached.update(result.reached)
        if arguments.trace or (result.violation is not None and not arguments.go_on):
            print("\n".join(result.trace))
        if result.violation is not None:
            print(f"seed {result.seed}: {result.violation}", flush=True)
            failed += 1
            if not arguments.go_on:
                print(f"again: python -m tests.sim --seeds 1 --first {result.seed}{guard}")
                return 1
    print(
        f"{arguments.seeds} seeds {'clean' if not failed else f'with {failed} failures'} in "
        f"{time.monotonic() - start:.0f} s: {served} completions, {migrated} of them by several workers, "
        f"{committed} updates committed, {refused} refused or aborted"
    )
    if arguments.without:
        return 1 if failed else 0
    missing = [name for name in TRANSITIONS if name not in reached]
    print(f"{len(reached)} transitions reached; never: {', '.join(missing) or 'none'}")
    if arguments.transitions:
        print("\n".join(f"{count:7d} {name}" for name, count in sorted(reached.items())))
    if unknown := sorted(reached.keys() - set(TRANSITIONS)):
        print(f"not in the list (tests/sim/coverage.py): {', '.join(unknown)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
