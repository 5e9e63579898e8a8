"""Reads the facts for an explanation: from a frontend, or over NATS. All parts are read side by side."""

from __future__ import annotations

import platform
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import TimeoutError as NoResult
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlencode

from rl_plane.cli.explain.known_facts import KnownFacts, Row
from rl_plane.cli.explain.wording import GONE, STOPPED, process_of
from rl_plane.cli.settings import Command, only_component
from rl_plane.cli.steer import connected, on_a_thread, over_nats
from rl_plane.errors import DeadlineExceeded, PermissionDenied, PlaneError, Unauthorized, Unavailable
from rl_plane.fleet.http_client import call_facade, call_json, read_events
from rl_plane.protocol.subjects import DEFAULT_COMPONENT
from rl_plane.rollouts.replay import read_records

READ_S = 8.0
"""Seconds for each part, so that an operator has an answer within ten. A hung worker costs one second, a lost NATS two
to four."""
LOST_S = 1.0
"""Seconds for each part while the frontend has lost NATS: all that it can still answer comes at once."""
PAST_S = 3600
"""Seconds of events: what a frontend keeps."""
MAX_UPDATES = 256
"""The updates that the history keeps."""
MAX_RECORDS = 64
"""The records of one request: one for each choice."""

PROC = Path("/proc")
_STATES = {
    "T": STOPPED,
    "t": "is stopped by a debugger",
    "Z": "is dead",
    "D": "waits for the kernel, such as for a disk or a network file system",
}
"""State of a process in /proc → what it means. The other states are those of a process that runs."""

Part = Callable[[], Any]


def read_facts(given: Command, *, past: bool = True, request_id: str | None = None, wanted: int = 0) -> KnownFacts:
    """Reads the facts.

    Args:
        given: The command, with the settings of `REACH`.
        past: Reads events, history and running requests too.
        wanted: The number of workers that the operator expects. 0: as many as the frontend expects.
        request_id: Read only the running choices whose ids begin so, and the records of this request, if the command
            names a folder of records.

    Raises:
        PlaneError: the frontend, or NATS, does not answer, or refuses the key.
    """
    component = one_component(given)
    timeout_s = given.values["timeout_s"] or READ_S
    read = _over_nats if over_nats(given) else _over_http
    facts = read(given, component, timeout_s, past, request_id or "")
    folder = given.values.get("records_dir")
    records = _records(Path(folder), request_id) if folder is not None and request_id is not None else []
    return KnownFacts(
        **facts,
        now=time.time(),
        records=records,
        wanted=wanted,
        processes=dict(_processes(_places(facts))),
    )


def one_component(given: Command) -> dict[str, Any]:
    """The body's field for the one component that the command names. Empty: the frontend's own."""
    name = only_component(given.values)
    return {"component": [name]} if name is not None else {}


def _ops(op: Callable[..., Part], past: bool) -> dict[str, Part]:
    """The parts that are ops of the fleet."""
    return {
        "state": op("state", min_workers=0),
        "workers": op("workers", min_workers=0),
        "updates": op("updates", limit=MAX_UPDATES if past else 1),  # they also show whether the store answers
    }


def _over_http(
    given: Command, component: dict[str, Any], timeout_s: float, past: bool, request_id: str
) -> dict[str, Any]:
    values = given.values
    url, key = values["url"], values["admin_key"]
    base = url.rstrip("/").removesuffix("/v1/rl") + "/v1/rl"

    def op(name: str, **body: Any) -> Part:
        return lambda: call_facade(url, key, name, {**component, **body}, timeout_s)

    parts = _ops(op, past)
    name = only_component(values)
    if past:
        parts["events"] = lambda: [
            (kind, data) for _, kind, data in read_events(url, key, PAST_S, None, False, name)
        ]
    # The frontend answers this from its memory, so an error means that it does not answer at all, or refuses the key.
    try:
        about = _within(timeout_s, lambda: call_json(f"{base}/about", None, key, timeout_s))
    except PlaneError as error:
        _raise_unreachable(error, base.removesuffix("/v1/rl"))
    shown = name or about.get("component")
    if past:
        # A reply lists at most 1,000 choices, so it is asked for these alone.
        chosen = urlencode({field: one for field, one in (("component", shown), ("id", request_id)) if one})
        parts["requests"] = lambda: call_json(f"{base}/requests?{chosen}", None, key, timeout_s)
    found, errors = _side_by_side(parts, timeout_s if about["nats"]["connected"] else min(timeout_s, LOST_S))
    found["about"] = {**about, **about.get("components", {}).get(shown, {})}
    return _facts(found, errors, f"the frontend at {base.removesuffix('/v1/rl')}")


