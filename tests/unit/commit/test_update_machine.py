"""The coordinator of an update, by events and expected instructions: no loop, no clock, no worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from rl_plane.commit.opening import LEASES_END_S
from rl_plane.commit.rules import CLOSED_BY_CHOICE
from rl_plane.commit.steps import (
    Announce,
    Answered,
    BeginJournal,
    RecordAcks,
    SendOp,
    UpdateCommand,
    WaitSilent,
    Watch,
    Write,
)
from rl_plane.errors import (
    Conflict,
    EngineFailed,
    InvalidRequest,
    MembershipChanged,
    NotAtBase,
    NoWorkers,
    OutcomeUnknown,
    PlaneError,
    UpdateAborted,
)
from rl_plane.membership.worker_reply import WorkerReply
from rl_plane.protocol.record import (
    MAX_DELTAS,
    DecisionRecord,
    DesiredPause,
    VersionSource,
)
from rl_plane.protocol.subjects import PAUSE
from rl_plane.protocol.update_requests import UpdateWeights
from rl_plane.protocol.versions import WeightVersion
from rl_plane.protocol.worker_ops import DEFAULT_PAUSE_LEASE_S
from tests.support.update_machine import (
    ABORTED,
    FENCED,
    FILES,
    LOST,
    MEMBERS,
    NEW,
    NOW,
    R0,
    R1,
    R1_OPEN,
    V0,
    V1,
    WHOLE,
    Driver,
    bad,
    lost,
    ok,
    prepared_rows,
    report,
    serving,
    silent,
    states,
    update,
)

# ---- a whole update ----


def test_a_whole_update_prepares_decides_and_commits_in_order() -> None:
    driver = Driver(update())
    outcome = driver.outcome()
    assert driver.phases == WHOLE
    assert driver.one(BeginJournal).base == R0
    prepare = driver.one(SendOp, "prepare")
    assert (prepare.op, list(prepare.workers), prepare.timeout_s) == ("prepare_update", ["a", "b", "c"], 300.0)
    assert prepare.body == {
        "update_id": "u9",
        "target": {"kind": "base", "adapters": "keep"},
        "transport": FILES,
        "encoding": "full",
        "base": None,
        "base_chain": (),
        "label": "new",
        "digest": None,
        "digest_algorithm": None,
        "cast": False,
        "staging": "host",
        "keep_staged": False,
        "pause_mode": "keep",
        "relay": (),
        "canary_file": True,
    }
    made = WeightVersion("run-1", 1, "new", NEW)
    decision = DecisionRecord(
        made, VersionSource(FILES), "u9", made, on_canary_failure="rollback", open=False, decided_at=NOW
    )
    assert driver.one(Write, "decide").record == decision
    decided = driver.decided
    gate, commit = driver.one(Announce, "gate"), driver.one(SendOp, "commit")
    assert (gate.record, gate.sequence) == (decided, 24), "of the decision's write"
    assert (commit.op, list(commit.workers)) == ("commit_update", ["a", "b", "c"])
    assert commit.body == {"update_id": "u9", "record": decided.to_wire(), "sequence": 24, "pause_s": 0.0}
    assert driver.one(Write, "open").record == decided.opened(), "with the fence of its decision"
    opened = driver.one(Announce, "open")
    assert (opened.record, opened.sequence) == (decided.opened(), 27)
    assert driver.one(Watch) == Watch(decided, 0.0), (
        "the coordinator waits for no worker: they say what they serve"
    )
    assert (outcome.version, outcome.excluded) == (made, [])
    assert [reply.instance_id for reply in outcome.replies] == ["a", "b", "c"]


def test_a_version_without_a_label_is_called_by_its_sequence() -> None:
    driver = Driver(UpdateCommand("update", "u9", UpdateWeights.model_validate({"transport": FILES})), R1_OPEN)
    assert driver.outcome().version == WeightVersion("run-1", 2, "2", NEW)
    assert driver.one(SendOp, "prepare").body["label"] == "2"


def test_the_policys_times_and_modes_reach_the_workers() -> None:
    policy = {"prepare_timeout_s": 1.0, "gate_timeout_s": 2.5, "commit_timeout_s": 3.0, "pause_mode": "wait"}
    driver = Driver(update(policy=policy, cast=True))
    driver.outcome()
    assert driver.one(SendOp, "prepare").timeout_s == 1.0
    assert driver.one(SendOp, "prepare").body["pause_mode"] == "wait"
    assert [one.timeout_s for one in driver.all(Announce)] == [2.5, 2.5]
    assert driver.one(SendOp, "commit").timeout_s == 3.0
    decided = driver.one(Write, "decide").record
    assert (decided.pause_mode, decided.source.cast) == ("wait", True)


def test_only_an_update_of_the_base_weights_keeps_kv() -> None:
    lora: dict[str, Any] = {"target": {"kind": "lora", "name": "a", "op": "load"}}
    for more, kv in (({}, "keep"), (lora, "recompute")):
        driver = Driver(update(policy={"kv": "keep"}, **more))
        driver.outcome()
        assert driver.one(Write, "decide").record.kv == kv


def test_rolling_is_worker_by_worker_beside_the_version_before() -> None:
    driver = Driver(update(policy={"barrier": "rolling"}))
    outcome = driver.outcome()
    assert driver.phases == [*WHOLE[:5], "roll", "roll", "roll", *WHOLE[-3:]]
    decided = driver.one(Write, "decide").record
    assert (decided.open, decided.rolling_from, decided.final) == (True, R0.held, False)
    assert [list(one.workers) for one in driver.all(SendOp, "roll")] == [["a"], ["b"], ["c"]]
    final = driver.one(Write, "open").record
    assert (final.open, final.rolling_from) == (True, None)
    assert outcome.excluded == []


def test_a_rolling_update_waits_for_silent_workers_after_it_has_opened() -> None:
    told = RecordAcks(dict(MEMBERS), [ok("a"), ok("b"), silent("c")], ["f1"])
    driver = Driver(update(policy={"barrier": "rolling"}), open=[None, told], watch=serving("ab"))
    outcome = driver.outcome()
    assert driver.phases[-4:] == ["open", "open", "leases", "watch"]
    assert driver.one(WaitSilent) == WaitSilent({"c": "ic"}, ["f1"])
    assert outcome.excluded == ["c"]
    driver = Driver(update(policy={"barrier": "rolling"}), gate=told)
    driver.outcome()
    assert "leases" not in driver.phases, "the old may still be served"


def test_keep_pause_is_noted_once_it_is_decided() -> None:
    driver = Driver(update(policy={"keep_pause": True, "pause_mode": "abort"}))
    driver.outcome()
    assert driver.phases == [*WHOLE[:4], "pause", *WHOLE[4:]]
    assert driver.put(PAUSE) == [DesiredPause(True, "abort", NOW + DEFAULT_PAUSE_LEASE_S)]
    assert driver.one(Write, "decide").record.keep_pause


# ---- prepare ----


def test_a_pinned_fleet_that_changed_is_not_updated() -> None:
    driver = Driver(update("another"))
    error = driver.error(MembershipChanged)
    assert error.facts["after_epoch"] == 9
    assert len(error.facts["workers"]) == 3
    assert driver.phases == [*ABORTED[:3], "recheck", "abort"]
    driver = Driver(update("print"))
    driver.outcome()
    assert driver.phases == [*WHOLE[:3], "recheck", *WHOLE[3:]]


def test_a_failed_prepare_aborts_on_all_workers_and_reports_each() -> None:
    driver = Driver(update(), prepare=prepared_rows(bad("b", EngineFailed("no room"))))
    error = driver.error(UpdateAborted)
    assert "no room" in error.message
    assert [reply["status"] for reply in error.facts["workers"]] == ["ok", "error", "ok"]
    assert driver.phases == ABORTED
    abort = driver.one(SendOp, "abort")
    assert (abort.op, abort.body, list(abort.workers)) == ("abort_update", {"update_id": "u9"}, ["a", "b", "c"])


def test_a_failed_prepare_is_excluded_where_the_policy_says_so() -> None:
    driver = Driver(
        update(policy={"on_prepare_failure": "exclude"}),
        prepare=prepared_rows(bad("b", EngineFailed("no room"))),
        watch=serving("ac"),
    )
    outcome = driver.outcome()
    assert list(driver.one(SendOp, "commit").workers) == ["a", "c"]
    assert outcome.excluded == ["b"]


@pytest.mark.parametrize(
    ("call", "replies", "message"),
    [
        (
            update(policy={"on_prepare_failure": "exclude", "min_ready": 3}),
            [lost("b")],
            "only 2 workers could prepare the update, policy.min_ready asks for 3",
        ),
        (update(), [ok("b", digest="other", refetchable=True)], "different bytes"),
        (
            update(policy={"on_prepare_failure": "exclude"}),
            [ok("b", digest="other", refetchable=True)],
            "different bytes",
        ),
        (update(digest="blake3:" + "2" * 64), [], "the caller stated blake3:222"),
    ],
)
def test_an_update_with_inconsistent_prepare_replies_is_never_decided(
    call: UpdateCommand, replies: Sequence[WorkerReply], message: str
) -> None:
    driver = Driver(call, prepare=prepared_rows(*replies))
    assert message in driver.error(UpdateAborted).message
    assert driver.phases == ABORTED
    assert driver.record == R0


def test_the_workers_get_a_stated_digest_that_fits() -> None:
    driver = Driver(update(digest=NEW))
    driver.outcome()
    assert driver.one(SendOp, "prepare").body["digest"] == NEW


def test_an_update_without_workers_is_not_decided() -> None:
    driver = Driver(update())
    driver.members = {}
    driver.error(NoWorkers)
    assert driver.phases == ABORTED
    driver = Driver(update(), None)
    driver.reports = [report("a", None)]
    driver.error(NoWorkers)
    assert driver.phases == ["survey"], "no record has fixed sequence 0"


def test_a_worker_that_left_before_its_prepare_aborts_the_update() -> None:
    driver = Driver(update(), prepare=Answered([ok(key, digest=NEW, refetchable=True) for key in "ab"]))
    assert "it left before the update began" in driver.error(UpdateAborted).message


def test_a_closed_worker_that_fails_to_prepare_is_excluded_but_a_silent_one_aborts_the_update() -> None:
    failing = prepared_rows(bad("c", EngineFailed("closed anyway")))
    driver = Driver(update(), prepare=failing, watch=serving("ab"))
    driver.reports = [report("a"), report("b"), report("c", admitted=False)]
    assert driver.outcome().excluded == ["c"]
    driver = Driver(update(), prepare=prepared_rows(silent("c")))
    driver.reports = [report("a"), report("b"), silent("c")]
    driver.error(UpdateAborted)
    assert driver.phases == ABORTED


def test_a_lost_bus_while_preparing_aborts_and_says_so() -> None:
    driver = Driver(update(), prepare=LOST, abort=LOST)
    assert driver.run().result is LOST
    assert driver.phases == ABORTED


def test_a_version_is_refetchable_only_if_every_worker_can_fetch_it_again() -> None:
    driver = Driver(update(), prepare=prepared_rows(ok("b", digest=NEW, refetchable=False)))
    driver.outcome()
    assert not driver.one(Write, "decide").record.source.refetchable


OLD = WeightVersion("run-1", 0, "initial", "blake3:" + "0" * 64)
FULL = DecisionRecord(OLD, VersionSource(None), "", OLD)
DELTA = {"encoding": "delta", "base": OLD.digest, "digest": NEW}


def test_a_delta_brings_along_where_its_base_comes_from() -> None:
    driver = Driver(update(**DELTA), FULL)
    assert driver.outcome().version.digest == NEW
    prepare = driver.one(SendOp, "prepare").body
    assert (prepare["encoding"], prepare["base"], prepare["keep_staged"]) == ("delta", OLD.digest, True)
    assert prepare["base_chain"] == (
        {"digest": OLD.digest, "transport": None, "refetchable": True, "encoding": "full"},
    )
    decided = driver.one(Write, "decide").record
    assert decided.source == VersionSource(
        FILES, keep_staged=True, encoding="delta", base=OLD.digest, before=FULL.source
    )
    assert [digest for digest, _ in decided.source.chain(NEW)] == [OLD.digest, NEW]
    assert DecisionRecord.decode(decided.encode()) == decided
    # The next one is on top of it, until the chain is long enough.
    for number in range(1, MAX_DELTAS):
        onto = _renamed(decided, number)
        assert onto.source.deltas == number
        driver = Driver(update(**{**DELTA, "base": onto.version.digest}), onto)
        driver.outcome()
        decided = driver.one(Write, "decide").record
    last = _renamed(decided, MAX_DELTAS)
    full = Driver(update(**{**DELTA, "base": last.version.digest}), last)
    assert f"{MAX_DELTAS} deltas away" in full.error(NotAtBase).message
    assert full.all(SendOp, "prepare") == []


def _renamed(record: DecisionRecord, number: int) -> DecisionRecord:
    """The committed record, with a version of another digest."""
    version = replace(record.version, digest=f"blake3:{number:064x}")
    return replace(record.opened(), version=version, made=version, update_id=f"before {number}")


def test_a_partial_version_may_build_on_an_earlier_version_of_the_chain() -> None:
    """Its tensors replace those of the versions between, which are then not needed any more."""
    partial = {**DELTA, "encoding": "partial"}
    first = Driver(update(**{**partial, "digest": NEW}), FULL)
    first.outcome()
    committed = _renamed(first.one(Write, "decide").record, 1)
    for base, length in ((OLD.digest, 1), (committed.version.digest, 2)):
        driver = Driver(update(**{**partial, "base": base}), committed)
        driver.outcome()
        source = driver.one(Write, "decide").record.source
        assert (source.encoding, source.base, source.deltas) == ("partial", base, length)
        chain = driver.one(SendOp, "prepare").body["base_chain"]
        assert [entry["encoding"] for entry in chain] == ["full", "partial"][:length]
    for body in ({**partial, "base": "blake3:" + "9" * 64}, DELTA):  # a delta fits one version only
        refused = Driver(update(**body), committed)
        assert refused.error(NotAtBase).facts["base"] == committed.version.digest
        assert refused.all(SendOp, "prepare") == []


@pytest.mark.parametrize("encoding", ["delta", "partial"])
def test_equal_bytes_under_another_label_make_the_chain_no_longer(encoding: str) -> None:
    committed = _renamed(R1, 1)
    committed = replace(committed, version=replace(committed.version, digest=NEW))
    driver = Driver(update(encoding=encoding, base=NEW, digest=NEW), committed)
    driver.outcome()
    decided = driver.one(Write, "decide").record
    assert decided.version.digest == NEW
    assert decided.version.sequence == committed.sequence + 1
    assert decided.source == replace(committed.source, keep_staged=True)


def test_a_delta_of_a_version_that_is_not_committed_changes_no_worker() -> None:
    driver = Driver(update(**{**DELTA, "base": NEW}), FULL)
    assert driver.error(NotAtBase).facts["base"] == OLD.digest
    assert driver.all(SendOp, "prepare") == []
    cast = replace(FULL, source=VersionSource(None, cast=True))
    assert "was cast" in Driver(update(**DELTA), cast).error(NotAtBase).message


def test_a_delta_given_with_its_base_brings_the_base_along() -> None:
    before = VersionSource({"backend": "filesystem", "path": "/base"}, keep_staged=True)
    other = {**DELTA, "base": "blake3:" + "7" * 64}
    driver = Driver(replace(update(**other), before=before), R1_OPEN)
    driver.outcome()
    entry = {"digest": other["base"], "transport": before.transport, "refetchable": True, "encoding": "full"}
    assert driver.one(SendOp, "prepare").body["base_chain"] == (entry,)
    assert driver.one(Write, "decide").record.source.before == before


@pytest.mark.parametrize("refetchable", [True, False])
def test_an_unstaged_update_needs_a_refetchable_committed_version(refetchable: bool) -> None:
    base = replace(R1_OPEN, source=replace(R1.source, refetchable=refetchable))
    driver = Driver(update(policy={"staging": "none"}), base)
    if refetchable:
        driver.outcome()
        assert driver.one(SendOp, "prepare").body["staging"] == "none"
        assert driver.one(Write, "decide").record.source.staging == "none"
    else:
        error = driver.error(InvalidRequest)
        assert error.facts["field"] == "policy.staging"
        assert not driver.all(SendOp, "prepare")


def test_an_unstaged_update_is_an_invalid_request_only_if_every_worker_refused_it() -> None:
    gone = bad("b", InvalidRequest("it is not there", field="transport.path"))
    replies = [ok("a", digest=NEW, refetchable=True), gone, replace(gone, instance_id="c")]
    unstaged = {"staging": "none"}
    assert Driver(update(policy=unstaged), prepare=Answered(replies)).error(UpdateAborted)
    all_refuse = [replace(gone, instance_id=key) for key in "abc"]
    assert Driver(update(policy=unstaged), prepare=Answered(all_refuse)).error(InvalidRequest)
    assert Driver(update(), prepare=Answered(replies)).error(InvalidRequest), "staged: nothing was touched"


# ---- the decision ----


@pytest.mark.parametrize("last", [None, R1_OPEN])
def test_a_decision_whose_answer_was_lost_and_that_stands_is_carried_out(last: DecisionRecord | None) -> None:
    driver = Driver(update(), decide=LOST)
    driver.answers["resolve"] = [lambda _: replace(driver.surveyed(), record=driver.decided, written=77)]
    outcome = driver.outcome()
    assert driver.phases == [*WHOLE[:4], "resolve", *WHOLE[4:]]
    assert driver.one(Announce, "gate").sequence == 77
    assert outcome.version.label == "new"


@pytest.mark.parametrize("stands", [None, R0])
def test_a_decision_whose_answer_was_lost_and_that_does_not_stand_is_aborted(
    stands: DecisionRecord | None,
) -> None:
    driver = Driver(update(), decide=LOST)
    driver.answers["resolve"] = [replace(driver.surveyed(), record=stands)]
    assert driver.run().result is LOST
    assert driver.phases == [*WHOLE[:4], "resolve", "abort"]


@pytest.mark.parametrize("why", [LOST, FENCED])
def test_a_decision_that_can_not_be_settled_is_unknown_and_nothing_is_aborted(why: PlaneError) -> None:
    driver = Driver(update(), decide=LOST, resolve=why)
    error = driver.error(OutcomeUnknown)
    assert error.facts["update_id"] == "u9"
    assert "Idempotency-Key" in error.facts["fix"]
    assert driver.phases == [*WHOLE[:4], "resolve"]


def test_an_update_that_is_fenced_while_deciding_is_aborted() -> None:
    driver = Driver(update(), decide=FENCED)
    assert driver.run().result is FENCED
    assert driver.phases == [*WHOLE[:4], "abort"]


# ---- after the decision ----


@pytest.mark.parametrize("why", [LOST, FENCED])
@pytest.mark.parametrize(
    ("phase", "before"),
    [("pause", WHOLE[:4]), ("gate", WHOLE[:4]), ("commit", WHOLE[:5]), ("leases", WHOLE[:6]), ("open", WHOLE[:6])],
)
def test_a_coordinator_that_loses_a_step_after_the_decision_watches_the_workers_and_then_opens(
    phase: str, before: list[str], why: PlaneError
) -> None:
    answers: dict[str, Any] = {phase: [why, None]}
    if phase == "leases":
        answers["gate"] = RecordAcks(dict(MEMBERS), [ok("a"), ok("b"), silent("c")], [])
    driver = Driver(update(policy={"keep_pause": phase == "pause"}), **answers)
    outcome = driver.outcome()
    saved = ["pause"] if phase == "pause" else []
    assert driver.phases == [*before, phase, "watch", *saved, "open"]
    decided = driver.decided
    assert driver.one(Watch) == Watch(decided, 60.0)
    assert driver.all(Write, "open")[-1].record == decided.opened()
    assert (outcome.version, outcome.excluded) == (decided.made, [])


def test_a_pause_whose_write_is_lost_is_saved_before_the_record_is_final() -> None:
    driver = Driver(update(policy={"keep_pause": True, "barrier": "rolling"}), pause=[LOST, None])
    driver.outcome()
    assert driver.phases[-5:] == ["survey", "pause", "open", "watch", "open"]
    assert driver.put(PAUSE) == [DesiredPause(True, "keep", NOW + DEFAULT_PAUSE_LEASE_S)] * 2
    for barrier in ("strict", "rolling"):
        driver = Driver(update(policy={"keep_pause": True, "barrier": barrier}), pause=LOST)
        driver.outcome()
        assert not driver.all(Write, "open"), "the next coordinator saves it"
        driver = Driver(update(policy={"keep_pause": True, "barrier": barrier}), gate=LOST)
        driver.outcome()
        assert driver.phases.count("pause") == 1, "it is saved already"


def test_an_open_record_that_can_not_be_written_is_left_to_the_next() -> None:
    driver = Driver(update(), gate=LOST, open=LOST)
    assert driver.outcome().version.label == "new"


def test_a_short_commit_time_does_not_open_before_every_lease_has_ended() -> None:
    driver = Driver(update(policy={"commit_timeout_s": 0.5}), gate=LOST)
    driver.outcome()
    assert driver.one(Watch).timeout_s == LEASES_END_S


def test_a_coordinator_that_loses_a_roll_opens_and_then_watches_the_workers() -> None:
    driver = Driver(update(policy={"barrier": "rolling"}), roll=[None, LOST])
    driver.outcome()
    # Workers that wait for their turn are released before the coordinator watches any worker.
    assert driver.phases[-6:] == ["roll", "roll", "survey", "open", "watch", "open"]
    assert driver.all(Write, "open")[0].record == driver.decided.opened()


@pytest.mark.parametrize("unheard", [None, Conflict("no worker answers")])
def test_a_lost_roll_tries_to_open_the_record_until_it_can_be_written(unheard: PlaneError | None) -> None:
    driver = Driver(
        update(policy={"barrier": "rolling"}), roll=LOST, open=[LOST, LOST, None], watch=[unheard, None]
    )
    driver.outcome()
    assert driver.phases[-11:] == ["roll", *["survey", "open", "watch"] * 3, "open"]
    assert [watch.timeout_s for watch in driver.all(Watch)] == [0.0, 0.0, 60.0]


def test_a_rolling_update_that_is_fenced_still_watches_the_workers() -> None:
    driver = Driver(update(policy={"barrier": "rolling"}), roll=LOST, open=FENCED)
    driver.outcome()
    assert driver.phases[-4:] == ["roll", "survey", "open", "watch"]


def test_a_lost_roll_opens_the_record_that_stands_and_no_record_of_another_coordinator() -> None:
    driver = Driver(update(policy={"barrier": "rolling"}), roll=LOST)
    another = replace(R1, made=replace(V1, sequence=2))
    driver.answers["survey"] = [None, lambda _: replace(driver.surveyed(), record=another)]
    driver.outcome()
    assert driver.phases[-3:] == ["roll", "survey", "watch"]


def test_an_update_raises_the_error_of_a_watch_that_hears_no_worker() -> None:
    unheard = Conflict("committed, and no worker answers")
    driver = Driver(update(), commit=LOST, watch=unheard)
    assert driver.run().result is unheard


def test_strict_opens_only_when_the_silent_have_left_or_lost_their_leases() -> None:
    told = RecordAcks({**MEMBERS, "d": "id"}, [ok("a"), silent("b"), lost("c"), silent("d")], ["f1"])
    driver = Driver(update(), gate=told, watch=serving("a"))
    outcome = driver.outcome()
    assert driver.phases == [*WHOLE[:6], "leases", *WHOLE[6:]]
    assert driver.one(WaitSilent) == WaitSilent({"b": "ib", "d": "id"}, ["f1"]), "dead workers serve no request"
    assert list(driver.one(SendOp, "commit").workers) == ["a"], "no worker swaps that is not gated"
    assert outcome.excluded == ["b", "c", "d"]
    assert {reply.instance_id: reply.ok for reply in outcome.replies} == {
        "a": True,
        "b": False,
        "c": False,
        "d": False,
    }
    driver = Driver(update(), gate=RecordAcks(MEMBERS, [ok(key) for key in MEMBERS], ["f1"]))
    driver.outcome()
    assert driver.one(WaitSilent) == WaitSilent({}, ["f1"])
    driver = Driver(update(), gate=RecordAcks(MEMBERS, [ok("a"), ok("b"), lost("c")], []))
    driver.outcome()
    assert "leases" not in driver.phases


def test_the_commit_skips_a_new_process_that_has_staged_nothing() -> None:
    members = {**MEMBERS, "b": "another"}
    driver = Driver(update(), gate=RecordAcks(members, [ok(key) for key in members], []))
    driver.outcome()
    assert list(driver.one(SendOp, "commit").workers) == ["a", "c"]


def test_a_worker_that_does_not_serve_the_version_at_the_end_is_excluded() -> None:
    broken = Answered([ok("a"), bad("b", EngineFailed("broken")), ok("c")])
    driver = Driver(update(), commit=broken, watch=serving("ac"))
    outcome = driver.outcome()
    assert outcome.excluded == ["b"]
    assert [reply.instance_id for reply in outcome.replies if not reply.ok] == ["b"], (
        "why, as the commit has reported"
    )
    driver = Driver(update(), commit=broken)
    outcome = driver.outcome()
    assert outcome.excluded == [], "it has swapped by itself since"
    assert all(reply.ok for reply in outcome.replies)
    unheard = [None, RecordAcks(MEMBERS, [ok("a"), silent("b"), ok("c")], [])]
    assert Driver(update(), open=unheard, watch=serving("ac")).outcome().excluded == ["b"]


@pytest.mark.parametrize("at_last", [1, 2])
def test_too_few_serving_workers_are_watched_once_and_are_then_a_conflict(at_last: int) -> None:
    broken = [bad(key, EngineFailed("broken")) for key in "bc"]
    driver = Driver(
        update(policy={"min_ready": 2}),
        commit=Answered([ok("a"), *broken]),
        watch=[serving("a"), serving("abc"[:at_last])],
    )
    if at_last == 2:
        assert driver.outcome().excluded == ["c"]
    else:
        error = driver.error(Conflict)
        assert error.facts["excluded"] == ["b", "c"]
        assert "new is committed, but 1 workers serve it" in error.message
    assert driver.phases == [*WHOLE, "watch"]
    assert [watch.timeout_s for watch in driver.all(Watch)] == [0.0, 60.0]


def test_a_worker_with_another_version_does_not_count_as_serving() -> None:
    Driver(update(), gate=LOST, watch=states(R0, "abc")).error(Conflict)
    other = WeightVersion("run-1", 1, "new", "other")
    Driver(update(), gate=LOST, watch=states(replace(R1, version=other), "abc")).error(Conflict)
    same_bytes = replace(R0, version=replace(V0, digest=NEW))
    Driver(update(), gate=LOST, watch=states(same_bytes, "abc")).error(Conflict)

    def dead(watch: Watch) -> Answered:
        replies = states(watch.record, "abc").replies
        return Answered([replace(reply, body={**reply.body, "engine_alive": False}) for reply in replies])

    Driver(update(), gate=LOST, watch=dead).error(Conflict)


def test_a_version_that_another_one_has_replaced_meanwhile_is_a_conflict() -> None:
    other = replace(R1, made=WeightVersion("run-1", 2, "other", "d2"))
    error = Driver(update(), gate=FENCED, watch=states(other, "a")).error(Conflict)
    assert error.message == "new was committed, and another version has been committed since"
    assert error.facts["version"]["label"] == "new"
    before = replace(R0, made=WeightVersion("run-0", 2, "other", "d2"), version=replace(V0, run="run-0"))
    assert "0 workers serve it" in Driver(update(), gate=FENCED, watch=states(before, "a")).error(Conflict).message


@pytest.mark.parametrize("reason", sorted(CLOSED_BY_CHOICE))
def test_a_worker_that_an_operator_has_closed_is_not_excluded(reason: str) -> None:
    def closed(watch: Watch) -> Answered:
        admission = {"open": False, "reasons": [f"{reason}: so it was said"]}
        replies = states(watch.record, "abc").replies
        return Answered([replace(reply, body={**reply.body, "admission": admission}) for reply in replies])

    assert Driver(update(), watch=closed).outcome().excluded == []
