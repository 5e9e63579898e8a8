"""The committed states that a frontend knows, and the tokens that it delivers. Pure: the caller passes the time."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest

from frontend.frontend_limits import LIMITS
from frontend.routing.committed import MAX_HISTORY, History, key_of
from frontend.routing.fleet_status import FleetStatus, WorkerStatus
from frontend.routing.span_check import SpanCheck
from rl_plane.bus.connection import Bus
from rl_plane.bus.scatter import Gather
from rl_plane.errors import StaleWeights, Unavailable, Unlabelled
from rl_plane.membership.core import Changed, Member
from rl_plane.membership.view import MembershipView
from rl_plane.protocol.generation import GenerateDelta, VersionSpan, unwitnessed
from rl_plane.protocol.record import DecisionRecord, Held
from rl_plane.protocol.subjects import Subjects
from tests.support.committed_records import record, rolling, span, version


def history(*records: DecisionRecord) -> History:
    """Each became known a second after the one before."""
    made = History()
    for number, one in enumerate(records):
        made.add(one, float(number))
    return made


# ---- places ----


def test_spans_of_committed_versions_pass() -> None:
    known = history(record(4), record(5), record(6))
    known.check([span(5, 0, 3)], 3, since=2)
    known.check([span(5, 0, 3), span(6, 3, 4)], 4, since=2)
    known.check([span(4, 0, 1), span(6, 1, 4)], 4, since=1)
    known.check([], 0, since=3)


@pytest.mark.parametrize(
    ("spans", "tokens"),
    [
        ([], 1),
        ([span(5, 0, 2)], 3),
        ([span(5, 0, 4)], 3),
        ([span(5, 1, 3)], 3),
        ([span(5, 0, 1), span(5, 2, 3)], 3),
        ([span(5, 0, 0), span(5, 0, 3)], 3),
        ([span(4, 0, 3)], 3),  # it was replaced before the request began
        ([span(6, 0, 1), span(5, 1, 3)], 3),
        ([span(7, 0, 3)], 3),
        ([span(5, 0, 3).model_copy(update={"digest": "blake3:other"})], 3),
        ([span(5, 0, 3, "other")], 3),
        ([span(5, 0, 3, a=5)], 3),
    ],
)
def test_other_spans_are_not_delivered(spans: list[VersionSpan], tokens: int) -> None:
    with pytest.raises(Unlabelled):
        history(record(4), record(5), record(6)).check(spans, tokens, since=2)


def test_a_base_stays_committed_while_adapters_change() -> None:
    known = history(record(1), record(1, a=2), record(1, a=3), record(4, a=3), record(4))
    assert known.count == 5
    base, first = known.interval(key_of(version(1))), known.interval(key_of(version(1), "a", version(2)))
    assert base is not None
    assert first is not None
    assert ((base.first, base.last), (first.first, first.last)) == ((1, 3), (2, 2))
    known.check([span(1, 0, 9)], 9, since=1)
    known.check([span(1, 0, 9)], 9, since=3)  # asked for after two updates of the adapter
    known.check([span(1, 0, 2, a=2), span(1, 2, 4, a=3), span(4, 4, 6, a=3)], 6, since=2)
    for spans, since in (
        ([span(1, 0, 9)], 4),
        ([span(1, 0, 9, a=2)], 3),
        ([span(1, 0, 2, a=3), span(1, 2, 9, a=2)], 2),
        ([span(4, 0, 9, a=2)], 1),  # they were never committed together
        ([span(4, 0, 9, a=3)], 5),
    ):
        with pytest.raises(Unlabelled):
            known.check(spans, 9, since)


def test_two_states_are_served_while_an_update_rolls() -> None:
    known = history(record(1))
    known.add(rolling(record(2), record(1)), 1.0)
    for spans in ([span(1, 0, 3)], [span(2, 0, 3)], [span(1, 0, 1), span(2, 1, 3)]):
        known.check(spans, 3, since=2)
    known.check([span(2, 0, 1), span(1, 1, 3)], 3, since=2)  # on two workers, one after the other
    known.add(record(2), 2.0)
    known.check([span(1, 0, 1), span(2, 1, 3)], 3, since=2)
    with pytest.raises(Unlabelled):
        known.check([span(1, 0, 3)], 3, since=known.count)


def test_opening_is_no_place_of_its_own() -> None:
    known = history(record(1), replace(record(2), open=False), record(2))
    assert known.count == 2


def test_the_history_is_bounded_and_keeps_what_is_committed() -> None:
    known = history(*(record(sequence) for sequence in range(MAX_HISTORY + 10)))
    assert known.interval(key_of(version(9))) is None
    last = known.interval(key_of(version(10)))
    assert last is not None
    assert (last.first, last.last) == (11, 11)
    many = record(1, **{f"a{number}": number for number in range(MAX_HISTORY + 5)})
    known.add(many, 0.0)
    assert all(
        known.interval(key_of(version(1), name, one)) is not None for name, one in many.held.adapters.items()
    )


def test_greedy_finds_a_choice_of_places_where_there_is_one() -> None:
    """Against trying all choices, on random histories."""
    rng = random.Random(7)
    for _ in range(300):
        states = [record(0)]
        known = history(*states)
        for sequence in range(1, 6):
            before = states[-1]
            base = sequence if rng.random() < 0.4 else before.version.sequence
            adapters = {name: one.version.sequence for name, one in before.adapters.items()}
            if base != sequence:
                adapters["a"] = sequence
            states.append(record(base, **adapters))
            if rng.random() < 0.3:
                known.add(rolling(states[-1], before), 0.0)
            known.add(states[-1], 0.0)
        intervals = [known.interval(key_of(version(state.version.sequence), *_adapter(state))) for state in states]
        picked = [rng.randrange(len(states)) for _ in range(3)]
        since = rng.randrange(known.count + 1)
        spans = [
            span(
                states[index].version.sequence,
                place,
                place + 1,
                **({"a": states[index].adapters["a"].version.sequence} if states[index].adapters else {}),
            )
            for place, index in enumerate(picked)
        ]
        reachable = {since}
        for index in picked:
            interval = intervals[index]
            assert interval is not None
            reachable = {
                place
                for place in range(interval.first, interval.last + 1)
                if any(before <= place for before in reachable)
            }
        try:
            known.check(spans, 3, since)
            passed = True
        except Unlabelled:
            passed = False
        assert passed == bool(reachable)


def _adapter(state: DecisionRecord) -> tuple[Any, ...]:
    return ("a", state.adapters["a"].version) if state.adapters else ()


# ---- delta by delta ----


def delta(tokens: int, *spans: VersionSpan, end: bool = False) -> GenerateDelta:
    return GenerateDelta(token_ids=[7] * tokens, spans=list(spans), finish_reason="stop" if end else None)


def test_labels_are_checked_as_they_come() -> None:
    known = history(record(1))
    labels = SpanCheck(known, None, known.count)
    labels.take(delta(0), 1.0)
    labels.take(delta(2, span(1, 0, 2)), 1.0)
    labels.take(delta(3), 1.0)
    known.add(record(2), 2.0)
    labels.take(delta(2, span(1, 0, 6), span(2, 6, 7)), 2.0)
    labels.take(delta(1), 2.0)
    labels.take(delta(1, span(1, 0, 6), span(2, 6, 9), end=True), 2.0)


def test_a_request_may_end_before_its_first_token() -> None:
    known = history(record(1))
    SpanCheck(known, None, known.count).take(delta(0, end=True), 0.0)


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (None, delta(1)),
        (None, delta(1, span(2, 0, 1))),
        (None, delta(1, span(1, 0, 1, a=3))),
        (None, delta(0, span(1, 0, 1))),
        (delta(2, span(1, 0, 2)), delta(1, span(1, 0, 2))),
        (delta(2, span(1, 0, 2)), delta(1, end=True)),
        (delta(2, span(1, 0, 2)), delta(1, span(4, 0, 3))),  # not what it said before
        (delta(2, span(1, 0, 2)), delta(1, span(1, 0, 1), span(4, 1, 3))),  # of a token that was delivered
        (delta(2, span(1, 0, 1), span(4, 1, 2)), delta(1, span(4, 0, 3))),
    ],
)
def test_an_unlabelled_delta_is_not_delivered(first: GenerateDelta | None, then: GenerateDelta) -> None:
    known = history(record(1), record(1, a=3), record(4, a=3))
    labels = SpanCheck(known, None, 1)
    if first is not None:
        labels.take(first, 0.0)
    with pytest.raises(Unlabelled):
        labels.take(then, 0.0)


def test_tokens_without_a_version_are_accepted_from_an_engine_that_can_not_witness() -> None:
    known = history(record(1))
    labels = SpanCheck(known, "a", known.count, witnesses=False)
    labels.take(delta(0), 0.0)
    labels.take(delta(2, *unwitnessed(2)), 0.0)
    labels.take(delta(3), 0.0)
    labels.take(delta(1, *unwitnessed(6), end=True), 0.0)
    SpanCheck(known, None, known.count, witnesses=False).take(delta(0, end=True), 0.0)


@pytest.mark.parametrize(
    ("witnesses", "then"),
    [
        (True, delta(1, *unwitnessed(1))),
        (False, delta(1)),
        (False, delta(1, span(1, 0, 1))),
        (False, delta(2, *unwitnessed(1))),
        (False, delta(2, end=True)),
    ],
)
def test_labels_that_contradict_the_engines_witness_are_refused(witnesses: bool, then: GenerateDelta) -> None:
    known = history(record(1))
    with pytest.raises(Unlabelled):
        SpanCheck(known, None, known.count, witnesses=witnesses).take(then, 0.0)


def test_tokens_are_of_the_adapter_that_was_asked_for() -> None:
    known = history(record(1, a=2, b=3))
    SpanCheck(known, "a", 1).take(delta(1, span(1, 0, 1, a=2)), 0.0)
    for wrong in (span(1, 0, 1), span(1, 0, 1, b=3)):
        with pytest.raises(Unlabelled):
            SpanCheck(known, "a", 1).take(delta(1, wrong), 0.0)


# ---- workers that missed an update ----


def test_a_stream_that_stays_on_what_was_replaced_is_cut() -> None:
    known = history(record(1))
    labels = SpanCheck(known, None, 1)
    labels.take(delta(1, span(1, 0, 1)), 0.0)
    known.add(replace(record(2), open=False), 10.0)
    labels.take(delta(1), 100.0)  # not final: an update may take its time
    known.add(record(2), 100.0)
    labels.take(delta(1), 100.0 + LIMITS.stale_after_s)
    with pytest.raises(StaleWeights) as caught:
        labels.take(delta(1), 100.1 + LIMITS.stale_after_s)
    assert caught.value.http_status == 503
    assert caught.value.facts["retry_after_s"]
    assert caught.value.facts["sequence"] == 1


def test_a_stream_that_takes_the_update_continues() -> None:
    known = history(record(1))
    labels = SpanCheck(known, None, 1)
    labels.take(delta(1, span(1, 0, 1)), 0.0)
    known.add(record(2), 10.0)
    labels.take(delta(2, span(1, 0, 2), span(2, 2, 3)), 100.0)
    labels.take(delta(2), 200.0)
    labels.take(delta(0, span(1, 0, 2), span(2, 2, 5), end=True), 300.0)


def test_updates_in_quick_succession_do_not_keep_a_stale_stream_alive() -> None:
    known = history(record(1))
    labels = SpanCheck(known, None, 1)
    labels.take(delta(1, span(1, 0, 1)), 0.0)
    for sequence in range(2, 10):
        known.add(record(sequence), float(sequence))
    known.add(replace(record(10), open=False), 8.0)
    with pytest.raises(StaleWeights):
        labels.take(delta(1), 2.1 + LIMITS.stale_after_s)


def test_tokens_of_a_worker_from_before_its_swap_are_delivered_however_late_they_come() -> None:
    holds = 1
    known = history(record(1))
    labels = SpanCheck(known, None, 1, lambda span: span.sequence == holds)
    labels.take(delta(1, span(1, 0, 1)), 0.0)
    known.add(record(2), 10.0)
    known.add(record(3), 20.0)
    with pytest.raises(StaleWeights):
        labels.take(delta(1), 100.0)
    holds = 3
    kept = SpanCheck(known, None, 1, lambda span: span.sequence == holds)
    kept.take(delta(2, span(1, 0, 2)), 100.0)
    kept.take(delta(2, span(1, 0, 2), span(2, 2, 4)), 100.0)
    kept.take(delta(1), 100.0)
    kept.take(delta(0, span(1, 0, 2), span(2, 2, 5), end=True), 100.0)


@pytest.mark.parametrize(
    ("held", "made", "same"),
    [
        (record(1), span(1, 0, 4), True),
        (record(1, a=2), span(1, 0, 4), True),
        (record(1, a=2), span(1, 0, 4, a=2), True),
        (record(2), span(1, 0, 4), False),
        (record(1, "other"), span(1, 0, 4), False),
        (record(1, a=3), span(1, 0, 4, a=2), False),
        (record(3, a=2), span(1, 0, 4, a=2), False),
        (record(1), span(1, 0, 4, a=2), False),
        (None, span(1, 0, 4), False),
    ],
)
def test_the_status_of_a_worker_names_the_weights_that_it_serves(
    held: DecisionRecord | None, made: VersionSpan, same: bool
) -> None:
    wire = held.held.to_wire() if held is not None else {"version": None, "adapters": {}}
    admission = {"open": True, "reasons": []}
    status = WorkerStatus.from_wire({**wire, "admission": admission, "running": 0, "waiting": 0}, "i", 0.0)
    assert status.holds(made) == same


class OneWorker:
    """Stands in for a client with its bus, and for the view of a fleet whose only member is `worker`. The worker
    answers no question."""

    subjects = Subjects("ns", "engine")
    record = None

    def __init__(self, worker: Member) -> None:
        self.worker, self.bus = worker, self

    async def subscribe(self, subject: str, callback: Any) -> None:
        self.hear = callback

    async def flush(self) -> None: ...

    def on_reconnect(self, callback: Any) -> None:
        self.reconnected = callback

    def listen(self, callback: Any) -> Callable[[], None]:
        self.changed = callback
        return lambda: None

    def snapshot(self) -> list[Member]:
        return [self.worker]

    def member(self, instance_id: str) -> Member | None:
        return self.worker if instance_id == self.worker.instance_id else None

    async def call_all(self, op: str, **how: Any) -> Any:
        raise Unavailable("it does not answer")

    async def report(self, wire: dict[str, Any]) -> None:
        """Sends the worker's status message."""
        told = {**wire, "instance_id": self.worker.instance_id, "incarnation": self.worker.incarnation}
        subject = self.subjects.status(self.worker.instance_id)
        await self.hear(SimpleNamespace(data=msgpack.packb(told), subject=subject))


