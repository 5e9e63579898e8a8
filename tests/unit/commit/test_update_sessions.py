"""An update in several calls, by events and expected instructions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rl_plane.commit.steps import (
    SESSION_IDLE_S,
    Answered,
    Needs,
    PartReceived,
    Put,
    SendOp,
    UpdateCommand,
    Write,
)
from rl_plane.errors import (
    Conflict,
    EngineFailed,
    InvalidRequest,
    InvalidWeights,
    Locked,
    MembershipChanged,
    PlaneError,
    Unavailable,
    UpdateAborted,
)
from rl_plane.membership.worker_reply import WorkerReply
from rl_plane.protocol import subjects
from rl_plane.protocol.record import (
    KvPolicy,
    UpdateSession,
    VersionSource,
)
from rl_plane.protocol.update_requests import Part
from tests.support.update_machine import (
    ABORTED,
    FENCED,
    FILES,
    LOST,
    MEMBERS,
    NEW,
    R0,
    R1,
    SESSION,
    V1,
    WHOLE,
    Driver,
    bad,
    body,
    lost,
    ok,
    prepare,
    prepared_rows,
    report,
    serving,
    session_of,
    silent,
    state,
    states,
    update,
    with_session,
)

# ---- two calls ----


COMPLETE, ABORT = UpdateCommand("complete", "u9"), UpdateCommand("abort", "u9")


def test_a_prepare_call_saves_a_session_and_decides_nothing() -> None:
    driver = Driver(prepare())
    prepared = driver.prepared()
    assert driver.phases == ["survey", "begin", "prepare", "session"]
    assert driver.put(subjects.SESSION) == [prepared.session]
    assert prepared.session == session_of(prepare())
    assert (prepared.digest, prepared.ready, prepared.excluded) == (NEW, MEMBERS, [])


def test_prepared_twice_under_one_id_the_first_stands() -> None:
    driver = with_session(prepare(version="another"), SESSION)
    prepared = driver.prepared()
    assert driver.phases == ["survey"]
    assert (prepared.session, prepared.digest) == (SESSION, NEW)


def test_a_prepare_that_fails_leaves_no_session() -> None:
    driver = Driver(prepare(), prepare=prepared_rows(lost("a")))
    driver.error(UpdateAborted)
    assert driver.phases == ABORTED


def test_an_uncertain_session_is_ended_before_its_staged_weights_are_aborted() -> None:
    driver = Driver(prepare(), session=[LOST, None])
    assert driver.run().result is LOST
    assert driver.phases == ["survey", "begin", "prepare", "session", "session", "abort"]
    assert driver.put(subjects.SESSION)[-1] is None
    driver = Driver(prepare(), session=LOST)
    assert driver.run().result is LOST
    assert driver.phases[-2:] == ["session", "session"], "what it names stays staged: it may be completed"


def test_any_caller_completes_a_prepared_update() -> None:
    call = prepare(policy={"barrier": "strict", "pause_mode": "abort"})
    driver = with_session(UpdateCommand("complete", ""), session_of(call))
    outcome = driver.outcome()
    assert driver.phases == ["survey", "prepare", "decide", "session", *WHOLE[4:]]
    asked = driver.one(SendOp, "prepare")
    assert (asked.op, list(asked.workers), asked.body["update_id"]) == ("prepare_update", list(MEMBERS), "u9")
    decided = driver.decided
    assert (decided.update_id, decided.made.label, decided.made.digest) == ("u9", "new", NEW)
    assert (decided.pause_mode, decided.source) == ("abort", VersionSource(FILES))
    assert driver.put(subjects.SESSION) == [None]
    assert outcome.excluded == []


def test_a_call_that_completes_an_update_may_choose_kept_kv() -> None:
    cases: list[tuple[KvPolicy | None, str]] = [(None, "recompute"), ("keep", "keep")]
    for said, kv in cases:
        driver = with_session(UpdateCommand("complete", "", kv=said), session_of(prepare()))
        driver.outcome()
        assert driver.decided.kv == kv


@pytest.mark.parametrize("call", [COMPLETE, ABORT])
def test_an_update_that_is_not_prepared_is_neither_completed_nor_aborted(call: UpdateCommand) -> None:
    driver = Driver(call)
    assert driver.error(UpdateAborted).facts["field"] == "update_id"
    driver = with_session(call, replace(SESSION, update_id="other"))
    assert "u9" in driver.error(UpdateAborted).message
    assert driver.phases == ["survey"], "the other one stays"


@pytest.mark.parametrize(
    ("policy", "gone", "ends"),
    [
        ({}, "a", UpdateAborted),
        ({"on_prepare_failure": "exclude"}, "a", None),
        ({"on_prepare_failure": "exclude"}, "abc", UpdateAborted),
        ({"on_prepare_failure": "exclude", "min_ready": 3}, "a", UpdateAborted),
    ],
)
def test_a_session_that_lost_a_worker_ends_as_its_policy_says(
    policy: dict[str, Any], gone: str, ends: type[PlaneError] | None
) -> None:
    driver = with_session(COMPLETE, session_of(prepare(policy=policy)))
    driver.members = {key: "another" if key in gone else incarnation for key, incarnation in MEMBERS.items()}
    if ends is None:
        driver.answers["watch"] = [serving("bc")]
        assert "a" in driver.outcome().excluded
        assert list(driver.one(SendOp, "prepare").workers) == ["b", "c"]
        assert list(driver.one(SendOp, "commit").workers) == ["b", "c"]
    else:
        error = driver.error(ends)
        assert driver.phases == ["survey", "session", "abort"]
        if "min_ready" not in policy:
            replies = {reply["instance_id"]: reply["status"] for reply in error.facts["workers"]}
            assert replies == {key: "error" if key in gone else "ok" for key in MEMBERS}
            assert error.message.startswith(", ".join(gone))


# ---- pushed: the workers listen between the two calls ----

PUSH = {"backend": "gloo", "manifest": "long"}
LISTENING = {"digest": "", "refetchable": False, "idle_s": SESSION_IDLE_S + 300}
"""A session whose workers wait for what is pushed, for `prepare_timeout_s` longer."""
HEARS = session_of(prepare(transport=PUSH), **LISTENING)


def received(*replies: WorkerReply) -> Answered:
    there = {key: ok(key, digest=NEW, refetchable=False) for key in MEMBERS}
    return Answered(list({**there, **{reply.instance_id: reply for reply in replies}}.values()))


def test_a_prepare_call_for_pushed_weights_only_starts_to_listen() -> None:
    driver = Driver(prepare(transport=PUSH))
    prepared = driver.prepared()
    assert driver.phases == ["survey", "begin", "prepare", "session"]
    assert driver.one(SendOp).op == "listen_update"
    patience = HEARS.body["policy"]["prepare_timeout_s"]
    assert prepared.session == HEARS
    assert HEARS.idle_s == SESSION_IDLE_S + patience
    assert (prepared.digest, prepared.ready) == ("", MEMBERS)


@pytest.mark.parametrize("why", [lost("a"), bad("a", EngineFailed("full")), silent("a")])
@pytest.mark.parametrize("policy", [{}, {"on_prepare_failure": "exclude"}])
def test_a_pushed_update_is_aborted_unless_every_worker_listens(why: WorkerReply, policy: dict[str, Any]) -> None:
    replies = Answered([why, ok("b"), ok("c")])
    for admitted in (True, False):  # a closed worker is in the group too
        driver = Driver(prepare(transport=PUSH, policy=policy), prepare=replies)
        driver.reports = [report("a", admitted=admitted), report("b"), report("c")]
        error = driver.error(UpdateAborted)
        assert len(error.facts["workers"]) == 3
        assert "a push needs every worker" in error.facts["fix"]
        assert "exclude" not in error.facts["fix"]
        assert driver.phases == ABORTED


def test_a_pushed_update_without_staging_is_refused() -> None:
    driver = Driver(prepare(transport=PUSH, policy={"staging": "none"}))
    assert driver.error(InvalidRequest).facts["field"] == "policy.staging"
    assert driver.phases == ["survey"]


def test_a_complete_call_waits_for_pushed_weights_and_commits_them() -> None:
    driver = with_session(UpdateCommand("complete", ""), HEARS, prepare=received())
    outcome = driver.outcome()
    assert driver.phases == ["survey", "prepare", "recheck", "decide", "session", *WHOLE[4:]]
    asked = driver.one(SendOp, "prepare")
    assert (asked.op, asked.body["update_id"], asked.body["transport"]) == ("prepare_update", "u9", PUSH)
    decided = driver.one(Write, "decide").record
    assert (decided.update_id, decided.made.label, decided.made.digest) == ("u9", "new", NEW)
    assert decided.source == VersionSource({"backend": "gloo"}, refetchable=False), (
        "no worker fetches by a manifest"
    )
    assert outcome.excluded == []


@pytest.mark.parametrize(
    ("policy", "replies", "digest", "ends"),
    [
        ({}, [bad("a", EngineFailed("the group broke"))], None, UpdateAborted),
        ({}, [bad("a", InvalidRequest("no such group", field="transport.group"))], None, InvalidRequest),
        ({}, [ok("a", digest="blake3:" + "2" * 64, refetchable=False)], None, UpdateAborted),
        ({}, [], "blake3:" + "2" * 64, UpdateAborted),
        ({}, [], NEW, None),
        ({"on_prepare_failure": "exclude"}, [lost("a")], NEW, None),
        ({"on_prepare_failure": "exclude", "min_ready": 3}, [lost("a")], NEW, UpdateAborted),
    ],
)
def test_a_pushed_update_whose_weights_did_not_arrive_is_not_committed(
    policy: dict[str, Any], replies: list[WorkerReply], digest: str | None, ends: type[PlaneError] | None
) -> None:
    noted = replace(HEARS, body=body(transport=PUSH, policy=policy).model_dump())
    driver = with_session(UpdateCommand("complete", "u9", digest=digest), noted, prepare=received(*replies))
    if ends is None:
        driver.answers["watch"] = [serving("bc" if replies else "abc")]
        assert driver.outcome().excluded == [reply.instance_id for reply in replies]
    else:
        assert len(driver.error(ends).facts["workers"]) == 3
        assert driver.phases == ["survey", "prepare", "session", "abort"]


def test_the_error_of_a_broken_group_names_the_worker_that_broke_it() -> None:
    broke = Unavailable("the group g broke: rank 2 is gone", field="transport.group")
    for replies in (
        [bad("a", broke), lost("b"), bad("c", broke)],
        [bad("a", broke), bad("b", EngineFailed("no room"))],
    ):
        driver = with_session(UpdateCommand("complete", "u9"), HEARS, prepare=received(*replies))
        reason = replies[1].error
        assert reason is not None
        assert driver.error(UpdateAborted).message.endswith(f": b: {reason.message}")
    driver = with_session(UpdateCommand("complete", "u9"), HEARS, prepare=received(bad("a", broke)))
    assert driver.error(UpdateAborted).message.endswith(f": a: {broke.message}")


def test_a_worker_that_left_after_it_listened_is_not_asked_to_prepare() -> None:
    noted = replace(HEARS, body=body(transport=PUSH, policy={"on_prepare_failure": "exclude"}).model_dump())
    driver = with_session(COMPLETE, noted, watch=serving("bc"))
    driver.members = {**MEMBERS, "a": "another"}
    assert driver.outcome().excluded == ["a"]
    assert list(driver.one(SendOp, "prepare").workers) == ["b", "c"]
    driver = with_session(COMPLETE, HEARS)
    driver.members = {**MEMBERS, "a": "another"}
    driver.error(UpdateAborted)
    assert driver.phases == ["survey", "session", "abort"]


@pytest.mark.parametrize(
    ("policy", "failed", "gone", "lost"),
    [
        ({}, "", "", False),
        ({}, "a", "", True),
        ({}, "", "a", True),
        ({"on_prepare_failure": "exclude"}, "a", "b", False),
        ({"on_prepare_failure": "exclude"}, "a", "bc", True),
        ({"on_prepare_failure": "exclude", "min_ready": 3}, "a", "", True),
    ],
)
def test_a_pushed_session_that_can_not_be_completed_does_not_lock_the_fleet(
    policy: dict[str, Any], failed: str, gone: str, lost: bool
) -> None:
    noted = replace(HEARS, update_id="before", body=body(transport=PUSH, policy=policy).model_dump())
    driver = with_session(update(), noted)
    driver.reports = [report(key, failed="before" if key in failed else "another") for key in MEMBERS]
    driver.members = {key: "another" if key in gone else one for key, one in MEMBERS.items()}
    if not lost:
        assert driver.error(Locked).facts["holder"] == "before"
        return
    driver.outcome()
    assert driver.phases == ["survey", "clear", "clear", *WHOLE[1:]]
    assert driver.one(SendOp, "clear").body == {"update_id": "before"}


def test_a_staged_session_that_can_not_be_completed_does_not_lock_the_fleet() -> None:
    driver = with_session(update(), replace(SESSION, update_id="before"))
    driver.members = {**MEMBERS, "a": "another"}
    driver.outcome()
    assert driver.phases == ["survey", "clear", "clear", *WHOLE[1:]]
    assert driver.one(SendOp, "clear").body == {"update_id": "before"}
    driver = with_session(update(), replace(SESSION, update_id="before"), clear=LOST)
    driver.members = {**MEMBERS, "a": "another"}
    driver.error(type(LOST))
    assert not driver.all(SendOp), "what it names stays staged: it may be completed"


def test_a_worker_that_joins_after_the_push_began_aborts_it_or_is_excluded() -> None:
    driver = with_session(COMPLETE, HEARS)
    driver.members = {**MEMBERS, "d": "id"}
    assert "d joined" in driver.error(MembershipChanged).message
    assert driver.phases == ["survey", "session", "abort"]
    meanwhile = replace(driver.surveyed(), members={**MEMBERS, "d": "id"})
    driver = with_session(COMPLETE, HEARS, prepare=received(), recheck=meanwhile)
    assert "d joined" in driver.error(MembershipChanged).message
    assert driver.phases == ["survey", "prepare", "recheck", "session", "abort"]
    noted = replace(HEARS, body=body(transport=PUSH, policy={"on_prepare_failure": "exclude"}).model_dump())
    driver = with_session(COMPLETE, noted)
    driver.members = {**MEMBERS, "d": "id"}
    driver.answers["watch"] = [lambda watch: Answered([*states(watch.record, "abc").replies, state("d", R0)])]
    assert driver.outcome().excluded == ["d"]
    assert list(driver.one(SendOp, "prepare").workers) == ["a", "b", "c"]
    # In one call.
    other = replace(Driver(update()).surveyed(), fingerprint="other")
    driver = Driver(update(transport=PUSH), recheck=other)
    driver.error(MembershipChanged)
    assert driver.phases == ["survey", "begin", "prepare", "recheck", "abort"]
    driver = Driver(update(transport=PUSH, policy={"on_prepare_failure": "exclude"}))
    driver.outcome()
    assert driver.phases == WHOLE


def test_a_complete_call_with_another_digest_than_the_staged_one_aborts() -> None:
    driver = with_session(UpdateCommand("complete", "u9", digest="blake3:" + "2" * 64), SESSION)
    assert driver.error(UpdateAborted).facts["field"] == "digest"
    assert driver.phases == ["survey", "prepare", "session", "abort"]
    assert with_session(UpdateCommand("complete", "u9", digest=NEW), SESSION).outcome().version.digest == NEW


def test_a_prepared_update_is_aborted() -> None:
    driver = with_session(ABORT, SESSION)
    assert driver.run().result == SESSION
    assert driver.phases == ["survey", "session", "abort"]
    assert driver.one(SendOp, "abort").body == {"update_id": "u9"}


def test_a_fenced_completion_gives_up() -> None:
    driver = with_session(COMPLETE, SESSION, decide=FENCED, session=FENCED)
    assert driver.run().result is FENCED
    assert driver.phases == ["survey", "prepare", "decide", "session"]


def test_a_decided_update_is_carried_out_though_its_session_can_not_be_ended() -> None:
    driver = with_session(COMPLETE, SESSION, session=LOST)
    assert driver.outcome().version.label == "new"


NAME = UpdateCommand("label", "u9", version="seven")


def test_a_prepared_update_has_the_label_that_it_was_last_given() -> None:
    driver = with_session(NAME, SESSION)
    named = driver.run().result
    assert isinstance(named, UpdateSession)
    assert (named.label, driver.phases) == ("seven", ["survey", "session"])
    assert driver.put(subjects.SESSION) == [named]
    assert with_session(COMPLETE, named).outcome().version.label == "seven"
    assert with_session(replace(COMPLETE, version="eight"), named).outcome().version.label == "eight"


def test_a_session_without_an_owner_can_be_completed() -> None:
    older = replace(SESSION, body={name: value for name, value in SESSION.body.items() if name != "owner"})
    assert UpdateSession.decode(older.encode()).owner is None
    driver = with_session(COMPLETE, UpdateSession.decode(older.encode()))
    assert driver.outcome().version.label == "new"


@pytest.mark.parametrize("session", [None, replace(SESSION, update_id="other")])
def test_an_update_that_is_not_prepared_can_not_be_named(session: UpdateSession | None) -> None:
    driver = Driver(NAME)
    driver.session = session
    driver.error(UpdateAborted)
    assert driver.phases == ["survey"]


DECIDED = replace(R1, update_id="u9")


@pytest.mark.parametrize("kept", [True, False])
def test_completed_again_after_its_coordinator_died_it_is_not_decided_twice(kept: bool) -> None:
    for record in (DECIDED, DECIDED.opened()):
        driver = Driver(COMPLETE, record)
        driver.session = SESSION if kept else None
        assert driver.outcome().version == V1
        assert "decide" not in driver.phases
        assert "abort" not in driver.phases
        assert ("clear" in driver.phases) == kept
        assert ("gate" in driver.phases) == (not record.final)


def test_a_decided_update_is_neither_aborted_nor_named_nor_prepared_again() -> None:
    for call in (ABORT, NAME, prepare()):
        driver = with_session(call, SESSION, DECIDED.opened())
        assert driver.error(Conflict).facts["version"] == V1.to_wire()
        assert driver.phases == ["survey", "clear"]


@pytest.mark.parametrize("kind", ["update", "finish"])
def test_the_session_of_a_decided_update_delays_no_call(kind: Any) -> None:
    driver = with_session(UpdateCommand(kind, "u10", body()), SESSION, DECIDED)
    driver.outcome()
    assert driver.phases[:3] == ["survey", "clear", "gate"]
    assert driver.all(Put) == [Put("clear", subjects.SESSION, None)]


@pytest.mark.parametrize("kind", ["update", "prepare", "finish", "new_run"])
def test_another_live_session_is_waited_for(kind: Any) -> None:
    driver = with_session(UpdateCommand(kind, "u10", body()), SESSION)
    error = driver.error(Locked)
    assert (error.facts["holder"], driver.phases) == ("u9", ["survey"])


# ---- fed: the trainer announces them part by part ----

FED = {"backend": "gloo", "group": "g", "in_parts": True}
FEEDING = session_of(prepare(transport=FED), **LISTENING)
PART = Part(names=["w"], dtypes=["bfloat16"], shapes=[[2, 3]], timeout_s=7.0)
FEED = UpdateCommand("receive_part", "", part=PART)


def test_a_part_goes_to_all_that_listen() -> None:
    driver = with_session(FEED, FEEDING)
    fed = driver.run().result
    assert isinstance(fed, PartReceived)
    assert (fed.missing, driver.phases) == (3, ["survey", "receive", "session"])
    asked = driver.one(SendOp)
    assert (asked.op, list(asked.workers), asked.needs) == (
        "receive_part",
        list(MEMBERS),
        Needs("u9", frozenset(MEMBERS)),
    )
    assert asked.timeout_s is not None
    assert asked.timeout_s > 7.0
    told = {"update_id": "u9", "names": ["w"], "dtypes": ["bfloat16"], "shapes": [[2, 3]], "last": False}
    assert told.items() <= asked.body.items()
    assert fed.session == replace(FEEDING, parts=1), "it waits for the next one"
    assert driver.put(subjects.SESSION) == [fed.session]


@pytest.mark.parametrize(
    ("why", "ends"),
    [
        (lost("a"), UpdateAborted),
        (silent("a"), UpdateAborted),
        (bad("a", EngineFailed("the group broke")), UpdateAborted),
        (bad("a", InvalidWeights("of another shape")), InvalidWeights),
    ],
)
@pytest.mark.parametrize("policy", [{}, {"on_prepare_failure": "exclude"}])
def test_a_part_that_one_worker_does_not_receive_ends_the_update(
    why: WorkerReply, policy: dict[str, Any], ends: type[PlaneError]
) -> None:
    noted = replace(FEEDING, body=body(transport=FED, policy=policy).model_dump())
    driver = with_session(FEED, noted, receive=Answered([why, ok("b", missing=1), ok("c", missing=1)]))
    assert len(driver.error(ends).facts["workers"]) == 3
    assert driver.phases == ["survey", "receive", "session", "abort"]


def test_a_part_is_refused_if_a_worker_has_missed_earlier_parts() -> None:
    driver = with_session(FEED, FEEDING)
    driver.members = {**MEMBERS, "a": "another"}
    driver.error(UpdateAborted)
    assert driver.phases == ["survey", "session", "abort"]
    driver = with_session(FEED, HEARS)
    assert driver.error(InvalidRequest).facts["field"] == "update_id"
    assert driver.phases == ["survey"], "the other one stays"
    assert Driver(FEED).error(UpdateAborted).facts["field"] == "update_id"


def test_a_complete_call_fails_if_a_worker_still_lacks_tensors() -> None:
    driver = with_session(UpdateCommand("complete", "", version="late"), FEEDING, prepare=received())
    assert driver.outcome().version.label == "late"
    assert driver.phases[:4] == ["survey", "receive", "prepare", "recheck"]
    assert driver.one(SendOp, "receive").body["last"] is True
    missing = bad("a", InvalidWeights("2 missing"))
    driver = with_session(UpdateCommand("complete", ""), FEEDING, receive=Answered([missing]))
    driver.error(InvalidWeights)
    assert driver.phases == ["survey", "receive", "session", "abort"]


def test_an_update_in_parts_is_refused_as_a_single_call() -> None:
    driver = Driver(replace(prepare(transport=FED), kind="update"))
    assert driver.error(InvalidRequest).facts["field"] == "transport.in_parts"
    assert driver.phases == []
