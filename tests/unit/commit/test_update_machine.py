"""The coordinator of an update, by events and expected instructions: no loop, no clock, no worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import permutations
from typing import Any, TypeVar

import pytest

from rl_plane.commit.commands import machine_for
from rl_plane.commit.opening import LEASES_END_S
from rl_plane.commit.rules import CLOSED_BY_CHOICE, newest
from rl_plane.commit.sessions import SESSION_IDLE_S
from rl_plane.commit.steps import (
    Announce,
    Answered,
    BeginJournal,
    Done,
    End,
    EndSession,
    Event,
    Failed,
    Instruction,
    Outcome,
    PartReceived,
    Prepared,
    RecordAcks,
    ResolveWrite,
    SaveCanaryHistory,
    SavePause,
    SaveSession,
    SendOp,
    Survey,
    Surveyed,
    UpdateCommand,
    WaitSilent,
    Watch,
    Write,
    Written,
)
from rl_plane.errors import (
    BusUnreachable,
    CanaryFailed,
    Conflict,
    DeadlineExceeded,
    EngineFailed,
    InvalidRequest,
    InvalidWeights,
    Locked,
    MembershipChanged,
    NotAtBase,
    NotFound,
    NotPrepared,
    NoWorkers,
    OutcomeUnknown,
    PlaneError,
    StaleFence,
    Unavailable,
    Unsupported,
    UpdateAborted,
    WorkerLost,
)
from rl_plane.membership.worker_reply import WorkerReply
from rl_plane.protocol.canary import engine_kind
from rl_plane.protocol.record import (
    MAX_DELTAS,
    CommittedAdapter,
    DecisionRecord,
    DesiredPause,
    UpdateSession,
    VersionSource,
)
from rl_plane.protocol.update_requests import Part, UpdateWeights
from rl_plane.protocol.versions import WeightVersion
from rl_plane.protocol.worker_ops import DEFAULT_PAUSE_LEASE_S

MEMBERS = {"a": "ia", "b": "ib", "c": "ic"}
NOW = 1000.0
FENCE = 15
"""The fence of the coordinator that runs the machine."""
NEW = "blake3:" + "1" * 64
FILES = {"backend": "filesystem", "path": "/new"}

V0 = WeightVersion("run-1", 0, "initial", "model")
R0 = DecisionRecord(V0, VersionSource(None), "", V0)
V1 = WeightVersion("run-1", 1, "one", "d1")
R1 = DecisionRecord(
    V1, VersionSource({"backend": "filesystem", "path": "/1"}), "u1", V1, open=False, decided_at=5.0
)
R1_OPEN = R1.opened()
LOST = BusUnreachable("NATS does not answer")
FENCED = StaleFence("another coordinator has taken over")

Kind = TypeVar("Kind", bound=Instruction)


def ok(key: str, **body: Any) -> WorkerReply:
    return WorkerReply(key, f"i{key}", "ok", body)


def bad(key: str, error: PlaneError) -> WorkerReply:
    return WorkerReply(key, f"i{key}", "error", error=error)


def silent(key: str) -> WorkerReply:
    return bad(key, DeadlineExceeded("no answer"))


def lost(key: str) -> WorkerReply:
    return bad(key, WorkerLost("it died"))


def report(
    key: str,
    record: DecisionRecord | None = R0,
    admitted: bool = True,
    model: str = "model",
    failed: str | None = None,
    canary: dict[str, int] | None = None,
) -> WorkerReply:
    wire = record.to_wire() if record is not None else None
    return ok(key, record=wire, admitted=admitted, model_digest=model, failed=failed, canary=canary)


def state(key: str, record: DecisionRecord, serves: bool = True) -> WorkerReply:
    """The `state` of a worker that holds the record's base weights."""
    admission = {"open": serves, "reasons": [] if serves else ["behind: it fetches them"]}
    version = record.version.to_wire()
    return ok(key, engine_alive=True, sequence=record.sequence, version=version, admission=admission)


def states(record: DecisionRecord, serving: str) -> Answered:
    """The states of all workers. A worker that is not in `serving` is behind."""
    return Answered([state(key, record, serves=key in serving) for key in MEMBERS])


def serving(keys: str) -> Callable[[Watch], Answered]:
    """These serve whatever is watched."""
    return lambda watch: states(watch.record, keys)