class LeavesWhileAsked(OneWorker):
    """The worker answers `state`. It leaves the fleet before the answer is read, because the question also waits for
    another worker. With `newcomer`, the worker has started again by then."""

    def __init__(self, worker: Member, newcomer: Member | None) -> None:
        super().__init__(worker)
        self.asked, self.newcomer = worker, newcomer

    def member(self, instance_id: str) -> Member | None:
        return self.newcomer

    async def call_all(self, op: str, **how: Any) -> Any:
        self.changed(Changed(self.asked, self.newcomer))
        admission = {"open": True, "reasons": []}
        body = {**record(1).held.to_wire(), "admission": admission, "running": 0, "waiting": 0}
        row = SimpleNamespace(
            instance_id=self.asked.instance_id, incarnation=self.asked.incarnation, status="ok", body=body
        )
        return SimpleNamespace(rows=[row])


@pytest.mark.parametrize("newcomer", [None, Member("w", "j", "s", 1, 0, {})])
async def test_the_answer_of_a_worker_that_has_left_is_no_status(newcomer: Member | None) -> None:
    fleet: Any = LeavesWhileAsked(Member("w", "i", "s", 1, 0, {}), newcomer)
    known = FleetStatus(fleet, fleet)
    heard: list[str] = []
    known.on_status.append(lambda instance_id, status: heard.append(instance_id))
    await known.start()
    await known.stop()
    assert heard == []


