"""The history of updates: its entries, how an unfinished one is evaluated, and where a roll-back may lead."""

from __future__ import annotations

import logging
import typing
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, NotRequired

import pytest
from pydantic import TypeAdapter

from rl_plane.commit import history
from rl_plane.commit.canary_rules import Settlement, Verdict
from rl_plane.commit.history import UpdateEntry, evaluate_entry, request_hash
from rl_plane.commit.journal import Journal
from rl_plane.commit.past_versions import rollback_target, source_of, target_of
from rl_plane.errors import (
    Conflict,
    InvalidRequest,
    NotFound,
    UpdateAborted,
)
from rl_plane.membership.core import Member
from rl_plane.protocol import update_requests, validation
from rl_plane.protocol.canary import CanaryRecord
from rl_plane.protocol.fleet_reply_types import PastUpdate
from rl_plane.protocol.record import DecisionRecord, UpdateSession, VersionSource
from rl_plane.protocol.update_requests import SHOWN_AS_ASKED, BaseTarget, UpdateWeights
from rl_plane.protocol.versions import WeightVersion

if TYPE_CHECKING:
    pass

DIGEST = "blake3:" + "ab" * 32
OTHER_DIGEST = "blake3:" + "cd" * 32


def version(sequence: int, label: str = "", digest: str = DIGEST, run: str = "r") -> WeightVersion:
    return WeightVersion(run, sequence, label or f"step_{sequence}", digest)


def committed(sequence: int, label: str = "", digest: str = DIGEST, run: str = "r", **more: Any) -> UpdateEntry:
    made = version(sequence, label, digest, run)
    transport = {"backend": "filesystem", "path": f"/ckpt/{sequence}"}
    given: dict[str, Any] = {"transport": transport, "digest": digest, "version": made, **more}
    return UpdateEntry(f"u{sequence}", made.label, "committed", **given)


def member(instance_id: str, model_path: str) -> Member:
    return Member(instance_id, "i", "s", 1, 1, {"model_path": model_path})


def test_the_type_of_an_update_in_the_reply_has_the_keys_of_its_entry() -> None:
    only_of_the_plane = {"request", "before", "min_ready", "asked"}
    hints = typing.get_type_hints(PastUpdate, include_extras=True)
    assert hints.keys() == {each.name for each in fields(UpdateEntry)} - only_of_the_plane | set(SHOWN_AS_ASKED)
    always = {name for name, kind in hints.items() if typing.get_origin(kind) is not NotRequired}
    bare = UpdateEntry("u", "step_1", "running").to_wire()
    assert bare.keys() == always
    score = Verdict(True, "reference", difference=0.01, tolerance=0.02)
    settlement = Settlement("open", {"w": score}, [], CanaryRecord(((1, 2),)))
    full = committed(
        1,
        workers={"w": {"incarnation": "i", "status": "error", "error": {"code": "worker_lost", "message": "m"}}},
        sources={"w": [{"source": "trainer", "bytes": 1, "seconds": 0.1}]},
        canary=settlement.summary(),
        asked={"step": 7},
    ).to_wire()
    for wire in (bare, full):
        TypeAdapter(PastUpdate).validate_python(wire)


def test_the_history_shows_the_fields_of_a_request_by_their_names() -> None:
    assert set(SHOWN_AS_ASKED) <= UpdateWeights.model_fields.keys()
    assert not set(SHOWN_AS_ASKED) & {each.name for each in fields(UpdateEntry)}, "the entry's own field would win"
    manifest = {"buckets": [1, 2]}
    transport = {"backend": "gloo", "manifest": manifest}
    body = UpdateWeights.model_validate({"transport": transport, "version": "step_7", "step": 7, "cast": True})
    entry = UpdateEntry.of("u", body)
    assert UpdateEntry.decode(entry.encode()).asked == entry.asked
    wire = entry.to_wire()
    assert (wire["step"], wire["label"], wire["cast"], wire["num_buckets"]) == (7, "step_7", True, 2)
    assert wire["transport"] == {"backend": "gloo"}
    assert "asked" not in wire
    assert "step" not in UpdateEntry.of("u", body.model_copy(update={"step": None})).to_wire()


