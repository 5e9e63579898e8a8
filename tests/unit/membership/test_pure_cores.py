"""The pure cores, by events and expected instructions: no loop, no clock, no server."""

from __future__ import annotations

import random
from dataclasses import asdict
from typing import Any

import msgpack
import pytest

from rl_plane.bus.token_stream import ABANDONED_AFTER_S, CREDIT_EVERY, WINDOW, ReceiveWindow, SendWindow
from rl_plane.commit.rules import evaluate_prepare
from rl_plane.errors import (
    EngineFailed,
    InvalidRequest,
    InvalidWeights,
    PayloadTooLarge,
    PlaneError,
    Unsupported,
    UpdateAborted,
    WorkerLost,
)
from rl_plane.membership.core import Changed, Member, MembershipCore, Purge, Resync, fingerprint
from rl_plane.membership.probe import (
    CONFIRM_S,
    HUNG_AFTER_S,
    MIN_SILENT_PROBES,
    PROBE_TIMEOUT_S,
    SWEEP_S,
    ProbeCore,
)
from rl_plane.membership.worker_reply import WorkerReply
from rl_plane.protocol.record import CommittedAdapter, DecisionRecord, Held, VersionSource
from rl_plane.protocol.subjects import Entry
from rl_plane.protocol.update_requests import UpdatePolicy
from rl_plane.protocol.versions import WeightVersion

# ---- membership ----


def member(name: str, sequence: int, connection: int = 0, incarnation: str = "i0") -> Member:
    return Member(name, incarnation, "server", connection or sequence, sequence, {"engine": "fake"})


def written(one: Member) -> Entry:
    return Entry(f"w.{one.instance_id}", one.to_record(), one.revision)


def purged(name: str, sequence: int) -> Entry:
    return Entry(f"w.{name}", None, sequence)


def valid(core: MembershipCore) -> None:
    """Checks the invariants after an event."""
    snapshot = core.snapshot()
    assert snapshot.epoch == core.epoch
    assert list(snapshot) == sorted(core.members.values(), key=lambda one: one.instance_id)
    assert snapshot.fingerprint == fingerprint(core.members.values())
    assert all(one.revision <= core.epoch for one in snapshot)


def test_messages_in_order_give_the_members_of_the_fleet() -> None:
    core = MembershipCore()
    a, b = member("a", 1), member("b", 2)
    assert core.feed(written(a)) == [Changed(None, a)]
    assert core.feed(written(b)) == [Changed(None, b)]
    again = member("a", 3)
    assert core.feed(written(again)) == [Changed(a, again)]
    assert core.feed(purged("b", 4)) == [Changed(b, None)]
    assert core.feed(purged("b", 5)) == []
    assert (core.epoch, list(core.snapshot())) == (5, [again])
    valid(core)


def test_a_gap_asks_for_a_resync_and_changes_nothing() -> None:
    core = MembershipCore()
    core.feed(written(member("a", 1)))
    assert core.feed(written(member("c", 3))) == [Resync()]
    assert (core.epoch, sorted(core.members)) == (1, ["a"])
    a, b, c = member("a", 1), member("b", 2), member("c", 3)
    assert core.snapshot_read([written(a), written(b), written(c)], 3) == [Changed(None, b), Changed(None, c)]
    assert core.epoch == 3


def test_a_repeat_does_nothing() -> None:
    core = MembershipCore()
    core.feed(written(member("a", 1)))
    core.feed(purged("a", 2))
    assert core.feed(written(member("a", 1))) == []
    assert core.feed(purged("a", 2)) == []
    assert (core.epoch, core.members) == (2, {})


def test_a_read_that_the_feed_has_overtaken_does_nothing() -> None:
    core = MembershipCore()
    for sequence in (1, 2, 3):
        core.feed(written(member(f"m{sequence}", sequence)))
    assert core.snapshot_read([written(member("m1", 1))], 2) == []
    assert (core.epoch, len(core.members)) == (3, 3)


def test_a_read_reports_members_that_left_meanwhile() -> None:
    core = MembershipCore()
    a, b = member("a", 1), member("b", 2)
    core.feed(written(a))
    core.feed(written(b))
    assert core.snapshot_read([purged("a", 5), written(b)], 9) == [Changed(a, None)]
    assert core.snapshot_read([], 10) == [Changed(b, None)]
    assert core.epoch == 10


def test_other_keys_move_the_epoch_only() -> None:
    core = MembershipCore()
    assert core.feed(Entry("x.y", b"z", 1)) == []
    assert (core.epoch, core.members) == (1, {})