async def test_a_worker_makes_no_more_tokens_of_a_version_that_it_has_replaced() -> None:
    """This holds even while a frontend that was cut off asks the worker anew. Another process's report does not
    count."""
    one, other = (Member("w", incarnation, "s", 1, 0, {}) for incarnation in ("i", "j"))
    fleet: Any = OneWorker(one)
    known = FleetStatus(fleet, fleet)
    await known.start()
    admission = {"open": True, "reasons": []}
    assert known.may_make(one, span(1, 0, 4))
    for held in (record(1), record(2)):
        status = {"admission": admission, "running": 0, "waiting": 0}
        await fleet.report({**held.held.to_wire(), **status})
        assert known.may_make(one, span(1, 0, 4)) == (held == record(1))
    await fleet.reconnected()
    assert not known.may_make(one, span(1, 0, 4))
    assert known.may_make(other, span(1, 0, 4))
    fleet.changed(Changed(one, None))
    assert known.may_make(one, span(1, 0, 4))
    await known.stop()


def test_an_adapters_update_is_nothing_to_the_base() -> None:
    known = history(record(1, a=2))
    base, adapter = SpanCheck(known, None, 1), SpanCheck(known, "a", 1)
    base.take(delta(1, span(1, 0, 1)), 0.0)
    adapter.take(delta(1, span(1, 0, 1, a=2)), 0.0)
    known.add(record(1, a=3), 1.0)
    base.take(delta(1), 100.0)
    with pytest.raises(StaleWeights):
        adapter.take(delta(1), 100.0)