def _raise_unreachable(error: PlaneError, url: str) -> NoReturn:
    if isinstance(error, (Unauthorized, PermissionDenied)):
        raise error
    if isinstance(error, DeadlineExceeded):
        raise DeadlineExceeded(
            f"the frontend at {url} does not answer: {error.message}",
            fix="see whether its process runs (T in `ps -o stat`: it is stopped), or ask without it: --nats-url",
        ) from error
    if isinstance(error, Unavailable):
        error.facts["fix"] = f"{error.facts.get('fix', 'start a frontend')}; or ask without one: --nats-url"
    raise error


def _over_nats(
    given: Command, component: dict[str, Any], timeout_s: float, past: bool, request_id: str
) -> dict[str, Any]:
    name = component.get("component", [DEFAULT_COMPONENT])[0]
    with connected(given, component) as fleet:

        def op(op_name: str, **body: Any) -> Part:
            return lambda: fleet.run(op_name, body, timeout_s=timeout_s)

        found, errors = _side_by_side(_ops(op, past), timeout_s)
    facts = _facts(found, errors, f"the fleet {given.values['namespace']}.{name} on NATS")
    if past:
        facts["missing"]["events, departures and running requests"] = {
            "message": "only a frontend has them: --url"
        }
    return facts


def _side_by_side(parts: Mapping[str, Part], timeout_s: float) -> tuple[dict[str, Any], dict[str, PlaneError]]:
    """Returns the results by name, and the errors of the parts that failed or took too long."""
    answers = {name: on_a_thread(f"read {name}", part) for name, part in parts.items()}
    found: dict[str, Any] = {}
    errors: dict[str, PlaneError] = {}
    give_up = time.monotonic() + timeout_s
    for name, answer in answers.items():
        try:
            found[name] = answer.result(max(0.0, give_up - time.monotonic()))
        except PlaneError as error:
            errors[name] = error
        except NoResult:
            errors[name] = DeadlineExceeded(f"no answer within {timeout_s:g} s")
    return found, errors


def _within(timeout_s: float, part: Part) -> Any:
    """The result of one part. DeadlineExceeded after `timeout_s`."""
    found, errors = _side_by_side({"part": part}, timeout_s)
    if errors:
        raise errors["part"]
    return found["part"]


def _facts(found: Mapping[str, Any], errors: Mapping[str, PlaneError], asked: str) -> dict[str, Any]:
    workers = found["workers"]["workers"] if "workers" in found else []
    return {
        "asked": asked,
        "about": found.get("about"),
        "state": found.get("state"),
        "error": errors["state"].to_wire() if "state" in errors else None,
        "workers": {row["instance_id"]: row for row in workers},
        "updates": found["updates"]["updates"] if "updates" in found else [],
        "events": found.get("events", []),
        "requests": found["requests"]["requests"] if "requests" in found else [],
        "missing": {name: error.to_wire() for name, error in errors.items()},
    }


def _records(folder: Path, request_id: str) -> list[Row]:
    records: list[Row] = []
    for record in read_records(folder):
        if str(record["id"]).startswith(request_id):
            records.append(record)
            if len(records) >= MAX_RECORDS:
                break
    return records


# ---- the processes of this machine ----


def _places(facts: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    state = facts["state"] or facts["error"] or {}
    rows = [*facts["workers"].values(), *(state.get("left") or ()), *(state.get("starting") or ())]
    yield from ((str(row["host"]), int(row["pid"])) for row in rows if row.get("host") and row.get("pid"))
    update, lock = state.get("update") or {}, (facts["about"] or {}).get("lock") or {}
    for name in (update.get("caller"), update.get("who"), lock.get("owner")):
        if name and (place := process_of(name)) is not None:
            yield place


def _processes(places: Iterable[tuple[str, int]]) -> Iterator[tuple[tuple[str, int], str]]:
    here = {platform.node(), socket.gethostname()}
    for host, pid in places:
        if host in here and (said := process_state(pid)):
            yield (host, pid), said


def process_state(pid: int, proc: Path = PROC) -> str:
    """The state of a process of this machine, in words. Empty: it runs, or this machine can't tell."""
    try:
        stat = (proc / str(pid) / "stat").read_text()
    except FileNotFoundError:
        return GONE if proc.is_dir() else ""
    except OSError:
        return ""
    return _STATES.get(stat.rpartition(")")[2].split()[0], "")