def test_only_the_end_of_a_workers_present_connection_is_its_death() -> None:
    core = MembershipCore()
    core.feed(written(member("a", 1, connection=7)))
    assert core.disconnected("server", 8) == []
    assert core.disconnected("other", 7) == []
    assert core.disconnected("server", 7) == [Purge("a", 1)]
    core.feed(written(member("a", 2, connection=9)))
    assert core.disconnected("server", 7) == [], "an old connection of a worker that reconnected"
    assert core.disconnected("server", 9) == [Purge("a", 2)]
    core.feed(purged("a", 3))
    assert core.disconnected("server", 9) == []


def test_a_death_of_an_older_registration_is_refused() -> None:
    core = MembershipCore()
    core.feed(written(member("a", 1)))
    core.feed(written(member("a", 2)))
    assert core.found_dead("a", 1) == []
    assert core.found_dead("b", 2) == []
    assert core.found_dead("a", 2) == [Purge("a", 2)]


def test_the_fingerprint_is_of_the_processes_and_nothing_else() -> None:
    a, b = member("a", 1, 1), member("b", 2, 2)
    assert fingerprint([a, b]) == fingerprint([b, a])
    assert fingerprint([a]) == fingerprint([member("a", 9, 9)]), "a reconnect is the same process"
    assert fingerprint([a]) != fingerprint([member("a", 1, 1, "i1")])
    assert fingerprint([a]) != fingerprint([a, b]) != fingerprint([b])
    assert len(fingerprint([])) == 16


@pytest.mark.parametrize("seed", range(50))
def test_any_history_with_losses_and_repeats_ends_at_the_truth(seed: int) -> None:
    rng = random.Random(seed)
    truth: dict[str, Member] = {}
    log: list[Entry] = []
    for sequence in range(1, 120):
        name = rng.choice("abcdefgh")
        if name in truth and rng.random() < 0.4:
            del truth[name]
            log.append(purged(name, sequence))
        else:
            truth[name] = member(name, sequence, incarnation=f"i{rng.randrange(3)}")
            log.append(written(truth[name]))
    core = MembershipCore()
    told: dict[str, Member] = {}

    def tell(instructions: list[Any]) -> bool:
        for one in instructions:
            if isinstance(one, Changed):
                known = one.before or one.after
                assert known is not None
                assert told.get(known.instance_id) == one.before, "a change that does not follow the last one"
                told.pop(known.instance_id, None)
                if one.after is not None:
                    told[known.instance_id] = one.after
        return Resync() in instructions

    def read(upto: int) -> list[Entry]:
        newest = {entry.key: entry for entry in log[:upto]}
        return sorted(newest.values(), key=lambda entry: entry.sequence)

    resync_from: int | None = None
    at = 0
    while at < len(log):
        epoch = core.epoch
        chance = rng.random()
        if chance < 0.2 and at:
            tell(core.feed(log[rng.randrange(at)]))  # a repeat
        elif chance < 0.35:
            at += 1  # a loss
        else:
            if tell(core.feed(log[at])):
                resync_from = at + 1
            at += 1
        if resync_from is not None and rng.random() < 0.5:  # the read takes a while
            upto = rng.randint(resync_from, at)
            tell(core.snapshot_read(read(upto), upto))
            resync_from = None
        assert core.epoch >= epoch
        valid(core)
        if core.epoch < len(log):
            known = {entry.key[2:]: entry for entry in read(core.epoch) if entry.value is not None}
            assert {name: one.revision for name, one in core.members.items()} == {
                name: entry.sequence for name, entry in known.items()
            }
    tell(core.snapshot_read(read(len(log)), len(log)))
    assert core.members == truth == told


# ---- probing ----


def test_a_refused_probe_is_a_death_when_it_is_refused_again() -> None:
    core = ProbeCore()
    assert not core.probed("a", 1, "answered", 0.0)
    assert not core.probed("a", 1, "no_responder", 1.0)
    assert core.interval_s(1, False) == CONFIRM_S
    assert core.interval_s(1, True) == CONFIRM_S
    assert core.probed("a", 1, "no_responder", 1.0 + CONFIRM_S)


def test_a_death_is_found_within_two_seconds_of_sweeps() -> None:
    core = ProbeCore()
    now = 0.0
    while not core.probed("a", 1, "no_responder", now):
        now += core.interval_s(1, False) + PROBE_TIMEOUT_S
    assert now + SWEEP_S + PROBE_TIMEOUT_S < 2


