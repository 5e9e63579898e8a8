"""The updates of adapters, by events and expected instructions."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rl_plane.commit.steps import (
    SendOp,
    Write,
)
from rl_plane.errors import (
    Conflict,
    NotFound,
    PlaneError,
)
from rl_plane.protocol.record import (
    CommittedAdapter,
    DecisionRecord,
    VersionSource,
)
from rl_plane.protocol.versions import WeightVersion
from tests.support.update_machine import (
    FILES,
    NEW,
    R1_OPEN,
    V1,
    WHOLE,
    Driver,
    lora,
    update,
)

# ---- adapters ----

X1 = WeightVersion("run-1", 2, "x1", "dx")
WITH_X = replace(
    R1_OPEN,
    made=X1,
    update_id="ux",
    adapters={"x": CommittedAdapter(X1, VersionSource({"backend": "filesystem"}))},
)


@pytest.mark.parametrize(("op", "base"), [("load", R1_OPEN), ("swap", WITH_X)])
def test_an_adapter_is_loaded_or_swapped_beside_the_same_base(op: str, base: DecisionRecord) -> None:
    driver = Driver(lora(op), base)
    outcome = driver.outcome()
    assert driver.phases == WHOLE
    assert driver.one(SendOp, "prepare").body["target"] == {"kind": "lora", "op": op, "name": "x"}
    record = driver.one(Write, "decide").record
    assert (record.version, record.source) == (base.version, base.source)
    assert record.adapters == {"x": CommittedAdapter(outcome.version, VersionSource(FILES))}
    assert outcome.version == WeightVersion("run-1", base.sequence + 1, str(base.sequence + 1), NEW)


def test_an_adapter_is_unloaded_without_a_transport() -> None:
    driver = Driver(lora("unload", policy={"staging": "host"}), WITH_X)
    driver.outcome()
    assert driver.phases == WHOLE, "the workers are asked all the same"
    assert driver.one(SendOp, "prepare").body["transport"] is None
    record = driver.one(Write, "decide").record
    assert (record.adapters, record.version, record.sequence) == ({}, V1, 3)
    assert record.made_source == VersionSource(None)


@pytest.mark.parametrize(
    ("op", "base", "error", "field"),
    [
        ("load", WITH_X, Conflict, "target.op"),
        ("swap", R1_OPEN, NotFound, "target.name"),
        ("unload", R1_OPEN, NotFound, "target.name"),
    ],
)
def test_an_impossible_adapter_change_is_refused_before_any_worker_is_asked(
    op: str, base: DecisionRecord, error: type[PlaneError], field: str
) -> None:
    driver = Driver(lora(op), base)
    assert driver.error(error).facts["field"] == field
    assert not driver.all(SendOp, "prepare")
    assert not driver.all(Write)


@pytest.mark.parametrize("adapters", ["keep", "drop"])
def test_a_base_update_says_what_becomes_of_the_adapters(adapters: str) -> None:
    driver = Driver(update(target={"kind": "base", "adapters": adapters}), WITH_X)
    driver.outcome()
    record = driver.one(Write, "decide").record
    assert record.adapters == (WITH_X.adapters if adapters == "keep" else {})
    assert (record.version.sequence, record.made) == (3, record.version)


def test_a_rolling_adapter_is_served_beside_the_state_before() -> None:
    driver = Driver(lora("swap", policy={"barrier": "rolling"}), WITH_X)
    driver.outcome()
    assert driver.one(Write, "decide").record.rolling_from == WITH_X.held
