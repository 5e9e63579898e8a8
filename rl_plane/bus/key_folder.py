"""A folder of keys, and the nats-server configuration that knows them.

nats.conf       the server's settings, written once: put your own into it
accounts.conf   who may do what, by public keys. It is made again when a key is added or removed
keys.json       the public keys
NAME.nk         the seed of a key, for the process that uses it
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rl_plane._util.change_lock import changing
from rl_plane._util.extras import missing_module
from rl_plane.bus.credentials import INSTANCE_ID, ROLE, NatsCredentials
from rl_plane.bus.roles import ANSWERS_FOR, ROLES, Role, permissions
from rl_plane.bus.server import CONFIG
from rl_plane.errors import InvalidRequest
from rl_plane.protocol.subjects import ADVISORY, INBOX, Subjects

SERVER_CONFIG, ACCOUNTS, KEYS = "nats.conf", "accounts.conf", "keys.json"
ACCOUNTS_MARK = "# ---- accounts"
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")


@dataclass(frozen=True, slots=True)
class KnownKey:
    """A key that the server lets in."""

    name: str
    role: Role
    public: str
    instance_id: str | None = None
    """The only worker that may use it. None: any worker, or another role."""


@dataclass(frozen=True, slots=True)
class ServerTls:
    """The server's own certificate, and what it asks of its clients."""

    cert: Path
    cert_key: Path
    ca: Path | None = None
    """Clients must show a certificate of this authority. None: they need none."""


class KeyFolder:
    """The folder that `rl-plane keys init` makes."""

    def __init__(self, path: Path) -> None:
        self.path = path

    # ---- making it ----

    def init(self, namespace: str, components: Sequence[str], tls: ServerTls | None = None) -> list[KnownKey]:
        """Makes the folder with one key for each role. InvalidRequest: there is something already."""
        for component in components:
            Subjects(namespace, component)
        if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            raise InvalidRequest(
                f"{self.path} is there already, and its keys stay as they are",
                field="DIR",
                fix="name a new folder, or add keys to this one: `rl-plane keys add`",
            )
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path.chmod(0o700)
        self._write(SERVER_CONFIG, _server_config(tls))
        fleet = {"namespace": namespace, "components": list(components)}
        keys = [self._make(role, role) for role in ROLES]
        self._save(fleet, keys)
        return keys

    def add(self, role: str, name: str | None = None) -> KnownKey:
        """Makes another key. A worker's key that has a name belongs to one worker."""
        if role not in ROLES:
            raise InvalidRequest(
                f"there is no role {role[:64]!r}", field="ROLE", fix=f"use one of {', '.join(ROLES)}"
            )
        if name is not None and not _NAME.fullmatch(name):
            raise InvalidRequest(
                f"the name {name[:64]!r} is no file name", field="NAME", fix="use a-z, 0-9 and '-', such as gpu-17"
            )
        with self._changing() as (fleet, keys):
            file_name = role if name is None else f"{role}-{name}"
            if any(key.name == file_name for key in keys):
                raise InvalidRequest(
                    f"there is a key {file_name} already",
                    field="NAME",
                    fix=f"give the new key another name, or remove that one: `rl-plane keys remove {file_name}`",
                )
            made = self._make(role, file_name, own=name is not None)
            self._save(fleet, [*keys, made])
        return made

    def remove(self, name: str) -> KnownKey:
        """Makes the server forget a key, from its next reload on. Deletes the seed."""
        with self._changing() as (fleet, keys):
            found = [key for key in keys if key.name == name]
            if not found:
                raise InvalidRequest(
                    f"there is no key {name[:64]!r}",
                    field="NAME",
                    fix=f"use one of {', '.join(key.name for key in keys)}",
                )
            self._save(fleet, [key for key in keys if key.name != name])
            self.seed_of(name).unlink(missing_ok=True)
        return found[0]

    # ---- using it ----

    @property
    def config(self) -> Path:
        """The configuration of nats-server. InvalidRequest: this is no such folder."""
        self._load()
        return self.path / SERVER_CONFIG

    def known(self) -> list[KnownKey]:
        return self._load()[1]

    def seed_of(self, name: str) -> Path:
        return self.path / f"{name}.nk"

    # ---- files ----

    def _make(self, role: Role, name: str, own: bool = False) -> KnownKey:
        try:
            import nkeys
        except ModuleNotFoundError as error:
            raise missing_module(error) from error
        seed = nkeys.encode_seed(os.urandom(32), nkeys.PREFIX_BYTE_USER)
        public = nkeys.from_seed(seed).public_key.decode()
        instance_id = (
            hashlib.blake2b(public.encode(), digest_size=8).hexdigest() if own and role == "worker" else None
        )
        notes = [f"# {ROLE}: {role}"] + ([f"# {INSTANCE_ID}: {instance_id}"] if instance_id else [])
        # A file that is there belongs to no key: the process that made it ended before the key was known.
        self._write(f"{name}.nk", "\n".join([*notes, seed.decode(), ""]), again=True)
        return KnownKey(name, role, public, instance_id)

    @contextmanager
    def _changing(self) -> Iterator[tuple[dict[str, Any], list[KnownKey]]]:
        """The fleet and its keys, which no other process changes meanwhile."""
        self._load()  # refuses a path that is no such folder
        with changing(self.path):
            yield self._load()

    def _load(self) -> tuple[dict[str, Any], list[KnownKey]]:
        try:
            found = json.loads((self.path / KEYS).read_bytes())
            return found["fleet"], [KnownKey(**key) for key in found["keys"]]
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise InvalidRequest(
                f"{self.path} is no folder of `rl-plane keys`", field="keys", fix=f"rl-plane keys init {self.path}"
            ) from error

    def _save(self, fleet: dict[str, Any], keys: Sequence[KnownKey]) -> None:
        fleets = [Subjects(fleet["namespace"], component) for component in fleet["components"]]
        self._write(ACCOUNTS, _accounts(fleets, keys), again=True)
        self._write(
            KEYS, json.dumps({"fleet": fleet, "keys": [asdict(key) for key in keys]}, indent=1), again=True
        )

    def _write(self, name: str, text: str, again: bool = False) -> None:
        """Writes a file that only this user can read. `again`: it replaces the file that is there, all at once."""
        target = self.path / name
        place = target.with_name(f".{name}.new") if again else target
        with open(
            os.open(place, os.O_WRONLY | os.O_CREAT | (os.O_TRUNC if again else os.O_EXCL), 0o600),
            "w",
            encoding="utf-8",
        ) as file:
            file.write(text)
        if again:
            place.replace(target)


