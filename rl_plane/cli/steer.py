"""The commands that read or change a running fleet: through a frontend, or over NATS."""

from __future__ import annotations

import os
import socket
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rl_plane.cli.canary_file import read_canary
from rl_plane.cli.keys import NATS_FILES, credentials
from rl_plane.cli.output import BadSetting, say, say_json
from rl_plane.cli.setting_types import INSTANCE_ID
from rl_plane.cli.settings import SETTINGS, Command, command
from rl_plane.cli.show import absent, show, weights_differ
from rl_plane.cli.wait_display import STATE_BODY, STATE_S, TICK_S, ReadState, seconds_shown
from rl_plane.errors import DeadlineExceeded, NoWorkers, PermissionDenied, PlaneError
from rl_plane.fleet.http_client import call_facade
from rl_plane.protocol.fleet_ops import FLEET_OPS, FleetOp
from rl_plane.protocol.strict_json import load_json_object
from rl_plane.protocol.subjects import DEFAULT_COMPONENT, DEFAULT_NATS_URL
from rl_plane.protocol.transport_traits import directory_transport
from rl_plane.protocol.update_requests import UpdatePolicy

if TYPE_CHECKING:
    from rl_plane.sync import SyncRlClient

READ_S = 30.0
READING_ROLES = frozenset({"service", "worker"})
"""The roles of keys for NATS that can't steer."""
CHANGE_S = 120.0
"""Seconds for the waits of a change: for the fleet, for the lock, and for a pause of mode `wait`."""
ABORT_S = 60.0
"""Seconds to end an update: a worker may take 30 s to break a receive off."""
UPDATE_MARGIN_S = 60.0
"""Seconds beside receiving and committing: waits for the fleet, for the lock, and for workers that died."""

SHOWN = frozenset({"publish", *(op.name for op in FLEET_OPS.values() if op.commits)})
"""The calls that show the running update while they wait. `publish` is a command of several calls, and no op."""

SELECT = ("components", "select_workers")
REACH = ("url", "admin_key", "over_nats", "nats_url", *NATS_FILES, "namespace", "timeout_s", "json")
OF_NATS = ("namespace", "nats_ca", "nats_cert", "nats_cert_key")
"""The settings that say how to ask over NATS, but not that NATS is asked."""
POLICY = (
    "version",
    "barrier",
    "staging",
    "keep_staged",
    "keep_pause",
    "pause_mode",
    "kv",
    "on_prepare_failure",
    "min_ready",
    "canary",
    "on_canary_failure",
)
UPDATE = (*POLICY, "source", "adapter", "adapter_op", "cast", "digest")


def commands() -> list[click.Command]:
    common = (*SELECT, *REACH)
    reach = ("components", *REACH)
    path = click.Argument(["path"], required=False, metavar="PATH")
    label = click.Argument(["label"], required=False, metavar="LABEL")
    update_id = click.Argument(["update_id"], required=False, metavar="ID")
    ids = click.Argument(["ids"], nargs=-1, required=True, metavar="ID...", type=INSTANCE_ID)
    update = """Commit new weights on the whole fleet, or on no worker.

    PATH is a checkpoint, or an adapter's directory, beneath the workers' weight roots. It may also be the http:// or
    https:// URL of such a directory, below a --weight-url of the workers."""
    rollback = """Commit an earlier version of the history again.

    LABEL is the version's label; or give --sequence."""
    abort = """End the update that runs, before its decision.

    ID is an update's id, as `rl-plane state` shows it. Its trainer gets an error that says who has aborted it."""
    complete = """Commit an update that was prepared and waits for its trainer's next call.

    ID is an update's id, as `rl-plane state` shows it."""
    check = """Checksum or compare the weights.

    The exit code is 1 if workers of a component have different checksums, or if a worker differs from its snapshot.
    Workers of different engines, or with different numbers of ranks, always differ: choose workers with --workers."""
    return [
        _command("state", "Show the fleet and each worker.", "state", common),
        _command("workers", "List the workers.", "workers", common),
        _command("pause", "Stop generation, with a lease.", "pause", ("mode", "clear_cache", "lease_s", *common)),
        _command("resume", "Continue generation.", "resume", common),
        _command("update", update, "update_weights", (*UPDATE, *common), path),
        _command("rollback", rollback, "rollback", ("sequence", *POLICY, *common), label),
        _command(
            "new-run",
            "Begin a new run. Its sequence 0 is the model that every worker was started with.",
            "new_run",
            reach,
        ),
        _command("abort", abort, "abort_weights_update", reach, update_id),
        _command("complete", complete, "complete_weights_update", reach, update_id),
        _command("updates", "List past updates, newest first.", "updates", ("limit", *reach)),
        _command("check", check, "check_weights", ("action", *common)),
        _command(
            "enable", "Admit workers again. ID is an instance id of `rl-plane workers`.", "enable", reach, ids
        ),
        _command(
            "disable",
            "Take workers out of routing. ID is an instance id of `rl-plane workers`.",
            "disable",
            reach,
            ids,
        ),
    ]


