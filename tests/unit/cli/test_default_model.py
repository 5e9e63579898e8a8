"""The model that a command makes where none is given."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl_plane.cli.models import default_model


def test_a_second_worker_leaves_the_files_that_the_first_one_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def files() -> dict[str, int]:
        return {path.name: path.stat().st_ino for path in default_model(["fake"]).iterdir()}

    before = files()
    assert before.keys() >= {"config.json", "model.safetensors"}
    assert files() == before