def test_an_entry_survives_its_encoding() -> None:
    entry = committed(
        3,
        who="frontend@host:1",
        began_at=1.5,
        ended_at=2.5,
        phases={"prepare_s": 0.5},
        workers={"a" * 16: {"incarnation": "i", "status": "ok"}},
        excluded=["b" * 16],
        target={"kind": "base"},
        request="abc",
    )
    assert UpdateEntry.decode(entry.encode()) == entry
    wire = entry.to_wire()
    assert wire["version"]["sequence"] == 3
    assert "request" not in wire
    assert "error" not in wire
    running = UpdateEntry("u", "l", "running")
    assert UpdateEntry.decode(running.encode()) == replace(running, excluded=[])
    assert running.to_wire()["version"] is None


@pytest.mark.parametrize("failed", [0, 7, 20_000])
def test_an_entry_of_any_fleet_fits_into_a_message(failed: int) -> None:
    error = {"code": "worker_lost", "message": "m" * 500}
    rows: dict[str, dict[str, Any]] = {}
    for number in range(20_000):
        row = {"incarnation": "0" * 32, "status": "ok"}
        rows[f"{number:016x}"] = {**row, "status": "error", "error": error} if number < failed else dict(row)
    entry = committed(1, workers=rows, excluded=list(rows)[:failed])
    data = entry.encode()
    assert len(data) <= history.MAX_ENTRY_BYTES
    kept = UpdateEntry.decode(data)
    assert kept.workers_left_out + len(kept.workers) == 20_000
    if failed == 7:
        assert len(kept.workers) == 7
        assert len(kept.excluded) == 7


def test_an_entry_loses_a_transport_that_does_not_fit_and_no_roll_back_leads_to_it() -> None:
    urls = {f"model-{number:05}.safetensors": "https://a.example/" + "x" * 1932 for number in range(260)}
    rows = {"w": {"incarnation": "i", "status": "ok"}}
    entry = committed(1, transport={"backend": "http", "urls": urls}, workers=rows, excluded=["w"])
    kept = UpdateEntry.decode(entry.encode())
    assert (kept.transport, kept.refetchable) == ({"backend": "http"}, False)
    with pytest.raises(Conflict, match="can't be fetched"):
        source_of(kept, [])


