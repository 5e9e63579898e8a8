"""The coordinator's shell without NATS: the processes to which it sends a record, and its waits for the silent ones."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from rl_plane.commit.coordinator import Coordinator
from rl_plane.commit.rules import gave_up
from rl_plane.commit.steps import Announce, Answered, RecordAcks, WaitSilent, Watch
from rl_plane.membership.core import Member, Snapshot
from rl_plane.membership.worker_reply import WorkerReply
from rl_plane.protocol.envelope import Reply
from rl_plane.protocol.record import LEASE_MARGIN_S, SERVING_LEASE_S, first_record
from rl_plane.protocol.subjects import Subjects
from tests.support.update_machine import state

RECORD = first_record("model")
DECISION = Announce("gate", RECORD, 7, 2.0)


def member(key: str, incarnation: str) -> Member:
    return Member(key, incarnation, "server", 1, 1, {})


def failed_canary(key: str, gave_up: bool) -> WorkerReply:
    """The state of a worker that has the record's weights, and whose engine failed the canary with them."""
    closed = state(key, RECORD, serves=False)
    return replace(closed, body={**closed.body, "canary": {"passed": False, "gave_up": gave_up}})


class Fleet:
    """A coordinator's client and view: `before` are known, `now` is what the leader says. Time stands still."""

    def __init__(self, before: list[Member], now: list[Member]) -> None:
        self.before, self.now = before, now
        self.asked: list[tuple[str, list[Member]]] = []
        self.frontends: dict[str, Any] = {}
        """The reply of each frontend, by its id. None: it does not answer."""
        self.waits: list[float] = []
        self.states: list[list[WorkerReply]] = []
        """The workers' states, for one question after another."""
        self.record = RECORD
        self.clock = 100.0
        self.holds: Any = None
        self.bus = SimpleNamespace(identity=("server", 1))
        self.subjects = Subjects("ns", "c")
        held = SimpleNamespace(fence=5)
        self.coordinator = Coordinator(self, self, held, clock=lambda: self.clock)  # type: ignore[arg-type]

    async def ask_frontends(self, view: Any, op: str, body: Any, timeout_s: float, fence: int) -> dict[str, Any]:
        assert (op, fence) == ("follow_record", 5)
        return self.frontends

    def snapshot(self) -> Snapshot:
        return Snapshot(1, "print", tuple(self.before))

    async def barrier(self) -> Snapshot:
        return Snapshot(2, "print", tuple(self.now))

    async def ask(self, view: Any, members: Any, op: str, *more: Any, **named: Any) -> list[WorkerReply]:
        self.asked.append((op, list(members)))
        return [WorkerReply(one.instance_id, one.incarnation, "ok") for one in members]

    async def call_all(self, op: str, **more: Any) -> Any:
        assert op == "state"
        return SimpleNamespace(rows=self.states.pop(0))

    async def wait_until(self, holds: Any, left_s: float) -> bool:
        self.holds = holds
        self.waits.append(left_s)
        return True

    async def announce(self) -> RecordAcks:
        event = await self.coordinator.carry_out(DECISION)
        assert isinstance(event, RecordAcks)
        return event


async def test_a_worker_that_joins_during_the_announcement_of_a_decision_hears_it_too() -> None:
    stays, goes, joins = member("a", "1"), member("b", "1"), member("c", "1")
    anew = member("d", "2")
    fleet = Fleet([stays, goes, member("d", "1")], [stays, joins, anew])
    acks = await fleet.announce()
    assert acks.members == {"a": "1", "c": "1", "d": "2"}
    assert {(reply.instance_id, reply.incarnation) for reply in acks.replies} == {
        ("a", "1"),
        ("c", "1"),
        ("d", "2"),
    }
    assert [op for op, _ in fleet.asked] == ["follow_record"] * 2


async def test_a_frontend_that_has_not_acknowledged_is_silent() -> None:
    fleet = Fleet([], [])
    fleet.frontends = {
        "well": Reply("follow_record").to_wire(),
        "refuses": {**Reply("follow_record").to_wire(), "status": "error"},
        "silent": None,
    }
    assert (await fleet.announce()).silent_frontends == ["refuses", "silent"]


async def test_a_watch_ends_when_each_worker_serves_the_version_or_has_given_it_up() -> None:
    fleet = Fleet([], [])
    serves, tries, stops = state("a", RECORD), failed_canary("b", False), failed_canary("b", True)
    fleet.states = [[serves, tries], [serves, stops], [serves, serves]]
    event = await fleet.coordinator.carry_out(Watch(RECORD, 60.0))
    assert event == Answered([serves, stops])


def test_a_worker_gives_up_only_the_version_that_it_has() -> None:
    assert gave_up(failed_canary("a", True), RECORD)
    assert not gave_up(failed_canary("a", False), RECORD)
    assert not gave_up(state("a", RECORD), RECORD)
    other = replace(RECORD, made=replace(RECORD.made, sequence=1))
    assert not gave_up(failed_canary("a", True), other), "it has yet to fetch that version"


async def test_a_silent_worker_is_waited_for_until_its_lease_has_ended() -> None:
    fleet = Fleet([], [member("a", "1")])
    await fleet.announce()
    fleet.clock += 1.5
    await fleet.coordinator.carry_out(WaitSilent({"a": "1"}, []))
    assert fleet.waits == [SERVING_LEASE_S + LEASE_MARGIN_S - 1.5]
    assert not fleet.holds(Snapshot(1, "print", (member("a", "1"),)))
    assert fleet.holds(Snapshot(1, "print", (member("a", "2"),))), "another process knows the decision"
    await fleet.coordinator.carry_out(WaitSilent({}, ["f"]))
    assert not fleet.holds(Snapshot(1, "print", ())), "a frontend that is gone can't be told from a silent one"
    fleet.clock += SERVING_LEASE_S + LEASE_MARGIN_S
    await fleet.coordinator.carry_out(WaitSilent({"a": "1"}, []))
    assert len(fleet.waits) == 2, "the time is over"