def _command(name: str, doc: str, op: str, settings: tuple[str, ...], *arguments: click.Argument) -> click.Command:
    def handler(given: Command) -> int:
        body, bound_s = body_of(op, given)
        try:
            reply = ask(_row(op).name, body, bound_s, given)
        except NoWorkers as error:
            if op in ("state", "workers") and not given.values["json"]:
                for line in absent(error.facts):
                    say(line)
            raise
        if given.values["json"]:
            say_json(reply)
        else:
            say(show(op, reply, body))
        return int(op == "check_weights" and weights_differ(reply))

    return command(name, doc, handler, settings, *arguments)


def _row(op: str) -> FleetOp:
    """The op that a command carries out. `rollback` is an update to an earlier version."""
    return FLEET_OPS["update_weights" if op == "rollback" else op]


def body_of(op: str, given: Command) -> tuple[dict[str, Any], float]:
    """The call's body, and the seconds that its answer may take."""
    values, timeout_s = given.values, given.values["timeout_s"]
    body: dict[str, Any] = {}
    if values["components"]:
        body["component"] = list(values["components"])
    if values.get("select_workers"):
        body["workers"] = list(values["select_workers"])
    if op == "updates":
        body["limit"] = values["limit"]
    if _row(op).method == "GET":
        return body, timeout_s or READ_S
    if op == "pause":
        body |= {"mode": values["mode"], "lease_s": values["lease_s"]}
        if values["clear_cache"] is not None:
            body["clear_cache"] = values["clear_cache"]
    elif op == "check_weights":
        body["action"] = values["action"]
    elif _row(op).worker_in_path:
        body["workers"] = list(dict.fromkeys(values["ids"]))
    elif op in ("abort_weights_update", "complete_weights_update"):
        if values["update_id"] is not None:
            body["update_id"] = values["update_id"]
        if op == "abort_weights_update":
            body["by"] = f"an operator on host {socket.gethostname()}"
            return body, timeout_s or ABORT_S
        return body, timeout_s or _update_bound_s(UpdatePolicy(barrier="rolling"))  # it may have been prepared so
    elif op in ("update_weights", "rollback"):
        policy = policy_of(values)
        body["policy"] = policy.model_dump()
        body |= {key: values[key] for key in ("version", "digest") if values.get(key) is not None}
        if op == "rollback":
            body["rollback"] = _earlier(values["label"], values["sequence"])
        else:
            if "adapter_op" in given.flags and values["adapter"] is None:
                raise BadSetting(
                    "--adapter-op is given without an adapter", field="--adapter-op", fix="name it: --adapter NAME"
                )
            body |= _source(values["path"], values)
        return body, _update_bound_s(policy)
    elif op == "new_run":
        return body, timeout_s or _update_bound_s(UpdatePolicy())
    return body, timeout_s or CHANGE_S


def _update_bound_s(policy: UpdatePolicy) -> float:
    return policy.prepare_timeout_s + policy.commit_bound_s + UPDATE_MARGIN_S


def policy_of(values: Mapping[str, Any]) -> UpdatePolicy:
    given = {name: values[name] for name in UpdatePolicy.model_fields if values.get(name) is not None}
    if isinstance(canary := values["canary"], Path):
        given["canary"] = read_canary(canary)
    if values["timeout_s"] is not None:
        given["prepare_timeout_s"] = values["timeout_s"]
    return UpdatePolicy(**given)


def _source(path: str | None, values: Mapping[str, Any]) -> dict[str, Any]:
    """The body's fields for the target and the transport."""
    body: dict[str, Any] = {}
    unload = values["adapter"] is not None and values["adapter_op"] == "unload"
    if values["adapter"] is not None:
        body["target"] = {"kind": "lora", "op": values["adapter_op"], "name": values["adapter"]}
    source = values["source"]
    if unload != (path is None and source is None):
        fix = "leave it out" if unload else "say where the weights are; without one, --adapter-op unload"
        raise BadSetting(f"{'a' if unload else 'no'} PATH is given", field="PATH", fix=fix)
    if path is not None and source is not None:
        raise BadSetting("a PATH and --source are given", field="--source", fix="leave one of the two out")
    if not unload:
        body |= {"transport": _transport(path, source), "cast": values["cast"]}
    return body


def _transport(path: str | None, source: Path | None) -> dict[str, Any]:
    if source is not None:
        try:
            fields = load_json_object(source.read_bytes())
        except ValueError as error:
            raise BadSetting(
                f"{source} is no JSON object: {error}", field="--source", fix='write {"url": …} or {"urls": {…}}'
            ) from error
        return {"backend": "http", **fields}
    assert path is not None
    if not path.startswith(("http://", "https://")):
        return directory_transport(os.path.abspath(os.path.expanduser(path)))
    if "?" in path or "@" in path.split("/", 3)[2]:
        raise BadSetting(
            "the URL has a query or a password, which every user of this machine can read in the list of processes",
            field="PATH",
            fix='write {"url": …} into a file, and give it by --source FILE',
        )
    return {"backend": "http", "url": path}


def _earlier(label: str | None, sequence: int | None) -> dict[str, Any]:
    if (label is None) == (sequence is None):
        raise BadSetting(
            "name one version", field="LABEL", fix="a LABEL or --sequence N, as `rl-plane updates` lists them"
        )
    return {"sequence": sequence} if label is None else {"label": label}