class Driver:
    """Feeds a machine with what a healthy fleet answers, unless `answers` says otherwise: phase → events, in order;
    the last one stays. `trace`: the instructions so far."""

    def __init__(self, call: UpdateCommand, record: DecisionRecord | None = R0, **answers: Any) -> None:
        self.machine = machine_for(call)
        self.members: dict[str, str] = dict(MEMBERS)
        self.record = record
        self.answers = {phase: list(one) if isinstance(one, list) else [one] for phase, one in answers.items()}
        self.trace: list[Instruction] = []
        self.session: UpdateSession | None = None
        self.reports: list[WorkerReply] | None = None
        self.pause = DesiredPause(False), 0
        self.step_s = 0.0
        """The seconds that each instruction takes."""

    def run(self) -> End:
        event: Event | None = None
        while True:
            instruction = self.machine.step(event, NOW, self.step_s * len(self.trace))
            assert self.machine.phase == instruction.phase
            if isinstance(instruction, End):
                return instruction
            self.trace.append(instruction)
            assert len(self.trace) < 50
            event = self.event(instruction)

    def event(self, instruction: Instruction) -> Event:
        special = self.answers.get(instruction.phase)
        if special:
            answer = special[0] if len(special) == 1 else special.pop(0)
            if isinstance(answer, PlaneError):
                return Failed(answer)
            if answer is not None:
                event: Event = answer(instruction) if callable(answer) else answer
                return event
        return self.healthy(instruction)

    def healthy(self, instruction: Instruction) -> Event:
        match instruction:
            case Survey() | ResolveWrite():
                return self.surveyed()
            case SendOp(op="listen_update", workers=workers):
                return Answered([ok(key, listening=True) for key in workers])
            case SendOp(op="receive_part", workers=workers):
                return Answered([ok(key, missing=3) for key in workers])
            case SendOp(op="prepare_update", workers=workers):
                return Answered([ok(key, digest=NEW, refetchable=True) for key in workers])
            case SendOp(workers=workers):
                return Answered([ok(key) for key in workers])
            case Announce():
                return RecordAcks(dict(self.members), [ok(key) for key in self.members], [])
            case Write(phase, record):
                self.record = replace(record, fence=FENCE) if phase == "decide" else record
                return Written(self.record, 20 + len(self.trace))
            case Watch(record):
                return Answered([state(key, record) for key in self.members])
            case _:
                return Done()

    def surveyed(self) -> Surveyed:
        reports = self.reports
        if reports is None:
            reports = [report(key, self.record) for key in self.members]
        return Surveyed(
            dict(self.members),
            "print",
            9,
            reports,
            self.record,
            10,
            self.session,
            *self.pause,
        )

    # ---- what it did ----

    @property
    def phases(self) -> list[str]:
        return [instruction.phase for instruction in self.trace]

    def all(self, kind: type[Kind], phase: str = "") -> list[Kind]:
        return [one for one in self.trace if isinstance(one, kind) and phase in ("", one.phase)]

    def one(self, kind: type[Kind], phase: str = "") -> Kind:
        found = self.all(kind, phase)
        assert len(found) == 1, self.trace
        return found[0]

    @property
    def decided(self) -> DecisionRecord:
        """The decision as it was written."""
        return replace(self.one(Write, "decide").record, fence=FENCE)

    def outcome(self) -> Outcome:
        result = self.run().result
        assert isinstance(result, Outcome), result
        return result

    def prepared(self) -> Prepared:
        result = self.run().result
        assert isinstance(result, Prepared), result
        return result

    def error(self, kind: type[PlaneError]) -> PlaneError:
        result = self.run().result
        assert type(result) is kind, result
        return result


def body(**fields: Any) -> UpdateWeights:
    return UpdateWeights.model_validate({"transport": FILES, "version": "new", **fields})


def update(fingerprint: str | None = None, **fields: Any) -> UpdateCommand:
    return UpdateCommand("update", "u9", body(**fields), fingerprint)


def lora(op: str, name: str = "x", **fields: Any) -> UpdateCommand:
    transport = {} if op == "unload" else {"transport": FILES}
    given = {"target": {"kind": "lora", "op": op, "name": name}, **transport, **fields}
    return UpdateCommand("update", "u9", UpdateWeights.model_validate(given))


WHOLE = ["survey", "begin", "prepare", "decide", "gate", "commit", "open", "open", "watch"]
ABORTED = ["survey", "begin", "prepare", "abort"]


# ---- a whole update ----


def test_a_whole_update() -> None:
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
        "cast": False,
        "staging": "host",
        "keep_staged": False,
        "pause_mode": "keep",
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
    assert driver.one(Watch) == Watch(decided, 0.0), "nobody is waited for: the workers say what they serve"
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
    assert driver.one(SavePause).pause == DesiredPause(True, "abort", NOW + DEFAULT_PAUSE_LEASE_S)
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


def prepared_rows(*replies: WorkerReply) -> Callable[[SendOp], Answered]:
    """These instead of the healthy ones."""

    def answer(ask: SendOp) -> Answered:
        mine = {reply.instance_id: reply for reply in replies}
        return Answered([mine.get(key) or ok(key, digest=NEW, refetchable=True) for key in ask.workers])

    return answer


def test_a_failed_prepare_aborts_on_all_and_tells_of_each() -> None:
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
            "2 workers prepared the update, policy.min_ready asks for 3",
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


def test_a_stated_digest_that_fits_is_told_to_the_workers() -> None:
    driver = Driver(update(digest=NEW))
    driver.outcome()
    assert driver.one(SendOp, "prepare").body["digest"] == NEW


