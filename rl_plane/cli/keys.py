"""`rl-plane keys` makes the keys of a fleet's processes, and the nats-server configuration that knows them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from rl_plane.bus.credentials import NatsCredentials
from rl_plane.bus.key_folder import KeyFolder, KnownKey, ServerTls, credentials_of
from rl_plane.bus.roles import ROLES, Role
from rl_plane.cli import http_key_commands
from rl_plane.cli.output import BadSetting, say, say_json, table
from rl_plane.cli.setting_types import PATH
from rl_plane.cli.settings import Command, command
from rl_plane.protocol.subjects import DEFAULT_COMPONENT

NATS_FILES = ("nats_nkey", "nats_creds", "nats_ca", "nats_cert", "nats_cert_key")
"""The settings of the files by which a process connects to NATS."""
TLS_FILES = ("tls_cert", "tls_key", "tls_client_ca")
COLUMNS = {"KEY": "name", "ROLE": "role", "WORKER": "instance_id", "PUBLIC KEY": "public"}
RELOAD = "the server takes it on its next start, or now: nats-server --signal reload=PID"


def commands() -> list[click.Command]:
    init = """Make a folder with a key for each role, and a nats-server configuration.

    Run the server with it: `rl-plane nats --keys DIR`."""
    add = f"""Make another key. ROLE is one of {", ".join(ROLES)}.

    A worker's key with a NAME belongs to one worker: no other worker can use its instance id."""
    folder = click.Argument(["directory"], type=PATH, metavar="DIR")
    role = click.Argument(["role"], metavar="ROLE")
    name = click.Argument(["name"], required=False, metavar="[NAME]")
    group = click.Group(
        "keys", help="Make keys for NATS and for the HTTP listeners, and say what each role may do."
    )
    group.add_command(command("init", init, _init, ("namespace", "components", *TLS_FILES, "json"), folder))
    group.add_command(command("add", add, _add, ("keys", "json"), role, name))
    remove = "Make the server forget a key, and delete it. KEY is a name of `rl-plane keys list`."
    group.add_command(
        command("remove", remove, _remove, ("keys", "json"), click.Argument(["name"], metavar="KEY"))
    )
    for each in http_key_commands.commands():
        group.add_command(each)
    group.add_command(command("list", "List the keys that the server knows.", _list, ("keys", "json")))
    return [group]


def credentials(values: dict[str, Any], role: Role | None = None) -> NatsCredentials:
    """The files of a command's settings; of a role, the key in the folder --keys."""
    given = NatsCredentials(**{name.removeprefix("nats_"): values.get(name) for name in NATS_FILES})
    folder = values.get("keys")
    if role is None or folder is None or given.nkey is not None or given.creds is not None:
        return given
    return credentials_of(role, folder, given)


def credentials_as(values: dict[str, Any], role: Role) -> NatsCredentials:
    """The files of a command whose process has the role. BadSetting: the key is of another role, which NATS would show
    by one refusal after another."""
    given = credentials(values)
    found = given.load()
    if found.role not in (None, role):
        raise BadSetting(
            f"{found.file} is a key of the role {found.role}, and this process has the role {role}",
            field="--nats-nkey",
            fix=f"name a key of the role {role}, such as {role}.nk of `rl-plane keys init`",
        )
    return given


def _folder(values: dict[str, Any]) -> KeyFolder:
    if values["keys"] is None:
        raise BadSetting(
            "no folder is named",
            field="--keys",
            fix="--keys DIR (RL_PLANE_KEYS), the folder of `rl-plane keys init`",
        )
    return KeyFolder(values["keys"])


def _init(given: Command) -> int:
    values = given.values
    cert, key, ca = (values[name] for name in TLS_FILES)
    if (cert is None) != (key is None) or (ca is not None and cert is None):
        raise BadSetting(
            "TLS needs a certificate and its key", field="--tls-cert", fix="give --tls-cert and --tls-key"
        )
    folder: Path = values["directory"]
    tls = ServerTls(cert, key, ca) if cert is not None else None
    keys = KeyFolder(folder).init(values["namespace"], values["components"] or (DEFAULT_COMPONENT,), tls)
    _show(given, keys)
    if not values["json"]:
        say(f"\nStart the server with them: rl-plane nats --keys {folder}")
    return 0


def _add(given: Command) -> int:
    made = _folder(given.values).add(given.values["role"], given.values["name"])
    _show(given, [made])
    if not given.values["json"]:
        say(f"\nThe key is in {_folder(given.values).seed_of(made.name)}; {RELOAD}")
    return 0


def _remove(given: Command) -> int:
    _show(given, [_folder(given.values).remove(given.values["name"])])
    if not given.values["json"]:
        say(f"\nThe key is gone; {RELOAD.replace('takes it', 'forgets it')}")
    return 0


def _list(given: Command) -> int:
    _show(given, _folder(given.values).known())
    return 0


def _show(given: Command, keys: list[KnownKey]) -> None:
    rows = [{column: getattr(key, column) for column in COLUMNS.values()} for key in keys]
    if given.values["json"]:
        say_json({"keys": rows})
    else:
        say(table(rows, COLUMNS))
