"""The file of keys, which a running frontend reads again."""

from __future__ import annotations

from pathlib import Path

import pytest

from frontend.server.listener_keys import KeyFile
from rl_plane.errors import InvalidRequest
from rl_plane.protocol.http_keys import hash_key
from tests.support.key_files import write_keys


def test_a_key_that_was_taken_out_ends_once_the_files_mode_is_mended(tmp_path: Path) -> None:
    file, revoked, kept = tmp_path / "keys.toml", hash_key(b"revoked"), hash_key(b"kept")
    keys = KeyFile(write_keys(file, {"revoked": "steer", "kept": "read"}), reload_s=0.0)
    file.write_bytes(write_keys(tmp_path / "less.toml", {"kept": "read"}).read_bytes())
    file.chmod(0o664)
    assert keys.find(revoked), "the former keys stay while others may write the file"
    file.chmod(0o600)
    assert keys.find(revoked) is None
    assert keys.find(kept)


def test_a_missing_file_names_the_command_that_makes_it(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest) as caught:
        KeyFile(tmp_path / "keys.toml")
    assert "`rl-plane keys http-add`" in caught.value.facts["fix"]
