"""Facts of a small fleet, for tests of what explains it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_plane.cli.explain.known_facts import KnownFacts

ONE, TWO = "aaaa000000000001", "bbbb000000000002"
NOW = 1_800_000_000.0
VERSION = {"run": "r", "sequence": 3, "label": "step_3", "digest": "xxh3:" + "0" * 32}
NATS = {
    "url": "nats://n:4222",
    "connected": True,
    "lost_s": None,
    "version": "2.11.0",
    "max_payload": 1 << 20,
    "jetstream": True,
}
ABOUT: dict[str, Any] = {
    "frontend": {"name": "frontend-1@head:5", "host": "head", "pid": 5, "version": "0.1.0", "clock": NOW},
    "key": {"id": "", "role": "admin"},
    "nats": NATS,
    "serving_lease": True,
    "lock": None,
    "pause_left_s": 0.0,
    "expected": None,
    "workers": {},
}


def worker_row(instance_id: str = ONE, *reasons: str, **more: Any) -> dict[str, Any]:
    """A worker's row of `state`: open without `reasons`."""
    return {
        "instance_id": instance_id,
        "incarnation": "i",
        "status": "ok",
        "ready": not reasons,
        "in_state_s": 30.0,
        "admission": {"open": not reasons, "reasons": list(reasons)},
        "pause": {"paused": False, "mode": None, "lease_left_s": None},
        "version": VERSION,
        "update": None,
        "running": 0,
        "waiting": 0,
        **more,
    }


def silent_row(instance_id: str = ONE) -> dict[str, Any]:
    error = {"code": "deadline_exceeded", "message": "no answer within 1 s"}
    return {"instance_id": instance_id, "incarnation": "i", "status": "error", "error": error}


def running_update(**more: Any) -> dict[str, Any]:
    return {
        "update_id": "u-17",
        "label": "step_4",
        "phase": "receive",
        "caller": "train.py@gpu3:4711 at 10.0.0.7",
        "asked_by": "",
        "who": "frontend-1@head:5",
        "transport": "gloo",
        "began_at": NOW - 21,
        "elapsed_s": 21.0,
        "in_phase_s": None,
        "deadline_in_s": None,
        "idle_limit_s": 120.0,
        "waits_for": "the trainer's bytes, since 19 s (2 of 2 workers)",
        "workers": 2,
        "bytes": 0,
        "total_bytes": 4_000_000,
        "bytes_per_s": 0.0,
        "since_progress_s": 19.0,
        **more,
    }


def ended_update(update_id: str = "u-16", **more: Any) -> dict[str, Any]:
    return {
        "update_id": update_id,
        "label": "step_3",
        "outcome": "committed",
        "who": "frontend-1@head:5",
        "caller": "train.py@gpu3:4711",
        "began_at": NOW - 100,
        "ended_at": NOW - 90,
        "version": VERSION,
        "phases": {"wait_s": 0.01, "prepare_s": 9.0, "commit_s": 0.9},
        "workers": {ONE: {"status": "ok"}, TWO: {"status": "ok"}},
        **more,
    }


def left_worker(instance_id: str = TWO, **more: Any) -> dict[str, Any]:
    return {
        "instance_id": instance_id,
        "incarnation": "i",
        "engine": "fake",
        "host": "gpu3",
        "pid": 77,
        "left_at": NOW - 12,
        "ago_s": 12.0,
        "reason": "silent",
        "why": "it did not answer: it hangs, or the network between is broken",
        "back": False,
        **more,
    }


def known(
    *rows: Mapping[str, Any],
    update: Mapping[str, Any] | None = None,
    left: tuple[Mapping[str, Any], ...] = (),
    starting: tuple[Mapping[str, Any], ...] = (),
    expected: int | None = None,
    about: Mapping[str, Any] | None = None,
    **more: Any,
) -> KnownFacts:
    """The facts of a fleet with these workers. `more`: fields of KnownFacts."""
    state = {
        "ready": all(row.get("ready") for row in rows),
        "pause_state": "running",
        "expected": expected,
        "left": list(left),
        "starting": list(starting),
        "version": VERSION,
        "update": update,
        "workers": list(rows),
    }
    places = {row["instance_id"]: {**row, "host": "gpu1", "pid": 42} for row in rows}
    given = {"state": state, "about": {**ABOUT, **(about or {})}, "workers": places, **more}
    return KnownFacts("the frontend at http://x", NOW, **given)
