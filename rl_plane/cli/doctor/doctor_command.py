"""`rl-plane doctor`: checks NATS, keys, versions, transports, memory, weight roots and clocks."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import click

from rl_plane._util.own_version import own_version
from rl_plane.cli.doctor.check_line import CheckLine
from rl_plane.cli.doctor.checks import examine
from rl_plane.cli.doctor.doctor_facts import Asked, DoctorFacts
from rl_plane.cli.explain.read_facts import one_component
from rl_plane.cli.keys import credentials
from rl_plane.cli.output import say, say_json
from rl_plane.cli.settings import Command, command, only_component
from rl_plane.cli.steer import REACH, over_nats
from rl_plane.errors import PlaneError
from rl_plane.fleet.http_client import call_facade, call_json
from rl_plane.protocol.subjects import DEFAULT_COMPONENT, DEFAULT_NATS_URL, Subjects

ASK_S = 8.0
"""Seconds for each question."""


def commands() -> list[click.Command]:
    doc = """Check what the fleet needs: a line for each check, ok, warning or error, with the fix.

    It changes nothing of the fleet. It writes one entry into the state's bucket, which disappears after 60 s. The exit
    code is 1 if there is an error. --weight-root names directories that must be the same for all workers; they must be
    beneath the workers' own weight roots."""
    return [command("doctor", doc, run_doctor, ("asked_roots", "components", *REACH))]


def run_doctor(given: Command) -> int:
    lines = examine(read_doctor_facts(given))
    healthy = all(one.level != "error" for one in lines)
    if given.values["json"]:
        say_json({"healthy": healthy, "checks": [asdict(one) for one in lines]})
    else:
        for one in lines:
            say(one.line())
        say(summary(lines))
    return 0 if healthy else 1


def summary(lines: list[CheckLine]) -> str:
    """The counts of one examination."""
    levels = Counter(one.level for one in lines)
    return f"{levels['ok']} ok, {levels['warning']} warnings, {levels['error']} errors"


def read_doctor_facts(given: Command) -> DoctorFacts:
    """Asks the frontend, the workers and NATS. Over NATS, the workers are asked without a frontend."""
    values, timeout_s = given.values, given.values["timeout_s"] or ASK_S
    component, roots = one_component(given), values["asked_roots"]
    body: dict[str, Any] = {"host": True, "min_workers": 0, **({"weight_roots": list(roots)} if roots else {})}
    facts: dict[str, Any] = {"version": own_version(), "roots": roots}
    from rl_plane.cli.doctor.nats_questions import ask_nats  # nats-py is loaded only where it is needed

    named, keys = only_component(values), credentials(values)
    if over_nats(given, only_there=()):  # beside a frontend, NATS is asked too
        subjects = Subjects(values["namespace"], named or DEFAULT_COMPONENT)
        url = values["nats_url"] or DEFAULT_NATS_URL
        nats, describe, error = ask_nats(url, keys, subjects, body, timeout_s)
        return DoctorFacts(
            url=url, nats=nats, nats_was_named=True, describe=describe, describe_error=error, **facts
        )
    base, key = values["url"].rstrip("/").removesuffix("/v1/rl"), values["admin_key"]
    about, error = _asked(lambda: call_json(f"{base}/v1/rl/about", None, key, timeout_s))
    if about is None:
        return DoctorFacts(url=base, about_error=error, **facts)
    describe, error = _asked(lambda: call_facade(base, key, "describe", {**component, **body}, timeout_s))
    url = values["nats_url"] or about.reply["nats"]["url"]
    namespace = values["namespace"]
    if "namespace" not in given.flags:
        namespace = about.reply.get("namespace", namespace)  # an older frontend does not say it
    subjects = Subjects(namespace, named or about.reply["component"])
    nats, _, _ = ask_nats(url, keys, subjects, None, timeout_s)
    return DoctorFacts(
        url=base,
        about=about,
        describe=describe,
        describe_error=error,
        nats=nats,
        nats_was_named=values["nats_url"] is not None,
        **facts,
    )


def _asked(ask: Callable[[], dict[str, Any]]) -> tuple[Asked | None, dict[str, Any] | None]:
    """The reply with its times, or the error as on the wire."""
    since = time.time()
    try:
        return Asked(ask(), since, time.time()), None
    except PlaneError as error:
        return None, error.to_wire()
