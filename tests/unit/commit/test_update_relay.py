"""The coordinator plans from whom each worker fetches an update, and notes what came from where."""

from __future__ import annotations

from typing import Any

import pytest

from rl_plane.commit.history import SOURCES_OF_A_WORKER, WORKERS_WITH_SOURCES, UpdateEntry, short_sources
from rl_plane.commit.steps import Answered, SendOp
from rl_plane.errors import DeadlineExceeded
from rl_plane.protocol.record import DecisionRecord, VersionSource
from rl_plane.protocol.relay import RelayPlan, SourceUse, largest, summed
from rl_plane.protocol.update_requests import ReceiveRequest
from rl_plane.protocol.versions import WeightVersion
from tests.support.update_machine import MEMBERS, NEW, Driver, bad, ok, update

NIXL = {"backend": "nixl", "host": "10.0.0.9", "port": 5000, "secret": "s"}
OLD = WeightVersion("run-1", 0, "initial", "blake3:" + "0" * 64)


def sent(driver: Driver, op: str) -> list[SendOp]:
    return [one for one in driver.trace if isinstance(one, SendOp) and one.op == op]


def test_each_worker_gets_its_own_plan() -> None:
    driver = Driver(update(transport=NIXL))
    driver.run()
    assert list(sent(driver, "open_relay")[0].workers) == list(MEMBERS)
    (prepared,) = sent(driver, "prepare_update")
    plans = {key: RelayPlan.model_validate(more["relay"][0]) for key, more in prepared.each.items()}
    assert plans.keys() == MEMBERS.keys()
    assert sorted(plan.share for plan in plans.values() if plan.share is not None) == list(range(len(MEMBERS)))
    for key, plan in plans.items():
        assert {peer.worker for peer in plan.peers} == MEMBERS.keys() - {key}
        asked = ReceiveRequest.model_validate({**prepared.body, **prepared.each[key]})
        assert asked.relay == (plan,)


def test_a_worker_that_serves_no_peers_fetches_from_the_trainer() -> None:
    first, second, *others = MEMBERS

    def places(asked: SendOp) -> Answered:
        found: dict[str, Any] = {
            key: {"host": key, "address": "10.0.0.1", "port": 1 + at} for at, key in enumerate(others)
        }
        rows = [ok(key, relay=[place]) for key, place in found.items()]
        return Answered([ok(first, relay=[]), bad(second, DeadlineExceeded("it is silent")), *rows])

    driver = Driver(update(transport=NIXL), prepare=[places, None])
    driver.run()
    (prepared,) = sent(driver, "prepare_update")
    assert list(prepared.workers) == list(MEMBERS), "all take part in the update"
    assert first not in prepared.each
    assert second not in prepared.each


@pytest.mark.parametrize("count", [1, 2])
def test_each_host_of_an_engine_over_several_gets_a_plan(count: int) -> None:
    """The hosts of one engine fetch from one another too, also where it is the only one."""
    large, *others = list(MEMBERS)[:count]

    def places(asked: SendOp) -> Answered:
        assert asked.body == {"workers": len(MEMBERS)}
        two = [{"host": f"host{at}", "address": "10.0.0.1", "port": 1 + at} for at in range(2)]
        rows = [ok(key, relay=[{"host": key, "address": "10.0.0.2", "port": 1}]) for key in others]
        return Answered([ok(large, relay=two), *rows])

    driver = Driver(update(transport=NIXL), prepare=[places, None])
    driver.run()
    (prepared,) = sent(driver, "prepare_update")
    assert set(prepared.each) == {large, *others}
    first, second = prepared.each[large]["relay"]
    assert (first["worker"], second["worker"]) == (large, f"{large}/1")
    assert {peer["worker"] for peer in first["peers"]} == {f"{large}/1", *others}
    plans = [plan for more in prepared.each.values() for plan in more["relay"]]
    assert sorted(plan["share"] for plan in plans) == list(range(1 + count)), "each host takes a share"


def test_the_bytes_of_each_source_are_summed_over_the_hosts_of_an_engine() -> None:
    def use(source: str, nbytes: int, seconds: float) -> SourceUse:
        return SourceUse(source=source, bytes=nbytes, seconds=seconds)

    took = [use("trainer", 5, 2.0), use("w/1", 3, 1.0), use("trainer", 4, 3.0)]
    assert summed(took) == [use("trainer", 9, 3.0), use("w/1", 3, 1.0)]


@pytest.mark.parametrize(
    "body",
    [
        {"transport": NIXL, "policy": {"relay": False}},
        {"transport": {**NIXL, "shares": [{"rank": 0}, {"rank": 1}]}},
        {"transport": {"backend": "filesystem", "path": "/w"}},
        {"transport": NIXL, "policy": {"staging": "none"}},
        {"transport": NIXL, "target": {"kind": "lora", "op": "load", "name": "a"}},
        {"transport": NIXL, "encoding": "delta", "base": OLD.digest, "digest": NEW},
        {"transport": NIXL, "encoding": "partial", "base": OLD.digest, "digest": NEW},
    ],
)
def test_other_updates_have_no_plan(body: dict[str, Any]) -> None:
    driver = Driver(update(**body), DecisionRecord(OLD, VersionSource(None), "", OLD))
    driver.outcome()
    assert sent(driver, "open_relay") == []
    assert all(not one.each for one in sent(driver, "prepare_update"))


def test_the_sources_in_an_entry_are_bounded() -> None:
    many = [SourceUse(source=f"worker-{n}", bytes=n, seconds=float(n)) for n in range(9)]
    short = largest(many, SOURCES_OF_A_WORKER)
    assert len(short) == SOURCES_OF_A_WORKER
    assert sum(use["bytes"] for use in short) == sum(use["bytes"] for use in many)
    assert short[-1] == SourceUse(source="others", bytes=15, seconds=5.0)
    assert largest(many[:4], SOURCES_OF_A_WORKER) == many[3::-1]
    found = short_sources({f"w{n:04}": many for n in range(1000)})
    assert len(found) == WORKERS_WITH_SOURCES
    entry = UpdateEntry("id", "label", "running", sources=found)
    assert UpdateEntry.decode(entry.encode()).sources == found
    assert len(entry.encode()) < 30_000
    assert entry.to_wire()["sources"] == found
