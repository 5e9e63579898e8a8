"""Writes files of HTTP keys with roles."""

from __future__ import annotations

from pathlib import Path

from rl_plane.protocol.http_keys import Caller, Role, format_entry, hash_key


def write_keys(file: Path, given: dict[str, Role]) -> Path:
    """Replaces the file by one with these keys. `given`: key → role."""
    new = file.with_name("new")
    new.write_text(
        "".join(format_entry(Caller(role, role), hash_key(key.encode())) for key, role in given.items())
    )
    new.chmod(0o600)
    new.replace(file)
    return file
