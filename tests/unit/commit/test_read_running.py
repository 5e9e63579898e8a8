"""The running update, from the lock, the session, the history and the workers' reports."""

from __future__ import annotations

from typing import Any

from rl_plane.bus.lock import Holder
from rl_plane.commit.history import UpdateEntry
from rl_plane.commit.running_update import running, with_workers
from rl_plane.membership.worker_reply import WorkerReply
from rl_plane.protocol.record import UpdateSession

NOW = 1_000.0
HOLDER: Holder = {
    "owner": "frontend@a:1",
    "server_id": "s",
    "client_id": 1,
    "nonce": "n",
    "update_id": "u",
    "phase": "prepare",
    "phase_began_ms": 990_000,
    "phase_bound_ms": 1_290_000,
}
ENTRY = UpdateEntry(
    "u",
    "step_1",
    "running",
    "frontend@a:1",
    asked_by="key",
    caller="train.py@gpu3:7 at 10.0.0.7",
    began_at=980.0,
    transport={"backend": "gloo"},
)


def session(digest: str) -> UpdateSession:
    return UpdateSession("u", "step_1", {}, digest, True, {"a": "i"}, 120)


def row(instance_id: str, received: int, since_s: float, update_id: str = "u") -> WorkerReply:
    update: dict[str, Any] = {
        "update_id": update_id,
        "bytes": received,
        "total_bytes": 10,
        "bytes_per_s": 2.0,
        "since_progress_s": since_s,
        "waits_for": "the trainer's bytes",
    }
    return WorkerReply(instance_id, "i", "ok", body={"update": update})


def test_a_phase_has_its_time_and_what_is_left_of_it() -> None:
    found = running("u", HOLDER, None, ENTRY, NOW)
    assert (found["phase"], found["in_phase_s"], found["deadline_in_s"], found["elapsed_s"]) == (
        "prepare",
        10.0,
        290.0,
        20.0,
    )
    assert (found["caller"], found["asked_by"], found["who"]) == (
        "train.py@gpu3:7 at 10.0.0.7",
        "key",
        "frontend@a:1",
    )
    assert found["waits_for"] == "the workers, which receive it"


def test_between_two_calls_it_waits_for_the_trainer() -> None:
    listening = running("u", None, session(""), ENTRY, NOW)
    prepared = running("u", None, session("blake3:" + "ab" * 32), ENTRY, NOW)
    assert (listening["phase"], prepared["phase"]) == ("receive", "prepared")
    assert listening["idle_limit_s"] == 120
    assert "next call" in prepared["waits_for"]


def test_the_slowest_worker_says_what_the_update_waits_for() -> None:
    found = running("u", HOLDER, None, ENTRY, NOW)
    rows = [row("a", 10, 3.0), row("b", 4, 19.0), row("c", 6, 2.0), row("d", 0, 99.0, "another")]
    rows.append(WorkerReply("e", "i", "ok", body={"update": None}))
    found = with_workers(found, rows)
    assert found["waits_for"] == "the trainer's bytes, since 19 s (2 of 3 workers)"
    assert (found["workers"], found["bytes"], found["total_bytes"]) == (3, 20, 30)
    assert (found["bytes_per_s"], found["since_progress_s"]) == (6.0, 19.0)


def test_after_the_decision_the_phase_says_what_it_waits_for() -> None:
    gate: Holder = {**HOLDER, "phase": "gate"}
    found = with_workers(running("u", gate, None, ENTRY, NOW), [row("a", 4, 19.0)])
    assert found["waits_for"] == "the workers and frontends to learn the decision"


def test_before_an_update_writes_its_entry_only_the_lock_describes_it() -> None:
    just_locked = {key: value for key, value in HOLDER.items() if not key.startswith("phase")}
    found = running("u", just_locked, None, None, NOW)
    assert (found["phase"], found["label"], found["began_at"], found["elapsed_s"]) == ("survey", "", None, 0.0)