def test_with_nobody_there_nothing_is_decided() -> None:
    driver = Driver(update())
    driver.members = {}
    driver.error(NoWorkers)
    assert driver.phases == ABORTED
    driver = Driver(update(), None)
    driver.reports = [report("a", None)]
    driver.error(NoWorkers)
    assert driver.phases == ["survey"], "nobody has fixed sequence 0"


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
    assert prepare["base_chain"] == ({"digest": OLD.digest, "transport": None, "refetchable": True},)
    decided = driver.one(Write, "decide").record
    assert decided.source == VersionSource(
        FILES, keep_staged=True, encoding="delta", base=OLD.digest, before=FULL.source
    )
    assert [digest for digest, _ in decided.source.chain(NEW)] == [OLD.digest, NEW]
    assert DecisionRecord.decode(decided.encode()) == decided
    # The next one is on top of it, until the chain is long enough.
    for number in range(1, MAX_DELTAS):
        onto = replace(decided.opened(), update_id=f"before {number}")
        assert onto.source.deltas == number
        driver = Driver(update(**{**DELTA, "base": NEW}), onto)
        driver.outcome()
        decided = driver.one(Write, "decide").record
    full = Driver(update(**{**DELTA, "base": NEW}), replace(decided.opened(), update_id="last"))
    assert f"{MAX_DELTAS} deltas away" in full.error(NotAtBase).message
    assert full.all(SendOp, "prepare") == []


def test_a_delta_of_another_version_than_the_committed_one_touches_nobody() -> None:
    driver = Driver(update(**{**DELTA, "base": NEW}), FULL)
    assert driver.error(NotAtBase).facts["base"] == OLD.digest
    assert driver.all(SendOp, "prepare") == []
    cast = replace(FULL, source=VersionSource(None, cast=True))
    assert "was cast" in Driver(update(**DELTA), cast).error(NotAtBase).message


def test_back_to_a_version_that_was_a_delta() -> None:
    before = VersionSource({"backend": "filesystem", "path": "/base"}, keep_staged=True)
    other = {**DELTA, "base": "blake3:" + "7" * 64}
    driver = Driver(replace(update(**other), before=before), R1_OPEN)
    driver.outcome()
    entry = {"digest": other["base"], "transport": before.transport, "refetchable": True}
    assert driver.one(SendOp, "prepare").body["base_chain"] == (entry,)
    assert driver.one(Write, "decide").record.source.before == before


@pytest.mark.parametrize("refetchable", [True, False])
def test_unstaged_only_where_the_committed_version_can_be_fetched_again(refetchable: bool) -> None:
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


def test_fenced_while_deciding_is_aborted() -> None:
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
    assert driver.phases == [*before, phase, "watch", "open"]
    decided = driver.decided
    assert driver.one(Watch) == Watch(decided, 60.0)
    assert driver.all(Write, "open")[-1].record == decided.opened()
    assert (outcome.version, outcome.excluded) == (decided.made, [])


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
    assert driver.phases[-5:] == ["roll", "roll", "open", "watch", "open"]
    assert driver.all(Write, "open")[0].record == driver.decided.opened()


@pytest.mark.parametrize("nobody", [None, Conflict("nobody tells")])
def test_a_lost_roll_tries_to_open_the_record_until_it_can_be_written(nobody: PlaneError | None) -> None:
    driver = Driver(
        update(policy={"barrier": "rolling"}), roll=LOST, open=[LOST, LOST, None], watch=[nobody, None]
    )
    driver.outcome()
    assert driver.phases[-8:] == ["roll", *["open", "watch"] * 3, "open"]
    assert [watch.timeout_s for watch in driver.all(Watch)] == [0.0, 0.0, 60.0]


def test_a_rolling_update_that_is_fenced_still_watches_the_workers() -> None:
    driver = Driver(update(policy={"barrier": "rolling"}), roll=LOST, open=FENCED)
    driver.outcome()
    assert driver.phases[-4:] == ["roll", "open", "watch", "open"]


def test_an_update_raises_the_error_of_a_watch_that_hears_no_worker() -> None:
    nobody = Conflict("committed, and nobody tells")
    driver = Driver(update(), commit=LOST, watch=nobody)
    assert driver.run().result is nobody


def test_strict_opens_only_when_the_silent_have_left_or_lost_their_leases() -> None:
    told = RecordAcks({**MEMBERS, "d": "id"}, [ok("a"), silent("b"), lost("c"), silent("d")], ["f1"])
    driver = Driver(update(), gate=told, watch=serving("a"))
    outcome = driver.outcome()
    assert driver.phases == [*WHOLE[:6], "leases", *WHOLE[6:]]
    assert driver.one(WaitSilent) == WaitSilent({"b": "ib", "d": "id"}, ["f1"]), "the dead serve nobody"
    assert list(driver.one(SendOp, "commit").workers) == ["a"], "nobody swaps who is not gated"
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