def test_both_states_of_a_rolling_update_are_good_until_it_ends() -> None:
    known = history(record(1))
    labels = SpanCheck(known, None, 1)
    labels.take(delta(1, span(1, 0, 1)), 0.0)
    known.add(rolling(record(2), record(1)), 1.0)
    labels.take(delta(1), 100.0)
    known.add(record(2), 100.0)
    labels.take(delta(1), 101.0)
    with pytest.raises(StaleWeights):
        labels.take(delta(1), 110.0)


# ---- a store that goes back ----


def view() -> MembershipView:
    bus = Bus("nats://nowhere", "test")
    return MembershipView(bus, Subjects("ns", "c"), Gather(bus))


def test_the_record_never_goes_back() -> None:
    told: list[int] = []
    known = view()
    stop = known.listen_record(lambda one: told.append(one.sequence))
    known.take_record(record(1), 11)
    known.take_record(record(2), 12)
    known.take_record(record(1), 11)  # a read that the feed has overtaken
    known.take_record(record(1), 5_000)  # a store that was made anew, or that lost a write
    assert (known.record, told) == (record(2), [1, 2])
    known.take_record(record(2), 5_001)  # written back
    assert told == [1, 2]
    known.take_record(record(1, a=3), 5_002)
    assert told == [1, 2, 3]
    stop()
    known.take_record(record(4), 5_003)
    assert (known.record, told) == (record(4), [1, 2, 3])


def test_an_opened_record_is_not_closed_again() -> None:
    known = view()
    known.take_record(replace(record(2), open=False), 12)
    known.take_record(record(2), 13)
    known.take_record(replace(record(2), open=False), 12)
    assert known.record == record(2)


def test_the_later_write_counts_if_two_decisions_have_one_number() -> None:
    known = view()
    known.take_record(record(2), 12)
    other = replace(record(2), update_id="another")
    known.take_record(other, 12)
    assert known.record == record(2)
    known.take_record(other, 13)
    assert known.record == other


def test_a_new_run_counts_when_it_was_asked_for() -> None:
    known = view()
    known.take_record(record(7, "b"), 1)
    known.take_record(record(0, "c"), 2)  # a worker found an empty store
    assert known.record == record(7, "b")
    known.take_record(replace(record(0, "c"), run_number=1), 3)
    known.take_record(record(8, "b"), 4)
    assert known.record == replace(record(0, "c"), run_number=1)
    assert Held(version(0, "c")) == known.record.held
