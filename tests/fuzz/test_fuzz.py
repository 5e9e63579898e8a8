"""About a minute of fuzzing. `make fuzz` fuzzes for an hour. What it has found is a case in corpus.json."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from tests.fuzz import fleet, parsers
from tests.fuzz.mutations import as_json, of_message

SEED = 20_261
INPUTS = 1000
ROUNDS = 6
CORPUS = json.loads((Path(__file__).parent / "corpus.json").read_text())


@pytest.mark.parametrize("case", CORPUS, ids=lambda case: f"{case['target']} {case['hex'][:16]}")
def test_a_case_that_was_found_before_is_no_fault_now(case: dict[str, str]) -> None:
    parsers.check(case["target"], bytes.fromhex(case["hex"]))


def test_a_seed_gives_the_same_inputs() -> None:
    value = {"a": [1, {"b": 2}], "c": "d"}
    runs = [
        [of_message(pick, value, as_json) for _ in range(100)] for pick in (random.Random(1), random.Random(1))
    ]
    assert runs[0] == runs[1]
    assert len(set(runs[0])) > 50


@pytest.mark.slow
@pytest.mark.parallel
@pytest.mark.parametrize("seed", [SEED])
def test_parsers_return_or_raise_a_typed_error(seed: int) -> None:
    parsers.fuzz(seed, INPUTS)


@pytest.mark.slow
@pytest.mark.parallel
@pytest.mark.timeout(400)
async def test_a_fleet_survives_mutated_input(tmp_path: Path) -> None:
    assert await fleet.fuzz(tmp_path, SEED, rounds=ROUNDS) == ROUNDS
