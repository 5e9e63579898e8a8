"""The commands that ask or change a fleet that runs: over the facade, or over NATS when --nats-url is given."""

from __future__ import annotations

import argparse
import os
import queue
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rl_plane.cli.canary_file import read_canary
from rl_plane.cli.flags import Command, Subparsers, add_command
from rl_plane.cli.output import note, say, say_json
from rl_plane.cli.settings import BadSetting
from rl_plane.cli.show import show
from rl_plane.errors import DeadlineExceeded, PlaneError
from rl_plane.fleet.http_client import call_facade
from rl_plane.protocol.subjects import check_instance_id
from rl_plane.protocol.update_requests import UpdatePolicy

READ_S = 30.0
CHANGE_S = 120.0
"""Waiting for a fleet, for the lock and for a pause of mode `wait`, each with its own bound, and some more."""
UPDATE_MARGIN_S = 60.0
"""Besides receiving and committing: waiting for the fleet, for the lock, and for those who died meanwhile."""
NOTE_EVERY_S = 10.0
"""How often a wait is told of where no terminal shows it running."""
TICK_S = 0.5

SELECT = ("components", "select_workers")
REACH = ("url", "admin_key", "nats_url", "namespace", "timeout_s", "json")
POLICY = (
    "version",
    "barrier",
    "staging",
    "keep_staged",
    "keep_pause",
    "pause_mode",
    "flush",
    "on_prepare_failure",
    "min_ready",
    "canary",
    "on_canary_failure",
)
UPDATE = (*POLICY, "adapter", "adapter_op", "cast", "digest")

Call = Callable[[], dict[str, Any]]


def add_to(commands: Subparsers) -> None:
    common = (*SELECT, *REACH)
    add_command(commands, "state", "The fleet and each worker, now.", steer("state"), common)
    add_command(commands, "workers", "Who is in the fleet.", steer("workers"), common)
    pause = add_command(
        commands,
        "pause",
        "Stop generation, with a lease.",
        steer("pause"),
        ("pause_mode", "clear_cache", "lease_s", *common),
    )
    pause.add_argument(
        "--mode", dest="pause_mode", metavar="MODE", default=argparse.SUPPRESS, help="short for --pause-mode"
    )
    add_command(commands, "resume", "Go on.", steer("resume"), common)
    update = add_command(
        commands,
        "update",
        "New weights on the whole fleet, or on none.",
        steer("update_weights"),
        (*UPDATE, *common),
    )
    update.add_argument(
        "path",
        metavar="PATH",
        nargs="?",
        help="a checkpoint, or an adapter's directory, beneath the workers' weight roots",
    )
    rollback = add_command(
        commands,
        "rollback",
        "Back to an earlier version of the history, as an update like any other.",
        steer("rollback"),
        ("sequence", *POLICY, *common),
    )
    rollback.add_argument("label", metavar="LABEL", nargs="?", help="the version's label; or give --sequence")
    add_command(
        commands,
        "new-run",
        "Begin a new run: sequence 0 is the model that every worker was started with.",
        steer("new_run"),
        ("components", *REACH),
    )
    add_command(
        commands,
        "updates",
        "The updates that there were, newest first.",
        steer("updates"),
        ("limit", "components", *REACH),
    )
    add_command(commands, "check", "Checksum or compare the weights.", steer("check_weights"), ("action", *common))
    for op, doc in (("enable", "Admit workers again."), ("disable", "Take workers out of routing.")):
        parser = add_command(commands, op, doc, steer(op), ("components", *REACH))
        parser.add_argument(
            "ids", metavar="ID", nargs="+", help="an instance id, as `rl-plane workers` lists them"
        )


def steer(op: str) -> Callable[[Command], int]:
    def handler(command: Command) -> int:
        body, bound_s = body_of(op, command)
        reply = _run("update_weights" if op == "rollback" else op, body, bound_s, command)
        if command.values["json"]:
            say_json(reply)
        else:
            say(show(op, reply, body))
        return 0

    return handler


def body_of(op: str, command: Command) -> tuple[dict[str, Any], float]:
    """The call's body, and how many seconds its answer may take."""
    values, timeout_s = command.values, command.values["timeout_s"]
    body: dict[str, Any] = {}
    if values["components"]:
        body["component"] = list(values["components"])
    if values.get("select_workers"):
        body["workers"] = list(values["select_workers"])
    if op == "updates":
        body["limit"] = values["limit"]
    if op in ("state", "workers", "updates"):
        return body, timeout_s or READ_S
    if op == "pause":
        body |= {"mode": values["pause_mode"], "lease_s": values["lease_s"]}
        if values["clear_cache"] is not None:
            body["clear_cache"] = values["clear_cache"]
    elif op == "check_weights":
        body["action"] = values["action"]
    elif op in ("enable", "disable"):
        body["workers"] = [_instance_id(text) for text in dict.fromkeys(command.flags["ids"])]
    elif op in ("update_weights", "rollback"):
        policy = policy_of(values)
        body["policy"] = policy.model_dump()
        body |= {key: values[key] for key in ("version", "digest") if values.get(key) is not None}
        if op == "rollback":
            body["rollback"] = _earlier(command.flags.get("label"), values["sequence"])
        else:
            if "adapter_op" in command.flags and values["adapter"] is None:
                raise BadSetting(
                    "--adapter-op is of no adapter", field="--adapter-op", fix="name it: --adapter NAME"
                )
            body |= _source(command.flags.get("path"), values)
        return body, policy.prepare_timeout_s + 2 * policy.commit_timeout_s + UPDATE_MARGIN_S
    return body, timeout_s or CHANGE_S


