"""`rl-plane updates` and `rl-plane rollback`, against a facade of a few lines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from rl_plane.cli import main
from rl_plane.cli.settings import SETTINGS
from tests.support.small_facade import HEAD, ID_A, ID_B, VERSION, Facade


@pytest.fixture
def facade(monkeypatch: pytest.MonkeyPatch) -> Iterator[Facade]:
    for setting in SETTINGS.values():
        monkeypatch.delenv(setting.variable, raising=False)
    facade = Facade()
    monkeypatch.setenv("RL_PLANE_URL", facade.url)
    yield facade
    facade.close()


def updates() -> list[dict[str, Any]]:
    committed = {
        "update_id": "u3",
        "label": "step_3",
        "outcome": "committed",
        "who": "frontend-1@host:7",
        "began_at": 1_700_000_000.0,
        "ended_at": 1_700_000_001.5,
        "version": VERSION,
        "phases": {"prepare_s": 1.0},
        "workers": {ID_A: {"incarnation": "i", "status": "ok"}, ID_B: {"incarnation": "i", "status": "error"}},
        "excluded": [ID_B],
        "canary": {
            "action": "open",
            "scored": 2,
            "failed": 1,
            "against": "trainer",
            "difference": 0.00042,
            "mismatch_kl": 1.26e-08,
            "tolerance": 0.05,
        },
    }
    aborted = {
        **committed,
        "label": "step_2",
        "outcome": "aborted",
        "version": None,
        "excluded": [],
        "canary": None,
        "error": {"code": "update_aborted", "message": "1 of 2 workers could not\nprepare the update " + "x" * 80},
    }
    running = {"update_id": "u4", "label": "4", "outcome": "running", "who": "", "version": None, "ended_at": None}
    return [running, committed, aborted]


def test_updates_are_a_table_or_json(facade: Facade, capsys: pytest.CaptureFixture[str]) -> None:
    reply = {**HEAD, "updates": updates(), "workers": []}
    facade.answers(reply)
    assert main.run(["updates"]) == 0
    head, running, committed, aborted = capsys.readouterr().out.splitlines()
    assert head.split() == ["BEGAN", "OUTCOME", "VERSION", "WORKERS", "SECONDS", "CANARY", "WHO", "WHY"]
    assert running.split() == ["-", "running", "4", "-", "-", "-", "-", "-"]
    assert "committed" in committed
    assert "3 (step_3)" in committed
    assert "1/2" in committed
    assert "1.500" in committed
    assert "1/2 failed, 0.00042 trainer, kl 1.3e-08" in committed
    assert "frontend-1@host:7" in committed
    assert f"excluded: {ID_B}" in committed
    assert "aborted" in aborted
    assert "step_2" in aborted
    assert "update_aborted: 1 of 2 workers could not prepare" in aborted
    assert aborted.endswith("…")
    assert main.run(["updates", "--json", "--limit", "7", "--component", "a"]) == 0
    assert json.loads(capsys.readouterr().out) == reply
    assert [asked["path"] for asked in facade.asked] == ["/v1/rl/updates"] * 2
    assert [asked["method"] for asked in facade.asked] == ["GET"] * 2
    assert facade.asked[0]["query"] == {"limit": ["20"]}
    assert facade.asked[1]["query"] == {"limit": ["7"], "component": ["a"]}


def test_the_key_that_asked_is_shown_by_its_ends(facade: Facade, capsys: pytest.CaptureFixture[str]) -> None:
    keys = [f"UABC{'X' * 48}DEFG (said)", "dashboard", ""]
    facade.answers({**HEAD, "updates": [{**updates()[0], "asked_by": key} for key in keys], "workers": []})
    assert main.run(["updates"]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.endswith("ASKED BY")
    assert [row.split("  ")[-1].strip() for row in rows] == ["UABC…DEFG (said)", "dashboard", "-"]


def test_updates_are_listed_by_component_or_there_are_none(
    facade: Facade, capsys: pytest.CaptureFixture[str]
) -> None:
    facade.answers({**HEAD, "updates": [], "workers": []})
    assert main.run(["updates"]) == 0
    assert capsys.readouterr().out == "no updates\n"
    heads = {"a": {**HEAD, "updates": updates()[:1]}, "b": {**HEAD, "updates": updates()[1:]}}
    facade.answers({"status": "ok", "components": heads, "workers": [], "elapsed_s": 0.1})
    assert main.run(["updates", "--component", "a,b"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["COMPONENT", "a", "b", "b"]


@pytest.mark.parametrize(
    ("argv", "rollback"),
    [
        (["step_3"], {"label": "step_3"}),
        (["--sequence", "3"], {"sequence": 3}),
        (["--sequence=0"], {"sequence": 0}),
    ],
)
def test_rollback_names_a_version_by_label_or_sequence(
    facade: Facade, capsys: pytest.CaptureFixture[str], argv: list[str], rollback: dict[str, Any]
) -> None:
    rows = [{"instance_id": ID_A, "incarnation": "i", "status": "ok"}]
    facade.answers({**HEAD, "version": VERSION, "workers": rows, "excluded": [], "phases": {}})
    assert main.run(["rollback", *argv, "--version", "back", "--keep-pause"]) == 0
    (asked,) = facade.asked
    assert (asked["method"], asked["path"]) == ("POST", "/v1/rl/update_weights")
    assert asked["headers"]["Idempotency-Key"]
    body = asked["body"]
    assert body.pop("policy")["keep_pause"] is True
    assert body == {"rollback": rollback, "version": "back"}
    assert "committed version 3 (step_3)" in capsys.readouterr().out


@pytest.mark.parametrize("argv", [[], ["step_3", "--sequence", "3"], ["--sequence", "-1"], ["--sequence", "x"]])
def test_a_rollback_to_nothing_is_wrong_usage(
    facade: Facade, capsys: pytest.CaptureFixture[str], argv: list[str]
) -> None:
    assert main.run(["rollback", *argv]) == 2
    assert "fix: " in capsys.readouterr().err
    assert facade.asked == []


def test_a_version_that_is_not_there_is_named(facade: Facade, capsys: pytest.CaptureFixture[str]) -> None:
    error = {
        "code": "not_found",
        "message": "the history has no committed version of label 'x'",
        "fix": "it has 3",
    }
    facade.answers({"status": "error", "error": error, "elapsed_s": 0.1}, 404)
    assert main.run(["rollback", "x"]) == 1
    err = capsys.readouterr().err
    assert err == "rl-plane: error: the history has no committed version of label 'x'; fix: it has 3\n"
