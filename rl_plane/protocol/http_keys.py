"""The keys of the HTTP listeners: the roles, and the file that lists several keys.

The file has hashes instead of keys, so a reader of the file gains nothing. A key has 256 random bits, so a plain hash
suffices.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from rl_plane.errors import InvalidRequest

Role = Literal["read", "generate", "steer", "admin"]
ROLES: tuple[Role, ...] = get_args(Role)
INCLUDES: Mapping[Role, frozenset[Role]] = {
    "read": frozenset({"read"}),
    "generate": frozenset({"generate"}),
    "steer": frozenset({"read", "generate", "steer"}),
    "admin": frozenset(ROLES),
}
"""The roles that a key of each role includes.

- `read`: routes that change nothing.
- `generate`: completions, tokenization and the list of models.
- `steer`: what a trainer does, beside these two.
- `admin`: everything, also taking workers out of routing.
"""
MAX_KEYS = 1000
"""One for each user of a large fleet."""
MAX_FILE_BYTES = 1 << 20
MAX_ID_CHARS = 64
KEY_BYTES = 32

_ID = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{MAX_ID_CHARS - 1}}}")
_HASH = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Caller:
    """The owner of a key, as history and events name it."""

    id: str
    role: Role

    def may(self, role: Role) -> bool:
        return role in INCLUDES[self.role]


def hash_key(key: bytes) -> str:
    return hashlib.sha256(key).hexdigest()


def new_key() -> str:
    return secrets.token_urlsafe(KEY_BYTES)


def check_caller(id: str, role: str) -> Caller:
    """InvalidRequest: the id has other characters, or there is no such role."""
    if not _ID.fullmatch(id):
        raise InvalidRequest(
            f"{id[:MAX_ID_CHARS]!r} is no id of a key",
            field="id",
            fix=f"use letters, digits, '.', '_' and '-', at most {MAX_ID_CHARS}",
        )
    for known in ROLES:
        if role == known:
            return Caller(id, known)
    raise InvalidRequest(f"there is no role {role[:64]!r}", field="role", fix=f"use one of {', '.join(ROLES)}")


def format_entry(caller: Caller, hashed: str) -> str:
    """The lines of one key in the file."""
    return f'[[key]]\nid = "{caller.id}"\nrole = "{caller.role}"\nsha256 = "{hashed}"\n\n'


def parse_keys_file(data: bytes) -> dict[str, Caller]:
    """The owner of each key, by the key's hash. InvalidRequest names the entry that is wrong."""
    try:
        document = tomllib.loads(data.decode())
    except ValueError as error:
        raise InvalidRequest(f"it is not TOML: {error}", field="key", fix="see docs/security-http.md") from error
    found = dict(_entries(document))
    if len(found) > MAX_KEYS:
        raise InvalidRequest(f"it has {len(found)} keys", field="key", fix=f"at most {MAX_KEYS}")
    return found


def _entries(document: Mapping[str, object]) -> Iterator[tuple[str, Caller]]:
    entries = document.get("key", [])
    if document.keys() - {"key"} or not isinstance(entries, list):
        raise InvalidRequest("it has more than entries [[key]]", field="key", fix="see docs/security-http.md")
    ids = set()
    for number, entry in enumerate(entries):
        where = f"key[{number}]"
        if not isinstance(entry, dict) or set(entry) != {"id", "role", "sha256"}:
            raise InvalidRequest(f"{where} has other fields", field=where, fix="give id, role and sha256")
        id, role, hashed = (str(entry[name]) for name in ("id", "role", "sha256"))
        if not _HASH.fullmatch(hashed):
            raise InvalidRequest(f"{where}.sha256 is no hash", field=where, fix="give 64 hex digits")
        if id in ids:
            raise InvalidRequest(f"{where}.id is there twice: {id[:64]!r}", field=where, fix="use another id")
        ids.add(id)
        yield hashed, check_caller(id, role)
