"""Mutants of the protocol's guards: each takes one guard out of a copy of the packages, and a named test must fail.

`python -m tests.sim.mutants [--only NAME] [--short]` prints one row for each mutant, and fails with the names of the
mutants that survive. A guard that no test misses either goes, gets a test, or is listed as a second line of defence,
with the first line that covers it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.sim.mutant_list import MUTANTS, Mutant, Seeds
from tests.support.paths import ROOT

COPIED = ("rl_plane", "worker", "frontend", "tests", "pyproject.toml")
KILL_S = 300
"""The bound in seconds of a killer test, which takes seconds. It ends a test that waits for ever."""
PLUGINS = ("-p", "pytest_asyncio.plugin", "-p", "pytest_timeout", "-p", "no:cacheprovider")
TESTS_FAILED = 1
"""pytest's and the simulation's exit status. Any other one is a mistake in the list."""


class Mistake(Exception):
    """The list does not fit the code."""


@dataclass(frozen=True)
class Row:
    mutant: Mutant
    result: str
    """`killed`, `SURVIVES`, or `second line`."""
    seconds: float

    def __str__(self) -> str:
        how = self.mutant.second_line or str(self.mutant.killer).removeprefix("tests/")
        return f"{self.result:<11} {self.seconds:6.1f} s  {self.mutant.name:<56} {self.mutant.file:<26} {how}"


def mutated(mutant: Mutant, text: str) -> str:
    """The file with its guard taken out. Mistake: what is to be replaced is not there exactly once."""
    found = text.count(mutant.old)
    if found != 1:
        raise Mistake(f"{mutant.name}: {mutant.file} has the old text {found} times:\n{mutant.old}")
    if mutant.new == mutant.old:
        raise Mistake(f"{mutant.name} changes nothing")
    return text.replace(mutant.old, mutant.new)


def copy_to(folder: Path) -> None:
    """Copies the packages that the killers need, with their times, so that compiled files stay valid."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name)
        else:
            shutil.copy2(source, folder / name)


def run(command: Sequence[str], folder: Path) -> tuple[int, str]:
    """The exit status and the output of a killer, in the copy."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONHASHSEED": "0"}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # most plugins take longer to load than a killer takes
    try:
        done = subprocess.run(
            [sys.executable, *command],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=KILL_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return TESTS_FAILED, "it took too long"
    return done.returncode, done.stdout[-3000:] + done.stderr[-1000:]


def commands(killers: Iterable[str | Seeds]) -> list[list[str]]:
    """One call of pytest for all tests, one of the simulation for each range of seeds."""
    tests = sorted({one for one in killers if isinstance(one, str)})
    seeds = sorted({(one.first, one.count) for one in killers if isinstance(one, Seeds)})
    found = [["-m", "tests.sim", "--first", str(first), "--seeds", str(count)] for first, count in seeds]
    if tests:
        found.append(["-m", "pytest", *PLUGINS, "-q", "-x", *tests])
    return found


def check_unchanged(mutants: Iterable[Mutant]) -> None:
    """The killers pass on the code as it is."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        copy_to(Path(name))
        for command in commands([one.killer for one in mutants if one.killer is not None]):
            status, output = run(command, Path(name))
            if status != 0:
                raise Mistake(f"a killer fails on the unchanged code, with status {status}:\n{output}")


def judged(mutant: Mutant) -> Row:
    """Applies the mutant to a copy of its own, and runs its killer there."""
    start = time.monotonic()
    text = mutated(mutant, (ROOT / mutant.file).read_text())
    if mutant.killer is None:
        return Row(mutant, "second line", 0.0)
    with tempfile.TemporaryDirectory(prefix="mutant-") as name:
        copy_to(Path(name))
        (Path(name) / mutant.file).write_text(text)
        [command] = commands([mutant.killer])
        status, output = run(command, Path(name))
    if status not in (0, TESTS_FAILED):
        raise Mistake(f"{mutant.name}: its killer ends with status {status}:\n{output}")
    return Row(mutant, "killed" if status == TESTS_FAILED else "SURVIVES", time.monotonic() - start)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim.mutants")
    parser.add_argument("--only", action="append", help="the mutants with this name, or whose names begin with it")
    parser.add_argument("--short", action="store_true", help="ten mutants whose killers take a moment")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="mutants at once; all cores")
    arguments = parser.parse_args()
    chosen = [one for one in MUTANTS if one.short or not arguments.short]
    if arguments.only:
        chosen = [one for one in chosen if one.name.startswith(tuple(arguments.only))]
    if not chosen:
        parser.error("there is no such mutant")
    try:
        check_unchanged(chosen)
        survivors = []
        with ThreadPoolExecutor(arguments.jobs) as pool:
            for row in pool.map(judged, chosen):
                print(row, flush=True)
                if row.result == "SURVIVES":
                    survivors.append(row.mutant.name)
    except Mistake as mistake:
        print(mistake)
        return 2
    second = sum(one.killer is None for one in chosen)
    print(
        f"{len(chosen) - second - len(survivors)} mutants killed, {second} second lines, {len(survivors)} survive"
    )
    if survivors:
        print("survivors: " + ", ".join(survivors))
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
