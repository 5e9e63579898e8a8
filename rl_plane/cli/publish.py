"""`rl-plane publish DIR` sends a checkpoint or a PEFT directory by a transport, as a trainer does."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import click

from rl_plane.cli.canary_file import read_canary
from rl_plane.cli.keys import credentials
from rl_plane.cli.output import BadSetting, note, say, say_json
from rl_plane.cli.settings import Command, command, pairs
from rl_plane.cli.show import show
from rl_plane.cli.steer import POLICY, REACH, UPDATE_MARGIN_S, over_nats, policy_of, waiting
from rl_plane.protocol.canary import CANARY_NAME
from rl_plane.protocol.subjects import DEFAULT_NATS_URL
from rl_plane.protocol.transport_traits import traits_of
from rl_plane.protocol.update_requests import UpdatePolicy

SEND_S = 3600.0
"""Seconds that sending may take by any transport, beside the update's own bounds."""


def commands() -> list[click.Command]:
    doc = """Send weights to the whole fleet: every worker serves them, or none does.

    DIR is a safetensors checkpoint, or a PEFT directory (with --adapter)."""
    settings = (
        "transport",
        "options",
        "root",
        "base",
        "adapter",
        "cast",
        "digest_algorithm",
        *POLICY,
        "components",
        *REACH,
    )
    return [command("publish", doc, publish, settings, click.Argument(["path"], metavar="DIR"))]


def publish(given: Command) -> int:
    """Publishes a directory, and shows the committed version."""
    from rl_plane.publish import WeightPublisher
    from rl_plane.weights.checkpoint import is_adapter

    values = given.values
    path = os.path.abspath(os.path.expanduser(values["path"]))
    if not os.path.exists(path):
        raise BadSetting(f"DIR is {path[:200]!r}, which is not there", field="DIR", fix="name a checkpoint")
    adapter = is_adapter(path)
    if adapter != (values["adapter"] is not None):
        fix = "name it: --adapter NAME" if adapter else "leave --adapter out"
        raise BadSetting(f"DIR holds {'an adapter' if adapter else 'no adapter'}", field="--adapter", fix=fix)
    if values["root"] is None and traits_of(values["transport"]).needs_root:
        raise BadSetting(
            "no root is named",
            field="--root",
            fix="--root DIR, beneath the workers' weight roots; for a DIR that is there already: `rl-plane update`",
        )
    components = values["components"] or (None,)
    if len(components) > 1:
        raise BadSetting("weights go to one component", field="--component", fix="name one, command by command")
    policy: UpdatePolicy = policy_of(values)
    beside = Path(path) / CANARY_NAME
    if policy.canary is None and not adapter and beside.is_file():
        policy = policy.model_copy(update={"canary": read_canary(beside)})
    if values["base"] is not None:
        policy = policy.model_copy(update={"keep_staged": True})
    reach: dict[str, Any] = {"fleet": values["url"], "admin_key": values["admin_key"]}
    reach["credentials"] = credentials(values)
    # Beside a frontend, object_store still connects to NATS by these files (`--option nats_url=…`).
    if over_nats(given, only_there=("namespace",)):
        reach |= {
            "fleet": values["nats_url"] or DEFAULT_NATS_URL,
            "namespace": values["namespace"],
            "admin_key": None,
        }

    def send() -> dict[str, Any]:
        publisher = WeightPublisher(
            path,
            transport=values["transport"],
            root=values["root"],
            base=values["base"],
            options={key: _value(text) for key, text in pairs(values["options"]).items()},
            adapter=values["adapter"],
            policy=policy.model_dump(),
            cast=values["cast"],
            digest=values["digest_algorithm"],
            component=components[0],
            trainer_stays=False,
            **reach,
        )
        with publisher:
            reply = publisher.publish(values["version"]).result()
            note(f"rl-plane: sent by {publisher.backend}")
            return {**reply, "transport": publisher.backend}

    bound_s = policy.prepare_timeout_s + policy.commit_bound_s + UPDATE_MARGIN_S + SEND_S
    reply = waiting("publish", send, bound_s, given)
    if values["json"]:
        say_json(reply)
    else:
        say(show("update_weights", reply, {}))
    return 0


def _value(text: str) -> Any:
    """An option's value: as JSON, such as a number or true, or else the text."""
    with contextlib.suppress(ValueError):
        return json.loads(text)
    return text