def ask(op: str, body: dict[str, Any], bound_s: float, given: Command) -> dict[str, Any]:
    """Carries out an op of the fleet through a frontend, or over NATS. DeadlineExceeded after `bound_s` seconds. An op
    whose route names one worker is one call for each; none is made if one of the workers is not there."""
    if over_nats(given):
        return _over_nats(op, body, bound_s, given)
    values = given.values
    request_id = uuid.uuid4().hex

    def call(part: dict[str, Any], op: str = op) -> dict[str, Any]:
        return call_facade(values["url"], values["admin_key"], op, part, bound_s, request_id)

    if not FLEET_OPS[op].worker_in_path:
        return waiting(op, lambda: call(body), bound_s, given)
    if len(body["workers"]) > 1:
        waiting("workers", partial(call, body, "workers"), bound_s, given)
    replies: list[dict[str, Any]] = []
    for number, one in enumerate(body["workers"]):
        try:
            replies.append(waiting(op, partial(call, {**body, "workers": [one]}), bound_s, given))
        except PlaneError as error:
            if done := body["workers"][:number]:
                error.message = f"{one}: {error.message}; {op} is done for {', '.join(done)}"
            raise
    rows = [row for reply in replies for row in reply["workers"]]
    return {**replies[-1], "workers": rows, "elapsed_s": sum(reply.get("elapsed_s", 0.0) for reply in replies)}


def over_nats(given: Command, only_there: Sequence[str] = OF_NATS) -> bool:
    """Reports whether the command asks for NATS, and not for a frontend.

    Variables alone do not ask for it: a frontend's container has them too.

    Args:
        given: The command, with the settings of `REACH`.
        only_there: The settings that mean nothing to a frontend.

    Raises:
        BadSetting: a frontend is asked, and a flag is given that it would not heed.
    """
    if given.values["over_nats"] or not given.flags.isdisjoint(("nats_url", "nats_nkey", "nats_creds")):
        return True
    for name in only_there:
        if name in given.flags:
            raise BadSetting(
                "the frontend at --url ignores it: it serves its own namespace, by its own connection to NATS",
                field=SETTINGS[name].opts[0],
                fix="give --nats-url (or --over-nats); or leave it out, and give the --url of that fleet's frontend",
            )
    return False


def connected(given: Command, body: Mapping[str, Any]) -> SyncRlClient:
    """A connection to the first component that the body names, without a frontend. NotFound if there is none: a
    mistaken name must not make a component."""
    from rl_plane.sync import SyncRlClient

    values = given.values
    component = (body.get("component") or [DEFAULT_COMPONENT])[0]
    url = values["nats_url"] or DEFAULT_NATS_URL
    return SyncRlClient.connect(
        url,
        values["namespace"],
        component,
        name="rl-plane",
        credentials=credentials(values),
        must_exist=True,
    )


def _over_nats(op: str, body: dict[str, Any], bound_s: float, given: Command) -> dict[str, Any]:
    """Carries out the op in this process, as a frontend does."""
    values = given.values
    _check_role(op, credentials(values).load().role)
    with connected(given, body) as fleet:

        def read_state() -> dict[str, Any]:
            return fleet.run("state", STATE_BODY, timeout_s=STATE_S)

        with seconds_shown(op, read_state if op in SHOWN else None, quiet=values["json"]):
            return fleet.run(op, body, timeout_s=bound_s)


def _check_role(op: str, role: str | None) -> None:
    """Refuses an op that the key's role can't carry out. A connection would first wait for a fleet that may not be
    there."""
    if role in READING_ROLES and FLEET_OPS[op].method != "GET":
        raise PermissionDenied(
            f"a key of the role {role} may not steer the fleet ({op})",
            role=role,
            fix="use a key of the role trainer or operator (docs/security.md has the table)",
        )


def on_a_thread(name: str, call: Callable[[], Any]) -> Future[Any]:
    """The outcome of a call on a thread. The thread is a daemon, so that a call which never ends does not keep the
    command."""
    answer: Future[Any] = Future()

    def work() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=work, name=name, daemon=True).start()
    return answer


def waiting(op: str, call: Callable[[], dict[str, Any]], bound_s: float, given: Command) -> dict[str, Any]:
    """Makes a call on a thread, so that its bound holds for all of it, and Ctrl-C ends the wait at once."""
    values = given.values
    shown: ReadState | None = None
    if op in SHOWN and not over_nats(given, only_there=()):  # the caller has refused what a frontend ignores
        components = values["components"]
        body = {**STATE_BODY, "component": list(components)} if len(components) == 1 else STATE_BODY
        shown = partial(call_facade, values["url"], values["admin_key"], "state", body, STATE_S)
    answer = on_a_thread(op, call)
    with seconds_shown(op, shown, quiet=values["json"]):
        done, _ = wait([answer], timeout=bound_s + TICK_S)
    if not done:
        raise DeadlineExceeded(f"no answer within {bound_s:g} s")
    reply: dict[str, Any] = answer.result()
    return reply