def credentials_of(role: Role, folder: Path, others: NatsCredentials) -> NatsCredentials:
    """The credentials of a role by a folder's keys, with the certificates of `others`."""
    seed = KeyFolder(folder).seed_of(role)
    return NatsCredentials(nkey=seed, ca=others.ca, cert=others.cert, cert_key=others.cert_key)


def _server_config(tls: ServerTls | None) -> str:
    """The plane's own configuration, with the accounts of this folder."""
    settings = CONFIG.read_text().partition(ACCOUNTS_MARK)[0]
    lines = [
        settings.rstrip(),
        "",
        "# Who may do what. `rl-plane keys` writes that file.",
        f'include "{ACCOUNTS}"',
        "",
    ]
    if tls is not None:
        lines += [
            "tls {",
            f"  cert_file: {_quoted(tls.cert)}",
            f"  key_file: {_quoted(tls.cert_key)}",
            *([f"  ca_file: {_quoted(tls.ca)}", "  verify: true"] if tls.ca is not None else []),
            "}",
            "",
        ]
    return "\n".join(lines)


def _quoted(path: Path) -> str:
    """The path for nats-server, which knows no `\\u` in a string."""
    return json.dumps(str(path.absolute()), ensure_ascii=False)


def _accounts(fleets: Sequence[Subjects], keys: Sequence[KnownKey]) -> str:
    users = "\n".join(_user(fleets, key) for key in keys)
    return f"""# Made by `rl-plane keys`: changes are lost. It has public keys only.
accounts {{
  APP {{
    jetstream: enabled
    users: [
{users}
    ]
    # The server reports each connection that ends, so that a killed worker is dropped in milliseconds.
    imports: [
      {{ stream: {{ account: SYS, subject: "$SYS.ACCOUNT.APP.DISCONNECT" }}, to: "{ADVISORY}" }}
    ]
  }}
  SYS {{
    exports: [ {{ stream: "$SYS.ACCOUNT.APP.DISCONNECT", accounts: [APP] }} ]
  }}
}}
system_account: SYS
"""


def _user(fleets: Sequence[Subjects], key: KnownKey) -> str:
    may = permissions(key.role, fleets, f"{INBOX}.{key.public}", key.instance_id or "*")
    deny = f", deny: {json.dumps(may.deny_publish)}" if may.deny_publish else ""
    answers = f'\n        allow_responses: {{ max: -1, expires: "{ANSWERS_FOR}" }}' if may.answers else ""
    return f"""      # {key.name}
      {{ nkey: {key.public}, permissions: {{
        publish: {{ allow: {json.dumps(list(may.publish))}{deny} }}
        subscribe: {{ allow: {json.dumps(list(may.subscribe))} }}{answers}
      }} }}"""