def test_a_new_process_is_not_told_to_swap_what_it_has_not_staged() -> None:
    members = {**MEMBERS, "b": "another"}
    driver = Driver(update(), gate=RecordAcks(members, [ok(key) for key in members], []))
    driver.outcome()
    assert list(driver.one(SendOp, "commit").workers) == ["a", "c"]


def test_a_worker_that_does_not_serve_the_version_at_the_end_is_excluded() -> None:
    broken = Answered([ok("a"), bad("b", EngineFailed("broken")), ok("c")])
    driver = Driver(update(), commit=broken, watch=serving("ac"))
    outcome = driver.outcome()
    assert outcome.excluded == ["b"]
    assert [reply.instance_id for reply in outcome.replies if not reply.ok] == ["b"], "why, as the commit has told"
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


def test_who_holds_another_version_does_not_serve_it() -> None:
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


# ---- two calls ----


def session_of(call: UpdateCommand, **more: Any) -> UpdateSession:
    assert call.body is not None
    made = UpdateSession(call.update_id, "new", call.body.model_dump(), NEW, True, MEMBERS, SESSION_IDLE_S)
    return replace(made, **more)


def prepare(**fields: Any) -> UpdateCommand:
    return UpdateCommand("prepare", "u9", body(**fields))


SESSION = session_of(prepare())
COMPLETE, ABORT = UpdateCommand("complete", "u9"), UpdateCommand("abort", "u9")


def with_session(call: UpdateCommand, noted: UpdateSession, *records: DecisionRecord, **answers: Any) -> Driver:
    driver = Driver(call, *records, **answers)
    driver.session = noted
    return driver


def test_a_prepare_call_saves_a_session_and_decides_nothing() -> None:
    driver = Driver(prepare())
    prepared = driver.prepared()
    assert driver.phases == ["survey", "begin", "prepare", "session"]
    assert driver.one(SaveSession).session == prepared.session
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
    assert driver.all(EndSession, "session")
    driver = Driver(prepare(), session=LOST)
    assert driver.run().result is LOST
    assert driver.phases[-2:] == ["session", "session"], "what it names stays staged: it may be completed"


def test_what_is_prepared_is_completed_by_anybody() -> None:
    call = prepare(policy={"barrier": "strict", "pause_mode": "abort"})
    driver = with_session(UpdateCommand("complete", ""), session_of(call))
    outcome = driver.outcome()
    assert driver.phases == ["survey", "prepare", "decide", "session", *WHOLE[4:]]
    asked = driver.one(SendOp, "prepare")
    assert (asked.op, list(asked.workers), asked.body["update_id"]) == ("prepare_update", list(MEMBERS), "u9")
    decided = driver.decided
    assert (decided.update_id, decided.made.label, decided.made.digest) == ("u9", "new", NEW)
    assert (decided.pause_mode, decided.source) == ("abort", VersionSource(FILES))
    assert driver.one(EndSession, "session")
    assert outcome.excluded == []


