"""Each guard of the protocol has a test that misses it. A few guards are taken out here, all by `make mutants`."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import pytest

from tests.sim.mutant_list import MUTANTS, Mutant, Seeds
from tests.sim.mutants import Mistake, mutated
from tests.support.paths import ROOT

BOUND_S = 570
"""Each killer takes seconds, of few cores that others use too."""


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_fits_the_code_and_has_a_killer(mutant: Mutant) -> None:
    text = (ROOT / mutant.file).read_text()
    assert mutated(mutant, text) != text
    assert (mutant.killer is None) == bool(mutant.second_line), "either a killer, or why there is none"
    if mutant.killer is not None and not isinstance(mutant.killer, Seeds):
        file, _, name = mutant.killer.partition("::")
        assert f"def {name.partition('[')[0]}(" in (ROOT / file).read_text()


def test_the_names_of_mutants_are_their_own() -> None:
    assert [name for name, count in Counter(one.name for one in MUTANTS).items() if count > 1] == []


def test_a_text_that_the_file_does_not_have_exactly_once_is_a_mistake() -> None:
    mutant = Mutant("m", "f.py", "a", "b", None)
    assert mutated(mutant, "xax") == "xbx"
    for text in ("x", "aa"):
        with pytest.raises(Mistake, match="times"):
            mutated(mutant, text)


@pytest.mark.slow
@pytest.mark.timeout(BOUND_S + 30)
def test_without_a_guard_its_test_fails() -> None:
    command = [sys.executable, "-m", "tests.sim.mutants", "--short"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=BOUND_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("killed ") == sum(one.short for one in MUTANTS)
