"""`rl-plane explain`: why a fleet, a worker, an update or a request makes no progress, and what to do."""

from __future__ import annotations

from dataclasses import asdict

import click

from rl_plane.cli.explain.explanation import explain
from rl_plane.cli.explain.read_facts import read_facts
from rl_plane.cli.output import say, say_json
from rl_plane.cli.settings import Command, command
from rl_plane.cli.steer import REACH


def commands() -> list[click.Command]:
    doc = """Say how a thing is, what it waits for, until when, and what to do.

    ID is a worker's instance id, an update's id or label, or a request's id; its beginning is enough if no other id
    begins so. Without an ID: the whole fleet. The exit code is 0, also if something is wrong."""
    argument = click.Argument(["id"], required=False, metavar="[WORKER|UPDATE|REQUEST]")
    return [command("explain", doc, run_explain, ("components", "records_dir", *REACH), argument)]


def run_explain(given: Command) -> int:
    name = given.values["id"]
    found = explain(read_facts(given, request_id=name), name)
    if given.values["json"]:
        say_json(asdict(found))
    else:
        say("\n".join(found.lines()))
    return 0