def test_the_log_calls_an_update_committed_by_its_own_decision_only(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    nothing: Any = None
    journal = Journal(nothing, nothing, nothing, "me", "u1", None, "step_1")
    source = VersionSource(None)
    own = DecisionRecord(version(1), source, "u1", version(1))
    journal.decided(own)
    journal.decided(replace(own, made=version(2), missed={"version": version(1).to_wire()}))
    journal.decided(replace(own, made=version(3), update_id="u0"))
    assert [record.message for record in caplog.records] == [
        "update u1 (step_1) is committed as sequence 1, asked by me"
    ]


def test_a_request_is_the_same_whatever_its_policy() -> None:
    body = {"transport": {"backend": "filesystem", "path": "/x"}, "version": None, "policy": {"min_ready": 1}}
    same = {"policy": {"min_ready": 9}, "transport": {"path": "/x", "backend": "filesystem"}}
    assert request_hash(body) == request_hash(same)
    assert request_hash(body) != request_hash({**same, "version": "v"})


def test_an_unfinished_entry_is_evaluated_by_the_record_the_lock_and_the_session() -> None:
    entry = UpdateEntry("u", "step_3", "running", "me", began_at=1.0)
    record = DecisionRecord(
        version(3), VersionSource({"backend": "filesystem", "path": "/x"}), "u", version(3), decided_at=9.0
    )
    before = replace(record, update_id="before")
    session = UpdateSession("u", "step_3", {}, DIGEST, True, {}, idle_s=120)
    done = evaluate_entry(entry, record, None, "u")
    assert (done.outcome, done.version, done.digest, done.ended_at) == ("committed", record.version, DIGEST, 9.0)
    assert (done.who, done.began_at) == ("me", 1.0)
    assert evaluate_entry(entry, before, None, "u").outcome == "running"
    assert evaluate_entry(entry, before, session, None).outcome == "prepared"
    for left in (
        evaluate_entry(entry, before, replace(session, update_id="another"), None),
        evaluate_entry(replace(entry, outcome="prepared"), before, None, "another"),
        evaluate_entry(entry, None, None, None),
    ):
        assert left.outcome == "aborted"
        assert left.version is None
        assert isinstance(left.first_error(), UpdateAborted)
    final = committed(2)
    assert evaluate_entry(final, before, None, None) is final
    aborted = replace(entry, outcome="aborted")
    assert evaluate_entry(aborted, before, None, None) is aborted
    assert evaluate_entry(aborted, record, None, None).outcome == "committed", "a late decision stands"


def test_a_rollback_means_one_committed_version_of_this_run() -> None:
    entries = [
        UpdateEntry("x", "step_9", "aborted"),
        committed(5, "step_1"),
        committed(4, "other", OTHER_DIGEST),
        committed(3, "twice", OTHER_DIGEST),
        committed(2, "twice"),
        committed(1, "step_1"),
        committed(7, "old", run="before"),
    ]
    assert rollback_target(entries, "r", "step_1", None) is entries[1]
    assert rollback_target(entries, "r", None, 2) is entries[4]
    for label, sequence in [("step_9", None), ("old", None), (None, 7), ("twice", None)]:
        with pytest.raises(NotFound) as caught:
            rollback_target(entries, "r", label, sequence)
        assert caught.value.facts["field"].startswith("rollback")
        assert "4 (other)" in caught.value.facts["fix"]
        assert [one["sequence"] for one in caught.value.facts["versions"]] == [5, 4, 3, 2, 1]
    with pytest.raises(NotFound, match="no committed version"):
        rollback_target([], "r", "step_1", None)


def test_a_rollback_takes_the_source_of_its_entry_or_the_models_path() -> None:
    entry = committed(1)
    assert source_of(entry, []) == {"backend": "filesystem", "path": "/ckpt/1"}
    initial = replace(entry, transport=None)
    assert source_of(initial, [member("a", "/m"), member("b", "/m")])["path"] == "/m"
    with pytest.raises(Conflict) as caught:
        source_of(initial, [member("a", "/m"), member("b", "/n")])
    assert caught.value.facts["paths"] == ["/m", "/n"]
    with pytest.raises(Conflict):
        source_of(replace(entry, refetchable=False), [])


def test_a_rollback_of_the_base_keeps_the_adapters_that_are_loaded_now() -> None:
    dropped = replace(committed(1), target={"kind": "base", "adapters": "drop"})
    for entry in (committed(1), dropped):
        assert BaseTarget.model_validate(target_of(entry, ["a"])).adapters == "keep"


def test_an_adapter_is_rolled_back_by_loading_or_swapping_it() -> None:
    loaded = replace(committed(1), target={"kind": "lora", "op": "load", "name": "a"})
    assert target_of(loaded, []) == {"kind": "lora", "op": "load", "name": "a"}
    assert target_of(loaded, ["a"])["op"] == "swap"
    with pytest.raises(Conflict):
        target_of(replace(loaded, target={"kind": "lora", "op": "unload", "name": "a"}), ["a"])


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "transport"),
        ({"transport": {"backend": "x"}, "rollback": {"label": "a"}}, "transport"),
        ({"rollback": {"label": "a"}, "digest": DIGEST}, "digest"),
        ({"rollback": {"label": "a"}, "cast": True}, "cast"),
        ({"rollback": {}}, "rollback"),
        ({"rollback": {"label": "a", "sequence": 1}}, "rollback"),
        ({"rollback": {"sequence": -1}}, "rollback.sequence"),
        ({"rollback": "step_1"}, "rollback"),
    ],
)
def test_an_update_has_one_source(body: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        validation.parse_body(update_requests.UpdateCall, body)
    assert caught.value.facts["field"] == field
    assert caught.value.facts["fix"]
