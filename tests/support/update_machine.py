"""Drives the machine of an update by hand: events in, expected instructions out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from rl_plane.commit.commands import machine_for
from rl_plane.commit.steps import (
    SESSION_IDLE_S,
    Announce,
    Answered,
    Done,
    End,
    Event,
    Failed,
    Instruction,
    Outcome,
    Prepared,
    Put,
    RecordAcks,
    ResolveWrite,
    SendOp,
    Survey,
    Surveyed,
    UpdateCommand,
    Watch,
    Write,
    Written,
)
from rl_plane.errors import (
    BusUnreachable,
    DeadlineExceeded,
    PlaneError,
    StaleFence,
    WorkerLost,
)
from rl_plane.membership.worker_reply import WorkerReply
from rl_plane.protocol.record import (
    DecisionRecord,
    DesiredPause,
    UpdateSession,
    VersionSource,
)
from rl_plane.protocol.update_requests import UpdateWeights
from rl_plane.protocol.versions import WeightVersion

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
            case SendOp(op="open_relay", workers=workers):
                places = {
                    key: {"host": key, "address": "127.0.0.1", "port": 1 + at} for at, key in enumerate(workers)
                }
                return Answered([ok(key, relay=[place]) for key, place in places.items()])
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

    def put(self, key: str) -> list[Any]:
        """The values that were written to a key of the state bucket. None: the end of a session."""
        return [one.value for one in self.all(Put) if one.key == key]

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


def prepared_rows(*replies: WorkerReply) -> Callable[[SendOp], Answered]:
    """These instead of the healthy ones."""

    def answer(ask: SendOp) -> Answered:
        mine = {reply.instance_id: reply for reply in replies}
        return Answered([mine.get(key) or ok(key, digest=NEW, refetchable=True) for key in ask.workers])

    return answer


def session_of(call: UpdateCommand, **more: Any) -> UpdateSession:
    assert call.body is not None
    made = UpdateSession(call.update_id, "new", call.body.model_dump(), NEW, True, MEMBERS, SESSION_IDLE_S)
    return replace(made, **more)


def prepare(**fields: Any) -> UpdateCommand:
    return UpdateCommand("prepare", "u9", body(**fields))


SESSION = session_of(prepare())


def with_session(call: UpdateCommand, noted: UpdateSession, *records: DecisionRecord, **answers: Any) -> Driver:
    driver = Driver(call, *records, **answers)
    driver.session = noted
    return driver
