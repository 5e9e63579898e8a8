"""`rl-plane keys http-add` and `http-remove`: the file with the keys of the HTTP listeners."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import click

from rl_plane._util.change_lock import changing
from rl_plane.cli.output import BadSetting, say, say_json
from rl_plane.cli.setting_types import PATH
from rl_plane.cli.settings import Command, command
from rl_plane.errors import NotFound
from rl_plane.protocol.http_keys import (
    ROLES,
    Caller,
    check_caller,
    format_entry,
    hash_key,
    new_key,
    parse_keys_file,
)

ADD = "Add a key to FILE, which `--keys-file` names, and print the key. FILE has only its hash."
REMOVE = "Take a key out of FILE. Running frontends refuse it within seconds."


def commands() -> list[click.Command]:
    file = click.Argument(["file"], type=PATH, metavar="FILE")
    id = click.Argument(["id"], metavar="ID")
    role = click.Argument(["role"], type=click.Choice(ROLES), metavar="|".join(ROLES))
    return [
        command("http-add", ADD, add_key, ("json",), file, id, role),
        command("http-remove", REMOVE, remove_key, ("json",), file, id),
    ]


def add_key(given: Command) -> int:
    file, caller, key = given.values["file"], check_caller(given.values["id"], given.values["role"]), new_key()
    with _changing(file) as keys:
        if any(known.id == caller.id for known in keys.values()):
            raise BadSetting(
                f"{file} has a key {caller.id!r}", field="ID", fix="use another id, or take that key out first"
            )
        keys[hash_key(key.encode())] = caller
    if given.values["json"]:
        say_json({"id": caller.id, "role": caller.role, "key": key})
    else:
        say(key)
    return 0


def remove_key(given: Command) -> int:
    file, id = given.values["file"], given.values["id"]
    with _changing(file) as keys:
        hashed = next((hashed for hashed, known in keys.items() if known.id == id), None)
        if hashed is None:
            raise NotFound(f"{file} has no key {id[:64]!r}", field="ID", fix="the file lists the ids")
        del keys[hashed]
    if given.values["json"]:
        say_json({"id": id, "removed": True})
    return 0


@contextlib.contextmanager
def _changing(file: Path) -> Iterator[dict[str, Caller]]:
    """The keys of the file, to change in place. The file is replaced in one step, readable by its owner only."""
    with changing(file.absolute().parent):
        keys = parse_keys_file(file.read_bytes()) if file.exists() else {}
        yield keys
        written = file.with_name(file.name + ".new")
        descriptor = os.open(written, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as stream:
            stream.writelines(format_entry(caller, hashed) for hashed, caller in keys.items())
        written.replace(file)
