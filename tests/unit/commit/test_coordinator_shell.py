"""The coordinator's shell without NATS: the processes to which it sends a record, and its waits for the silent ones."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from rl_plane.commit.coordinator import Coordinator
from rl_plane.commit.rules import evaluate_prepare, gave_up, needs_of
from rl_plane.commit.steps import Announce, Answered, RecordAcks, SendOp, WaitSilent, Watch
from rl_plane.errors import EngineFailed, InvalidRequest, PlaneError, Unsupported, UpdateAborted
from rl_plane.membership.core import Member, Snapshot
from rl_plane.membership.worker_reply import WorkerReply
from rl_plane.protocol.envelope import Reply
from rl_plane.protocol.record import LEASE_MARGIN_S, SERVING_LEASE_S, first_record
from rl_plane.protocol.subjects import Subjects
from rl_plane.protocol.update_requests import UpdatePolicy
from tests.support.update_machine import bad, ok, state

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
        self.coordinator = Coordinator(
            self,  # type: ignore[arg-type]
            self,  # type: ignore[arg-type]
            held,  # type: ignore[arg-type]
            clock=lambda: self.clock,
            stop_s=0.05,
        )

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
    assert not fleet.holds(Snapshot(1, "print", ())), "a dead frontend can't be distinguished from a silent one"
    fleet.clock += SERVING_LEASE_S + LEASE_MARGIN_S
    await fleet.coordinator.carry_out(WaitSilent({"a": "1"}, []))
    assert len(fleet.waits) == 2, "the time is over"


class ReceivingFleet(Fleet):
    """`a` refuses at once. `b` receives until it is stopped. `c` hangs."""

    def __init__(self, refusal: PlaneError) -> None:
        members = [member(key, f"i{key}") for key in "abc"]
        super().__init__(members, members)
        self.refusal = refusal
        self.told = asyncio.Event()

    async def ask(self, view: Any, members: Any, op: str, *more: Any, **named: Any) -> list[WorkerReply]:
        self.asked.append((op, list(members)))
        if op == "abort_update":
            self.told.set()
            await asyncio.Event().wait()  # for the answer of `c`
        heard = more[3]
        heard(bad("a", self.refusal))
        await self.told.wait()
        heard(bad("b", UpdateAborted("the update was aborted")))
        await asyncio.Event().wait()
        raise AssertionError


@pytest.mark.parametrize("policy", [UpdatePolicy(), UpdatePolicy(on_prepare_failure="exclude", min_ready=3)])
@pytest.mark.parametrize(
    "refusal", [InvalidRequest("outside", field="transport.path"), Unsupported("no such task")]
)
async def test_a_refusal_that_decides_an_update_stops_the_workers_that_receive(
    policy: UpdatePolicy, refusal: PlaneError
) -> None:
    fleet = ReceivingFleet(refusal)
    asked = SendOp("prepare", "prepare_update", {}, list("abc"), 300.0, needs=needs_of("u9", "abc", policy))
    async with asyncio.timeout(30):
        event = await fleet.coordinator.carry_out(asked)
    assert isinstance(event, Answered)
    assert [(op, len(members)) for op, members in fleet.asked] == [("prepare_update", 3), ("abort_update", 3)]
    assert [(reply.instance_id, reply.stopped) for reply in event.replies] == [
        ("a", False),
        ("b", True),
        ("c", True),
    ]
    assert "has not answered" in str(event.replies[2].error)
    # The stopped workers are not the cause.
    kind = type(refusal) if policy.on_prepare_failure == "abort" else UpdateAborted
    with pytest.raises(kind):
        evaluate_prepare(event.replies, set("abc"), policy, None)


def test_an_update_can_still_be_committed_without_a_worker_that_is_not_needed() -> None:
    asked, exclude = 3, UpdatePolicy(on_prepare_failure="exclude", min_ready=2)
    assert needs_of("u9", "ab", UpdatePolicy()).are_lost({"a"}, asked)
    assert not needs_of("u9", "ab", UpdatePolicy()).are_lost({"c"}, asked), "it is closed, and does not count"
    assert not needs_of("u9", "abc", exclude).are_lost({"a"}, asked)
    assert needs_of("u9", "abc", exclude).are_lost({"a", "b"}, asked)
    assert evaluate_prepare(
        [bad("c", EngineFailed("full")), *(ok(key, digest="d", refetchable=True) for key in "ab")],
        set("ab"),
        exclude,
        None,
    ).excluded == ["c"]
