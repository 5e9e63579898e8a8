"""The environment of the demo's processes, whatever fleet the user's own environment names."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl_plane.demo.fleet import child_environment


def test_the_demo_inherits_no_setting_of_another_fleet(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RL_PLANE_NATS_URL", "RL_PLANE_ADMIN_KEY", "SGLANG_OMNI_ADMIN_KEY"):
        monkeypatch.setenv(name, "theirs")
    monkeypatch.setenv("MALLOC_ARENA_MAX", "ours")
    environment = child_environment(Path("/scratch"))
    assert "theirs" not in environment.values()
    assert environment["MALLOC_ARENA_MAX"] == "ours"
    assert environment["TMPDIR"] == "/scratch"
