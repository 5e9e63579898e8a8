"""The events that several frontends have stored become one history."""

from __future__ import annotations

from frontend.facade.kept_events import ID_STEP, MISSED, FleetEvent, KeptEvents, last_admissions
from frontend.facade.stored_events import Chunk, earlier_events


def event(number: int, at: float) -> FleetEvent:
    return FleetEvent(number, at, "op", {"number": number})


def chunk(began_at: float, *events: FleetEvent) -> Chunk:
    return Chunk(began_at=began_at, events=list(events))


def told(*chunks: tuple[str, Chunk], before: float = 1000.0) -> list[int]:
    return [one.id for one in earlier_events(chunks, before)]


def test_frontends_that_followed_each_other_are_joined() -> None:
    first = ("a", chunk(10, event(10, 11), event(11, 12)))
    more = ("a", chunk(10, event(12, 13)))
    second = ("b", chunk(20, event(20, 21), event(21, 22)))
    assert told(second, first, more) == [10, 11, 12, 20, 21]


def test_the_events_of_overlapping_frontends_show_each_moment_once() -> None:
    long = ("a", chunk(10, event(10, 11), event(11, 31), event(12, 32)))
    inside = ("b", chunk(30, event(30, 31), event(31, 32), event(32, 33)))
    assert told(long, inside) == [10, 30, 31, 32], (
        "b reported the latest event, so its events since its start count"
    )
    assert told(inside, long, before=33) in ([10, 11, 12], [10, 30, 31])


def test_the_events_of_another_running_frontend_do_not_repeat_those_of_this_frontend() -> None:
    assert told(("a", chunk(10, event(10, 11), event(11, 50))), before=40) == [10]
    assert told() == []


def test_a_new_frontend_knows_the_last_admission_of_each_member() -> None:
    def admission(number: int, worker: str, is_open: bool) -> FleetEvent:
        return FleetEvent(number, float(number), "admission", {"instance_id": worker, "open": is_open})

    def member(number: int, worker: str, change: str) -> FleetEvent:
        return FleetEvent(number, float(number), "member", {"instance_id": worker, "change": change})

    events = [
        admission(1, "a", False),
        admission(2, "b", True),
        event(3, 3.0),
        admission(4, "a", True),
        member(5, "b", "left"),
        admission(6, "c", True),
        member(7, "c", "left"),
        member(8, "c", "joined"),
        admission(9, "c", False),
        member(10, "a", "reconnected"),
    ]
    assert last_admissions(events) == {"a": events[3].data, "c": events[8].data}
    assert last_admissions([]) == {}


def test_a_reader_continues_behind_an_event_of_an_earlier_frontend() -> None:
    kept = KeptEvents(3)
    kept.load([event(10, FUTURE), event(11, FUTURE)])
    own = kept.new("op", {})
    assert kept.missed(10, None) == [event(11, FUTURE).framed(), own.framed()]
    assert kept.missed(10 - ID_STEP, None) == [
        event(10, FUTURE).framed(),
        event(11, FUTURE).framed(),
        own.framed(),
    ]
    assert kept.missed(own.id, None) == []
    assert kept.missed(8, None)[0] == MISSED
    next_one = kept.new("op", {})
    assert kept.missed(10 - ID_STEP, None)[0] == MISSED, "the event 10 is not kept any more"
    assert kept.missed(10, None) == [event(11, FUTURE).framed(), own.framed(), next_one.framed()]


def test_ids_rise_over_a_restart_also_with_a_clock_that_went_back() -> None:
    kept = KeptEvents(3)
    kept.load([event(10**15, FUTURE)])
    assert kept.new("op", {}).id > 10**15


def test_ids_behind_those_of_another_frontend_stay_apart_from_them() -> None:
    kept = KeptEvents(3)
    first = kept.new("op", {}).id
    ahead = first + 5 * ID_STEP + 7
    kept.load([event(ahead, FUTURE)])
    following = kept.new("op", {}).id
    assert following > ahead
    assert (following - first) % ID_STEP == 0


def test_a_reader_that_moves_to_another_frontend_gets_missed() -> None:
    left, *others = (KeptEvents(300) for _ in range(4))
    last = [left.new("op", {}) for _ in range(200)][-1].id
    for kept in others:
        for _ in range(250):
            kept.new("op", {})
    assert any(kept.missed(last, None)[0] == MISSED for kept in others), "two of them may begin at the same id"


def test_javascript_counts_ids_exactly() -> None:
    assert KeptEvents(3).new("op", {}).id < 2**53


FUTURE = 4e9
"""A time at which no event is too old."""