def test_an_answer_between_two_refusals_clears_them() -> None:
    core = ProbeCore()
    assert not core.probed("a", 1, "no_responder", 0.0)
    assert not core.probed("a", 1, "answered", 0.3)
    assert not core.probed("a", 1, "no_responder", 0.6)


def test_silence_is_a_hang_only_when_long_and_often() -> None:
    core = ProbeCore()
    core.probed("a", 1, "answered", 0.0)
    for _ in range(10):
        assert not core.probed("a", 1, "silent", HUNG_AFTER_S - 0.1)
    assert core.probed("a", 1, "silent", HUNG_AFTER_S)
    core = ProbeCore()
    core.probed("a", 1, "answered", 0.0)
    for _ in range(MIN_SILENT_PROBES - 1):
        assert not core.probed("a", 1, "silent", 100.0)
    assert core.probed("a", 1, "silent", 100.0)


def test_silence_counts_from_the_last_answer() -> None:
    core = ProbeCore()
    for now in range(100):
        outcome: Any = "answered" if now % 4 == 0 else "silent"
        assert not core.probed("a", 1, outcome, float(now))


def test_a_prober_that_was_suspended_reports_no_hung_worker() -> None:
    core = ProbeCore()
    core.probed("a", 1, "answered", 0.0)
    core.probed("a", 1, "silent", 1.0)
    core.probed("a", 1, "silent", 2.0)
    core.restart()
    for _ in range(MIN_SILENT_PROBES):
        assert not core.probed("a", 1, "silent", 100.0)
    core.restart()
    assert not core.probed("a", 1, "no_responder", 101.0)


def test_a_new_registration_starts_anew() -> None:
    core = ProbeCore()
    for now in range(6):
        assert not core.probed("a", 1, "silent", now * 0.9)
    assert not core.probed("a", 2, "silent", 6.0)
    assert not core.probed("a", 2, "no_responder", 6.1)
    assert not core.probed("a", 3, "no_responder", 7.0)


def test_the_probes_forget_a_member_that_has_left() -> None:
    core = ProbeCore()
    core.probed("a", 1, "no_responder", 0.0)
    core.keep_only({"b"})
    assert core.interval_s(1, False) == SWEEP_S
    assert not core.probed("a", 1, "no_responder", 9.0)


def test_large_fleets_are_swept_more_slowly_and_advisories_slower_still() -> None:
    core = ProbeCore()
    assert core.interval_s(10, False) <= core.interval_s(1000, False) <= core.interval_s(100_000, False)
    assert core.interval_s(100_000, False) < core.interval_s(1, True)


# ---- streams ----

MAX_BYTES = 1000


def number_of(packed: bytes) -> int:
    number: int = msgpack.unpackb(packed)["n"]
    return number


@pytest.mark.parametrize("seed", range(30))
def test_whatever_is_lost_doubled_or_late_each_message_comes_once_in_order(seed: int) -> None:
    rng = random.Random(seed)
    total, now = 1000, 0.0
    sender, receiver = SendWindow(now, MAX_BYTES), ReceiveWindow()
    wire: list[bytes] = []
    got: list[int] = []
    for step in range(100_000):
        now += 0.01
        if sender.next < total and sender.has_room():
            packed = sender.add({"x": sender.next})
            wire += [packed] * rng.choices([0, 1, 2], [2, 90, 8])[0]
        for _ in range(min(len(wire), 4)):
            packed = wire.pop(0 if rng.random() < 0.98 else rng.randrange(len(wire)))
            is_next, gap = receiver.take(number_of(packed))
            if is_next:
                got.append(msgpack.unpackb(packed)["x"])
            if gap and rng.random() < 0.8:
                wire += sender.credit(**_credit(receiver, True), now=now)
        assert len(got) - receiver.consumed <= WINDOW, "more than a window waits to be read"
        if receiver.consumed < len(got) and rng.random() < 0.95:
            receiver.consumed += 1
        if receiver.credit_due() or step % 200 == 199:
            credit = _credit(receiver, step % 200 == 199)
            if rng.random() < 0.8:  # credits are lost too
                wire += sender.credit(**credit, now=now)
        assert sender.next - receiver.consumed <= 2 * WINDOW
        if receiver.consumed == total and sender.all_confirmed():
            break
    assert got == list(range(total))
    assert sender.all_confirmed()


