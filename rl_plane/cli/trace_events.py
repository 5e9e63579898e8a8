"""Makes a trace of past updates from the history alone. Pure.

The format is the Trace Event Format of Chrome's `about:tracing`, which https://ui.perfetto.dev opens: a list of events
with times in microseconds. Each update is a bar with its phases beneath. If workers took bytes from several sources,
each worker has a row of its own.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

UPDATES = 1
"""The number of the row with the updates and their phases. The workers' rows follow."""
RECEIVE, PREPARE = "receive_s", "prepare_s"
"""Workers take pushed bytes in the first phase, and fetch bytes in the second one."""

FACTS = ("update_id", "label", "outcome", "asked_by", "caller", "encoding", "sent_bytes", "model_bytes", "step")
"""The fields of an update that a viewer shows beside its phases."""

Event = dict[str, Any]


def trace_of(components: Mapping[str, Sequence[Mapping[str, Any]]], now: float | None = None) -> Event:
    """Returns the content of a trace file.

    Args:
        components: each component's updates, as `updates` lists them. An entry without `began_at`, such as that of
            sequence 0, is left out.
        now: the time in Unix seconds at which an update that runs is cut off. None: the time of this machine.
    """
    cut_off = time.time() if now is None else now
    events: list[Event] = []
    for process, (component, entries) in enumerate(components.items(), 1):
        for event in _component(component, entries, cut_off):
            events.append({**event, "pid": process})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _component(name: str, entries: Sequence[Mapping[str, Any]], cut_off: float) -> Iterator[Event]:
    began = [entry for entry in entries if "began_at" in entry]
    workers = sorted({worker for entry in began for worker in entry["sources"]})
    rows = {worker: UPDATES + 1 + number for number, worker in enumerate(workers)}
    yield _named("process_name", UPDATES, name)
    yield _named("thread_name", UPDATES, "updates")
    for worker, row in rows.items():
        yield _named("thread_name", row, f"worker {worker}")
    for entry in sorted(began, key=lambda entry: entry["began_at"]):
        yield from _update(entry, cut_off)
        yield from _received(entry, rows)


def _update(entry: Mapping[str, Any], cut_off: float) -> Iterator[Event]:
    begin, end = entry["began_at"], entry["ended_at"] if entry["ended_at"] is not None else cut_off
    facts = {key: entry[key] for key in FACTS if entry.get(key) not in (None, "")}
    if (error := entry.get("error")) is not None:
        facts["error"] = f"{error.get('code')}: {error.get('message')}"
    if entry["version"] is not None:
        facts["sequence"] = entry["version"]["sequence"]
    if entry["excluded"]:
        facts["excluded"] = ", ".join(entry["excluded"])
    yield _bar(f"{entry['label']} ({entry['outcome']})", UPDATES, begin, end, facts)
    at = begin
    for phase, seconds in entry["phases"].items():
        until = min(at + seconds, end)
        yield _bar(phase.removesuffix("_s"), UPDATES, at, until, {})
        at = until


def _received(entry: Mapping[str, Any], rows: Mapping[str, int]) -> Iterator[Event]:
    """The history has no begin of a read, so each is shown from the begin of its phase."""
    phases = entry["phases"]
    taking = RECEIVE if RECEIVE in phases else PREPARE
    at = entry["began_at"] + sum(phases[one] for one in takewhile(lambda phase: phase != taking, phases))
    for worker, sources in entry["sources"].items():
        for source in sources:
            facts = {"bytes": source["bytes"], "update_id": entry["update_id"]}
            yield _bar(f"from {source['source']}", rows[worker], at, at + source["seconds"], facts)


def _bar(name: str, row: int, begin: float, end: float, facts: Mapping[str, Any]) -> Event:
    microseconds = {"ts": round(begin * 1e6), "dur": max(0, round((end - begin) * 1e6))}
    return {"name": name, "ph": "X", "tid": row, **microseconds, "args": dict(facts)}


def _named(what: str, row: int, name: str) -> Event:
    return {"name": what, "ph": "M", "tid": row, "args": {"name": name}}