def policy_of(values: Mapping[str, Any]) -> UpdatePolicy:
    canary = values["canary"]
    return UpdatePolicy(
        barrier=values["barrier"],
        staging=values["staging"],
        keep_staged=values["keep_staged"],
        pause_mode=values["pause_mode"],
        on_prepare_failure=values["on_prepare_failure"],
        min_ready=values["min_ready"],
        keep_pause=values["keep_pause"],
        **({} if values["flush"] is None else {"flush_cache": values["flush"]}),
        canary=read_canary(canary) if isinstance(canary, Path) else canary,
        on_canary_failure=values["on_canary_failure"],
        prepare_timeout_s=values["timeout_s"] or UpdatePolicy().prepare_timeout_s,
    )


def _source(path: str | None, values: Mapping[str, Any]) -> dict[str, Any]:
    """What the new weights are of, and where they are."""
    body: dict[str, Any] = {}
    unload = values["adapter"] is not None and values["adapter_op"] == "unload"
    if values["adapter"] is not None:
        body["target"] = {"kind": "lora", "op": values["adapter_op"], "name": values["adapter"]}
    if unload != (path is None):
        fix = "leave it out" if unload else "say where the weights are; without one, --adapter-op unload"
        raise BadSetting(f"{'a' if unload else 'no'} PATH is given", field="PATH", fix=fix)
    if path is not None:
        transport = {"backend": "filesystem", "path": os.path.abspath(os.path.expanduser(path))}
        body |= {"transport": transport, "cast": values["cast"]}
    return body


def _earlier(label: str | None, sequence: int | None) -> dict[str, Any]:
    if (label is None) == (sequence is None):
        raise BadSetting(
            "name one version", field="LABEL", fix="a LABEL or --sequence N, as `rl-plane updates` lists them"
        )
    return {"sequence": sequence} if label is None else {"label": label}


def _instance_id(text: str) -> str:
    try:
        return check_instance_id("ID", text)
    except PlaneError as error:
        raise BadSetting(error.message, **error.facts) from error


def _run(op: str, body: dict[str, Any], bound_s: float, command: Command) -> dict[str, Any]:
    if "nats_url" in command.flags:
        return _over_nats(op, body, bound_s, command)
    values = command.values
    request_id = uuid.uuid4().hex

    def call(part: dict[str, Any]) -> dict[str, Any]:
        return call_facade(values["url"], values["admin_key"], op, part, bound_s, request_id)

    if op not in ("enable", "disable"):
        return waiting(op, lambda: call(body), bound_s)
    replies = [waiting(op, partial(call, {**body, "workers": [one]}), bound_s) for one in body["workers"]]
    rows = [row for reply in replies for row in reply["workers"]]
    return {**replies[-1], "workers": rows, "elapsed_s": sum(reply.get("elapsed_s", 0.0) for reply in replies)}


def _over_nats(op: str, body: dict[str, Any], bound_s: float, command: Command) -> dict[str, Any]:
    """We coordinate, as a frontend would."""
    from rl_plane.protocol.subjects import DEFAULT_COMPONENT
    from rl_plane.sync import SyncRlClient

    values = command.values
    component = (body.get("component") or [DEFAULT_COMPONENT])[0]
    with SyncRlClient.connect(values["nats_url"], values["namespace"], component, name="rl-plane") as fleet:
        stop = threading.Event()
        shower = threading.Thread(target=_show_waiting, args=(op, stop), daemon=True)
        shower.start()
        try:
            return fleet.run(op, body, timeout_s=bound_s)
        finally:
            stop.set()
            shower.join(TICK_S)


def waiting(op: str, call: Call, bound_s: float) -> dict[str, Any]:
    """`call` on a thread, so that its bound holds for all of it, and Ctrl-C ends the wait at once."""
    answers: queue.Queue[dict[str, Any] | BaseException] = queue.Queue()

    def work() -> None:
        try:
            answers.put(call())
        except BaseException as error:
            answers.put(error)

    threading.Thread(target=work, name=op, daemon=True).start()
    stop = threading.Event()
    shower = threading.Thread(target=_show_waiting, args=(op, stop), daemon=True)
    shower.start()
    try:
        answer = answers.get(timeout=bound_s + TICK_S)
    except queue.Empty:
        raise DeadlineExceeded(f"no answer within {bound_s:g} s") from None
    finally:
        stop.set()
        shower.join(TICK_S)
    if isinstance(answer, BaseException):
        raise answer
    return answer


def _show_waiting(op: str, stop: threading.Event) -> None:
    """For a person who waits: one line with the seconds so far, on stderr."""
    start, terminal, shown = time.monotonic(), sys.stderr.isatty(), False
    every = TICK_S if terminal else NOTE_EVERY_S
    while not stop.wait(every):
        words = f"rl-plane: {op.replace('_', ' ')}: waiting, {time.monotonic() - start:.0f} s"
        if terminal:
            sys.stderr.write(f"\r{words}")
            sys.stderr.flush()
            shown = True
        else:
            note(words)
    if shown:
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()