def test_one_lost_message_brings_the_window_once_more_and_not_once_for_each_that_follows() -> None:
    sender, receiver = SendWindow(0.0, MAX_BYTES), ReceiveWindow()
    wire = [sender.add({}) for _ in range(WINDOW)]
    resent = 0
    for packed in wire[1:]:
        if receiver.take(number_of(packed))[1]:
            again = sender.credit(**_credit(receiver, True), now=0.0)
            resent += len(again)
            wire += again
    for packed in wire[WINDOW:]:
        receiver.take(number_of(packed))
    assert receiver.next == WINDOW
    assert resent <= WINDOW


def _credit(receiver: ReceiveWindow, resend: bool) -> dict[str, Any]:
    credit = receiver.credit(resend)
    assert credit.pop("kind") == "credit"
    return credit


def test_a_window_without_credit_is_full() -> None:
    sender = SendWindow(0.0, MAX_BYTES)
    while sender.has_room():
        sender.add({})
    assert sender.next == WINDOW
    assert sender.credit(10, WINDOW, False, 1.0) == []
    assert sender.has_room()
    assert not sender.all_confirmed()
    assert [number_of(packed) for packed in sender.credit(10, WINDOW - 2, True, 1.0)] == [WINDOW - 2, WINDOW - 1]
    sender.credit(WINDOW, WINDOW, True, 1.0)
    assert sender.all_confirmed()


def test_a_message_that_is_too_large_takes_no_number() -> None:
    sender = SendWindow(0.0, MAX_BYTES)
    assert number_of(sender.add({})) == 0
    with pytest.raises(PayloadTooLarge, match=str(MAX_BYTES)):
        sender.add({"x": "y" * MAX_BYTES})
    assert number_of(sender.add({})) == 1
    assert [number_of(packed) for packed in sender.credit(0, 0, True, 1.0)] == [0, 1]


def test_a_receive_window_confirms_only_consumed_events() -> None:
    receiver = ReceiveWindow()
    for number in range(CREDIT_EVERY):
        assert receiver.take(number) == (True, False)
    assert not receiver.credit_due()
    assert receiver.credit(False)["consumed"] == 0
    receiver.consumed = CREDIT_EVERY
    assert receiver.credit_due()
    assert receiver.credit(False) == {
        "kind": "credit",
        "consumed": CREDIT_EVERY,
        "have": CREDIT_EVERY,
        "resend": False,
    }
    assert not receiver.credit_due()


def test_a_sender_is_abandoned_after_a_silence_and_not_before() -> None:
    sender = SendWindow(5.0, MAX_BYTES)
    assert not sender.abandoned(5.0 + ABANDONED_AFTER_S)
    assert sender.abandoned(5.1 + ABANDONED_AFTER_S)
    sender.credit(0, 0, False, 20.0)
    assert not sender.abandoned(29.0)
    sender.cut_off(30.0)
    assert not sender.abandoned(30.0 + ABANDONED_AFTER_S), "a sender without a connection hears no receiver"


# ---- judging a prepare ----


def ok(name: str) -> WorkerReply:
    return WorkerReply(name, f"i-{name}", "ok", {"digest": "d1", "refetchable": True})


def bad(name: str, error: PlaneError) -> WorkerReply:
    return WorkerReply(name, f"i-{name}", "error", error=error)


ABORT = UpdatePolicy()


def test_a_failed_prepare_reports_the_callers_fault_as_such() -> None:
    wrong = InvalidWeights("no such tensor", field="transport.path", fix="x")
    with pytest.raises(InvalidWeights) as caught:
        evaluate_prepare([bad("a", wrong), bad("b", EngineFailed("broken"))], {"a", "b"}, ABORT, None)
    assert caught.value.facts["field"] == "transport.path"
    assert caught.value.http_status == 400
    with pytest.raises(InvalidRequest):
        evaluate_prepare([ok("a"), bad("b", InvalidRequest("outside"))], {"a", "b"}, ABORT, None)
    with pytest.raises(Unsupported):
        evaluate_prepare([bad("a", Unsupported("no")), bad("b", Unsupported("no"))], {"a", "b"}, ABORT, None)
    with pytest.raises(UpdateAborted):
        evaluate_prepare([bad("a", Unsupported("no")), bad("b", WorkerLost("dead"))], {"a", "b"}, ABORT, None)


def test_a_record_on_the_wire_has_all_its_fields() -> None:
    version = WeightVersion("run", 3, "step", "blake3:00")
    source = VersionSource({"backend": "filesystem", "path": "/weights"}, cast=True)
    adapters = {"a": CommittedAdapter(version, source)}
    record = DecisionRecord(version, source, "id", version, adapters, rolling_from=Held(version, {"a": version}))
    assert record.to_wire() == asdict(record)
    assert DecisionRecord.decode(record.encode()) == record