@pytest.mark.parametrize("call", [COMPLETE, ABORT])
def test_what_is_not_prepared_is_neither_completed_nor_aborted(call: UpdateCommand) -> None:
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
def test_a_session_that_lost_a_worker(policy: dict[str, Any], gone: str, ends: type[PlaneError] | None) -> None:
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
        assert len(driver.error(UpdateAborted).facts["workers"]) == 3
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
    assert decided.source == VersionSource({"backend": "gloo"}, refetchable=False), "nobody fetches by a manifest"
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
def test_a_pushed_session_that_no_worker_can_receive_does_not_lock_the_fleet(
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
    assert driver.one(SaveSession).session == named
    assert with_session(COMPLETE, named).outcome().version.label == "seven"
    assert with_session(replace(COMPLETE, version="eight"), named).outcome().version.label == "eight"


def test_a_session_without_an_owner_can_be_completed() -> None:
    older = replace(SESSION, body={name: value for name, value in SESSION.body.items() if name != "owner"})
    assert UpdateSession.decode(older.encode()).owner is None
    driver = with_session(COMPLETE, UpdateSession.decode(older.encode()))
    assert driver.outcome().version.label == "new"


@pytest.mark.parametrize("session", [None, replace(SESSION, update_id="other")])
def test_what_is_not_prepared_can_not_be_named(session: UpdateSession | None) -> None:
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


def test_what_is_decided_is_neither_aborted_nor_named_nor_prepared_again() -> None:
    for call in (ABORT, NAME, prepare()):
        driver = with_session(call, SESSION, DECIDED.opened())
        assert driver.error(Conflict).facts["version"] == V1.to_wire()
        assert driver.phases == ["survey", "clear"]


@pytest.mark.parametrize("kind", ["update", "finish"])
def test_the_session_of_a_decided_update_keeps_nobody_waiting(kind: Any) -> None:
    driver = with_session(UpdateCommand(kind, "u10", body()), SESSION, DECIDED)
    driver.outcome()
    assert driver.phases[:3] == ["survey", "clear", "gate"]
    assert driver.all(EndSession) == [EndSession("clear")]


@pytest.mark.parametrize("kind", ["update", "prepare", "finish", "new_run"])
def test_another_live_session_is_waited_for(kind: Any) -> None:
    driver = with_session(UpdateCommand(kind, "u10", body()), SESSION)
    error = driver.error(Locked)
    assert (error.facts["holder"], driver.phases) == ("u9", ["survey"])


# ---- what a dead coordinator has left ----


def test_the_newest_record_is_whichever_is_newest_in_the_store_here_or_at_a_worker() -> None:
    sealed = [replace(R1, seal=seal, update_id=f"u{seal}") for seal in (1, 2, 3)]
    for stored, witness, known in permutations(sealed):
        reports = [report("a", None), report("b", R0), report("c", known), silent("d")]
        assert newest(stored, witness, reports) == sealed[2]
    assert newest(None, None, []) is None
    assert newest(R0, None, []) == R0
    assert newest(None, R1, [report("a", R0)]) == R1


FINISH = ["gate", "commit", "open", "open", "recheck"]


def test_what_a_dead_coordinator_had_decided_is_finished_first() -> None:
    driver = Driver(update(), R1)
    outcome = driver.outcome()
    assert driver.phases == ["survey", *FINISH, *WHOLE[1:]]
    assert driver.all(Announce, "gate")[0].record == R1
    assert driver.all(Announce, "gate")[0].sequence == 10
    assert list(driver.all(SendOp, "commit")[0].workers) == ["a", "b", "c"]
    assert driver.all(Write, "open")[0].record == R1_OPEN
    assert outcome.version.sequence == 2


def test_a_worker_that_only_the_unfinished_update_closed_counts_again_once_it_is_finished() -> None:
    driver = Driver(update(), R1, prepare=prepared_rows(lost("b")))
    driver.reports = [report(key, R1, admitted=False) for key in MEMBERS]
    driver.answers["recheck"] = [
        lambda _: replace(driver.surveyed(), reports=[report(key, R1_OPEN) for key in MEMBERS])
    ]
    driver.error(UpdateAborted)
    assert driver.phases[-3:] == ["begin", "prepare", "abort"]


def test_under_the_same_id_an_update_answers_with_the_outcome_of_the_one_that_was_decided() -> None:
    commit = Answered([ok("a"), ok("b"), lost("c")])
    driver = Driver(UpdateCommand("update", "u1", body()), R1, commit=commit, watch=serving("ab"))
    outcome = driver.outcome()
    assert driver.phases == ["survey", *FINISH, "watch"]
    assert (outcome.version, outcome.excluded) == (V1, ["c"])
    driver = Driver(UpdateCommand("update", "u1", body()), R1_OPEN)
    outcome = driver.outcome()
    assert driver.phases == ["survey", "watch"], "it was opened: the workers are asked once"
    assert driver.one(Watch) == Watch(R1_OPEN, 0.0)
    assert (outcome.version, outcome.excluded) == (V1, [])
    assert [reply.instance_id for reply in outcome.replies] == ["a", "b", "c"]


@pytest.mark.parametrize(
    "call",
    [UpdateCommand("update", "u1", body()), UpdateCommand("complete", "u1"), UpdateCommand("new_run", "u1")],
    ids=lambda call: call.kind,
)
@pytest.mark.parametrize("record", [R1, R1_OPEN], ids=["decided", "opened"])
def test_a_repeated_update_is_a_conflict_if_too_few_workers_serve_its_version(
    call: UpdateCommand, record: DecisionRecord
) -> None:
    failed = Answered([bad(key, NotPrepared("no")) for key in MEMBERS])
    nobody = states(R0, "abc")
    driver = Driver(call, record, commit=failed, watch=nobody)
    error = driver.error(Conflict)
    assert "one is committed, but 0 workers serve it" in error.message
    assert error.facts["excluded"] == ["a", "b", "c"]
    assert driver.all(Watch)[-1] == Watch(R1_OPEN, 60.0), "they may heal meanwhile"
    driver = Driver(call, record, commit=failed, watch=[nobody, states(R1, "abc")])
    assert driver.outcome().excluded == []


def test_a_prepare_call_for_a_decided_update_finishes_it_and_is_a_conflict() -> None:
    driver = Driver(UpdateCommand("prepare", "u1", body()), R1)
    assert "is committed as one" in driver.error(Conflict).message
    assert driver.phases == ["survey", *FINISH]


def test_a_repeated_complete_call_applies_its_own_policy() -> None:
    one = Answered([state("a", R1), state("b", R0), state("c", R0)])
    assert Driver(UpdateCommand("complete", "u1"), R1_OPEN, watch=one).outcome().excluded == ["b", "c"]
    call = UpdateCommand("complete", "u1", min_ready=2)
    assert "1 workers serve it" in Driver(call, R1_OPEN, watch=one).error(Conflict).message
    another = replace(SESSION, update_id="u2")
    assert "1 workers serve it" in with_session(call, another, R1_OPEN, watch=one).error(Conflict).message


def test_a_finish_call_finishes_the_decided_update_and_checks_nothing_else() -> None:
    driver = Driver(
        UpdateCommand("finish", ""), R1, commit=Answered([bad(key, NotPrepared("no")) for key in MEMBERS])
    )
    assert driver.outcome() == Outcome(V1), "who serves it is not asked"
    assert driver.phases == ["survey", *FINISH]
    driver = Driver(UpdateCommand("finish", ""), R1_OPEN)
    assert driver.outcome() == Outcome(V1)
    assert driver.phases == ["survey"]


def test_a_rolling_update_that_was_left_is_ended_on_all_at_once() -> None:
    rolling = replace(R1, open=True, rolling_from=R0.held)
    driver = Driver(UpdateCommand("finish", ""), rolling)
    driver.outcome()
    assert driver.phases == ["survey", *FINISH]
    assert driver.one(Write, "open").record.rolling_from is None


def test_a_coordinator_that_finishes_a_keep_pause_update_saves_the_pause() -> None:
    left = replace(R1, keep_pause=True, pause_mode="wait", fence=8)
    for written in (3, 7):
        driver = Driver(UpdateCommand("finish", ""), left)
        driver.pause = DesiredPause(False), written
        driver.outcome()
        assert driver.phases == ["survey", "pause", *FINISH]
        assert driver.one(SavePause).pause == DesiredPause(True, "wait", NOW + DEFAULT_PAUSE_LEASE_S)
    for written in (9, 200):  # after the lock of its coordinator was taken
        resumed = Driver(UpdateCommand("finish", ""), left)
        resumed.pause = DesiredPause(False), written
        resumed.outcome()
        assert not resumed.all(SavePause), "another call has resumed the fleet since"


def test_a_pause_outlives_an_update_by_the_longer_lease() -> None:
    driver = Driver(update(policy={"keep_pause": True}))
    driver.pause = DesiredPause(True, "wait", NOW + 3600.0), 3
    driver.outcome()
    assert driver.one(SavePause).pause == DesiredPause(True, "keep", NOW + 3600.0)
    assert driver.one(SendOp, "commit").body["pause_s"] == 3600.0
    driver = Driver(update())
    driver.pause = DesiredPause(True, "wait", NOW + 5.0), 3
    driver.outcome()
    assert driver.one(SendOp, "commit").body["pause_s"] == 5.0
    assert not driver.all(SavePause)


# ---- a new run ----


def new_run(record: DecisionRecord | None = R1_OPEN, **answers: Any) -> Driver:
    return Driver(UpdateCommand("new_run", "n1"), record, **answers)


def test_a_new_run_begins_by_the_model_of_all() -> None:
    driver = new_run()
    outcome = driver.outcome()
    assert driver.phases == ["survey", "begin", *WHOLE[3:]]
    record = driver.decided
    assert (record.sequence, record.version.digest, record.run_number) == (0, "model", 1)
    assert (record.source, record.adapters, record.open, record.update_id) == (
        VersionSource(None),
        {},
        False,
        "n1",
    )
    assert record.version.run != V1.run
    assert list(driver.one(SendOp, "commit").workers) == []
    assert outcome.excluded == []
    again = new_run(driver.record)
    assert again.outcome().version == record.made
    assert again.phases == ["survey", "watch"], "under its id there is one"


@pytest.mark.parametrize("other", [report("c", model="another"), silent("c")])
def test_a_new_run_needs_every_workers_word(other: WorkerReply) -> None:
    driver = new_run()
    driver.reports = [report("a"), report("b"), other]
    error = driver.error(Conflict)
    assert len(error.facts["workers"]) == 3
    assert driver.phases == ["survey"]
    driver = new_run()
    driver.members, driver.reports = {}, []
    driver.error(Conflict)


def test_a_new_run_that_nobody_serves_is_no_success() -> None:
    driver = new_run(watch=states(R1, "abc"))
    driver.error(Conflict)


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


# ---- the numeric canary ----

CANARY = {"sequences": [[1, 2, 3]], "expected": [[-1.0, -2.0]]}
KIND = engine_kind("hf", "5.0", "float32", "cpu", 1)


def scored(*values: float) -> Callable[[SendOp], Answered]:
    """The replies with each worker's first score. The trainer expects -1 and -2."""
    replies = [
        ok(key, canary={"kind": KIND, "vectors": [[one, -2.0]]}) for key, one in zip("abc", values, strict=True)
    ]
    return lambda ask: Answered([reply for reply in replies if reply.instance_id in ask.workers])


def with_canary(commit: Any, base: DecisionRecord = R0, on_failure: str = "rollback", **answers: Any) -> Driver:
    policy = {"canary": CANARY, "on_canary_failure": on_failure, "barrier": answers.pop("barrier", "strict")}
    driver = Driver(update(policy=policy), base, **{"commit": commit, "roll": commit, **answers})
    driver.reports = [report(key, base, canary={"vocab_size": 10, "max_model_len": 10}) for key in MEMBERS]
    return driver


BACK = [*WHOLE[:6], "decide", "gate", "commit", "open", "open", "watch"]


def test_a_worker_with_other_canary_scores_is_excluded_and_the_version_opens_with_the_others_scores() -> None:
    driver = with_canary(scored(-1.0, -1.0, -5.0), watch=serving("ab"))
    outcome = driver.outcome()
    assert driver.phases == [*WHOLE[:7], "open", "open", "watch"]
    assert outcome.excluded == ["c"]
    assert [reply.error and reply.error.code for reply in outcome.replies] == [None, None, "numerics"]
    opened = driver.one(Write, "open").record
    assert opened.canary is not None
    assert opened.canary.references == {KIND: ((-1.0, -2.0),)}
    assert driver.one(Announce, "open").record == opened
    history = driver.one(SaveCanaryHistory).history
    assert history is not None
    assert history.values(NEW, opened.canary.sequences) == opened.canary.references


def test_a_version_that_all_workers_fail_is_never_opened_and_the_version_before_returns() -> None:
    driver = with_canary(scored(-5.0, -5.0, -5.0))
    error = driver.error(CanaryFailed)
    assert driver.phases == BACK
    failed, back = (one.record for one in driver.all(Write, "decide"))
    assert failed.fallback == R0
    assert not failed.open
    assert (back.version.digest, back.sequence, back.update_id) == (V0.digest, 2, "u9")
    assert back.missed is not None
    assert [one.record.made for one in driver.all(Write, "open")] == [back.made]
    assert [one.record.made for one in driver.all(Announce)] == [failed.made, back.made, back.made]
    assert error.facts["failed_version"] == failed.made.to_wire()
    assert [row["error"]["code"] for row in error.facts["workers"]] == ["numerics"] * 3
    assert error.facts["serving"] == ["a", "b", "c"]


@pytest.mark.parametrize("keys", ["", "ab"])
def test_the_answer_names_how_many_workers_serve_the_version_that_came_back(keys: str) -> None:
    error = with_canary(scored(-5.0, -5.0, -5.0), watch=serving(keys)).error(CanaryFailed)
    assert error.facts["serving"] == [*keys]
    if keys:
        assert "the fleet is back at initial on 2 of 3 workers" in error.message
        assert "warning" not in error.facts["canary"]
    else:
        assert "no worker serves initial, which is committed again (behind: it fetches them)" in error.message
        assert "no worker could bring it back: behind: it fetches them" in error.facts["canary"]["warning"]


def test_a_rolling_update_that_fails_its_canary_reaches_only_the_first_worker() -> None:
    driver = with_canary(scored(-5.0, -1.0, -1.0), barrier="rolling")
    driver.error(CanaryFailed)
    assert [list(one.workers) for one in driver.all(SendOp, "roll")] == [["a"]]
    assert driver.all(Write, "decide")[1].record.version.digest == V0.digest


def test_if_no_earlier_version_can_return_the_failed_one_stays_and_no_worker_serves_it() -> None:
    for base, on_failure in (
        (R0, "exclude"),
        (replace(R1_OPEN, source=replace(R1.source, refetchable=False)), "rollback"),
    ):
        driver = with_canary(scored(-5.0, -5.0, -5.0), base, on_failure, watch=serving(""))
        error = driver.error(CanaryFailed)
        assert "no worker serves it" in error.message
        assert "publish another version" in error.facts["fix"]
        assert len(driver.all(Write, "decide")) == 1
        assert driver.one(Write, "decide").record.fallback is None
        assert error.facts["excluded"] == ["a", "b", "c"]
        assert [one.timeout_s for one in driver.all(Watch)] == [0.0], "nobody heals from that"


@pytest.mark.parametrize("found", [True, False])
def test_a_rollback_decision_with_a_lost_answer_is_resolved_by_the_version_in_the_record(found: bool) -> None:
    """Both records have one update id. The stored record may be the version that all workers fail."""
    driver = with_canary(scored(-5.0, -5.0, -5.0), decide=[None, LOST], watch=serving(""))
    driver.answers["resolve"] = [
        lambda _: replace(
            driver.surveyed(), record=replace(driver.all(Write, "decide")[int(found)].record, fence=FENCE)
        )
    ]
    if found:
        driver.error(CanaryFailed)
        assert driver.phases == [*BACK[:7], "resolve", *BACK[7:]]
        return
    driver.error(Conflict)
    assert driver.phases == [*BACK[:7], "resolve", "watch"], "the next coordinator brings it back"


@pytest.mark.parametrize("why", [LOST, FENCED])
def test_an_update_that_is_lost_before_its_canary_is_judged_is_left_to_the_next_coordinator(
    why: PlaneError,
) -> None:
    driver = with_canary(why, watch=serving(""))
    driver.error(Conflict)
    assert driver.phases == [*WHOLE[:6], "watch"]
    driver = with_canary(scored(-1.0, -1.0, -1.0), open=[why, None])
    driver.outcome()
    assert driver.phases == [*WHOLE[:7], "watch", "open"]
    opened = driver.all(Write, "open")[-1].record
    assert opened.canary is not None
    assert opened.canary.references == {KIND: ((-1.0, -2.0),)}


def test_a_coordinator_that_finishes_a_version_that_all_workers_fail_returns_to_the_one_before() -> None:
    first = with_canary(scored(-5.0, -5.0, -5.0))
    first.run()
    left = replace(first.all(Write, "decide")[0].record, fence=8)
    driver = Driver(UpdateCommand("finish", ""), left, commit=scored(-5.0, -5.0, -5.0))
    outcome = driver.outcome()
    assert driver.phases == ["survey", "gate", "commit", *BACK[6:], "recheck"]
    assert (outcome.version.digest, outcome.version.sequence) == (V0.digest, 2)
    again = Driver(UpdateCommand("update", "u9", body()), driver.record)
    again.error(CanaryFailed)
    assert again.phases == ["survey"]


def left_by_a_dead_coordinator(on_failure: str = "rollback") -> DecisionRecord:
    first = with_canary(scored(-5.0, -5.0, -5.0), on_failure=on_failure)
    first.run()
    return replace(first.all(Write, "decide")[0].record, fence=8)


def fetching(keys: str) -> Answered:
    """These workers swap by themselves, and have nothing to report yet."""
    return Answered([bad(key, NotPrepared("the update is not staged here")) for key in keys])


@pytest.mark.parametrize("kind", ["finish", "update"])
def test_a_coordinator_waits_for_the_scores_of_workers_that_fetch_by_themselves(kind: Any) -> None:
    left = left_by_a_dead_coordinator()
    miss = scored(-5.0, -5.0, -5.0)
    call = UpdateCommand(kind, "u9" if kind == "update" else "", body())
    driver = Driver(call, left, commit=[fetching("abc"), fetching("abc"), miss])
    driver.run()
    assert driver.phases[:6] == ["survey", "gate", "commit", "watch", "commit", "watch"]
    assert driver.one(Write, "decide").record.version.digest == V0.digest
    assert left.made not in [one.record.made for one in driver.all(Write, "open")]


def test_a_coordinator_waits_for_no_more_scores_once_a_worker_has_passed() -> None:
    left = left_by_a_dead_coordinator()
    passed = Answered(
        [*scored(-1.0, -1.0, -1.0)(SendOp("commit", "", {}, ["a"])).replies, *fetching("bc").replies]
    )
    driver = Driver(UpdateCommand("finish", ""), left, commit=passed)
    driver.outcome()
    assert driver.phases == ["survey", "gate", "commit", "open", "open", "open", "recheck"]
    driver = Driver(UpdateCommand("finish", ""), left_by_a_dead_coordinator("exclude"), commit=fetching("abc"))
    driver.outcome()
    assert driver.phases == ["survey", "gate", "commit", "open", "open", "recheck"], "no score would change that"


def test_a_coordinator_waits_for_scores_only_as_long_as_a_commit_may_take() -> None:
    driver = Driver(UpdateCommand("finish", ""), left_by_a_dead_coordinator(), commit=fetching("abc"))
    driver.step_s = 10.0
    driver.outcome()
    assert driver.phases.count("commit") == 5
    assert driver.one(Write, "open").record.fallback is None


def test_asked_again_an_update_that_stays_unserved_tells_why() -> None:
    left = left_by_a_dead_coordinator("exclude")
    driver = Driver(
        UpdateCommand("update", "u9", body()), left, commit=scored(-5.0, -5.0, -5.0), watch=serving("")
    )
    error = driver.error(CanaryFailed)
    assert error.facts["canary"]["action"] == "exclude"


def test_a_canary_that_the_engines_can_not_score_touches_nobody() -> None:
    policy = {"canary": CANARY}
    assert Driver(update(policy=policy)).error(Unsupported).facts["field"] == "policy.canary"
    driver = with_canary(None)
    driver.reports = [report("a", canary={"vocab_size": 3, "max_model_len": 10}), report("b"), silent("c")]
    assert driver.error(InvalidRequest).facts["field"].startswith("policy.canary")
    assert driver.phases == ["survey"]


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
    assert (asked.op, list(asked.workers), asked.together) == ("receive_part", list(MEMBERS), "u9")
    assert asked.timeout_s is not None
    assert asked.timeout_s > 7.0
    told = {"update_id": "u9", "names": ["w"], "dtypes": ["bfloat16"], "shapes": [[2, 3]], "last": False}
    assert told.items() <= asked.body.items()
    assert fed.session == replace(FEEDING, parts=1), "it waits for the next one"
    assert driver.one(SaveSession).session == fed.session


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
