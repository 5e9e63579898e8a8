"""A file of keys for a frontend's listeners."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rl_plane.protocol.http_keys import Caller, Role, format_entry, hash_key


def write_keys(file: Path, given: Mapping[str, Role]) -> Path:
    """Writes the file anew, all at once. `given`: key → role, which is also the key's id."""
    new = file.with_name("new")
    new.write_text(
        "".join(format_entry(Caller(role, role), hash_key(key.encode())) for key, role in given.items())
    )
    new.chmod(0o600)
    new.replace(file)
    return file
