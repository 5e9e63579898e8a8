"""The table of settings: precedence, bad values, and what a child is given."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click
import pytest

from rl_plane.cli.settings import SETTINGS, for_child, pairs
from tests.support.settings import values_of


def one(name: str, flag: str | bool | list[str] | None = None, **environ: str) -> Any:
    setting = SETTINGS[name]
    if isinstance(flag, bool):
        argv = [setting.opts[0] if flag else setting.secondary_opts[0]]
    else:
        argv = [f"{setting.opts[0]}={text}" for text in ([flag] if isinstance(flag, str) else flag or [])]
    return values_of([name], argv, **environ)[name]


def test_a_flag_wins_over_the_variable_and_that_over_the_default() -> None:
    assert one("rl_port") == 8002
    assert one("rl_port", RL_PLANE_RL_PORT="9000") == 9000
    assert one("rl_port", "9001", RL_PLANE_RL_PORT="9000") == 9001


def test_an_empty_variable_is_unset_but_an_empty_flag_is_an_error() -> None:
    assert one("admin_key", RL_PLANE_ADMIN_KEY="") is None
    assert one("restart", RL_PLANE_RESTART="") is False
    with pytest.raises(click.BadParameter, match="printable ASCII"):
        one("admin_key", "")


def test_the_variable_of_sglang_omni_counts_where_the_own_one_is_unset() -> None:
    assert one("admin_key", SGLANG_OMNI_ADMIN_KEY="theirs") == "theirs"
    assert one("admin_key", RL_PLANE_ADMIN_KEY="", SGLANG_OMNI_ADMIN_KEY="theirs") == "theirs"
    assert one("admin_key", RL_PLANE_ADMIN_KEY="ours", SGLANG_OMNI_ADMIN_KEY="theirs") == "ours"
    assert one("admin_key", "flag", SGLANG_OMNI_ADMIN_KEY="theirs") == "flag"
    assert one("api_key", SGLANG_OMNI_ADMIN_KEY="theirs") is None
    _, env = for_child({"admin_key": "theirs"}, {"SGLANG_OMNI_ADMIN_KEY": "theirs", "PATH": "/bin"})
    assert env == {"PATH": "/bin", "RL_PLANE_ADMIN_KEY": "theirs"}


def test_a_switch_can_be_turned_off_against_its_variable() -> None:
    assert one("restart", RL_PLANE_RESTART="yes") is True
    assert one("restart", False, RL_PLANE_RESTART="1") is False
    assert one("cast", RL_PLANE_CAST="0") is False


def test_a_listener_can_be_off() -> None:
    assert one("http_port", RL_PLANE_HTTP_PORT="off") == "off"
    assert one("http_port", "0") == 0


def test_lists_are_read_from_variables_and_repeated_flags(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    a.mkdir()
    b.mkdir()
    assert one("weight_roots", RL_PLANE_WEIGHT_ROOTS=f"{a}{os.pathsep}{b}{os.pathsep}") == (a, b)
    assert one("weight_roots", [str(b)], RL_PLANE_WEIGHT_ROOTS=str(a)) == (b,)
    assert one("engines", ["fake,hf", "fake"]) == ("fake", "hf")
    assert pairs(one("engine_args", ["a=1,2", "b=x=y"])) == {"a": "1,2", "b": "x=y"}
    assert pairs(one("engine_args", RL_PLANE_ENGINE_ARGS="a=1,2;b=3")) == {"a": "1,2", "b": "3"}
    assert one("weight_roots") == ()


def test_paths_are_made_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert one("store", "there/../here") == tmp_path / "here"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rl_port", "-1"),
        ("rl_port", "65536"),
        ("rl_port", "eight"),
        ("http_port", "70000"),
        ("admin_key", " k"),
        ("api_key", "k "),
        ("expect", "-1"),
        ("also_serve", "a b"),
        ("part_timeout_s", "0"),
        ("part_timeout_s", "-1"),
        ("part_timeout_s", "nan"),
        ("part_timeout_s", "3601"),
        ("liveness_timeout_s", "nan"),
        ("liveness_timeout_s", "inf"),
        ("liveness_timeout_s", "-1"),
        ("liveness_timeout_s", "0"),
        ("liveness_timeout_s", "5 s"),
        ("drain_s", "-1"),
        ("lease_s", "1e9"),
        ("workers", "-1"),
        ("workers", "two"),
        ("copies", "0"),
        ("namespace", "a.b"),
        ("namespace", "a b"),
        ("component", "*"),
        ("instance_id", "worker-1"),
        ("nats_url", "http://127.0.0.1"),
        ("nats_url", "127.0.0.1:4222"),
        ("url", "nats://127.0.0.1"),
        ("url", "http://127.0.0.1:99999"),
        ("url", "http://"),
        ("model", "/nowhere/at/all"),
        ("insecure", "maybe"),
        ("pause_mode", "nicely"),
        ("digest", "sha256:00"),
        ("engine_args", "novalue"),
        ("engine_args_file", "/nowhere/at/all.yaml"),
        ("engine_args_file", "/"),
        ("components", "a,b.c"),
        ("log_level", "loud"),
    ],
)
def test_a_bad_value_names_the_variable_and_the_flag(name: str, value: str) -> None:
    setting = SETTINGS[name]
    by_flag = [] if setting.is_flag else [f"{setting.opts[0]}={value}"]
    for argv, environ in ((by_flag, {}), ([], {setting.variable: value})):
        if not argv and not environ:
            continue
        with pytest.raises(click.BadParameter) as caught:
            values_of([name], argv, **environ)
        words = caught.value.format_message()
        assert setting.opts[0] in words
        assert setting.variable in words
        assert "\n" not in words


def test_a_bad_secret_is_not_shown() -> None:
    for name, secret in (("admin_key", "geheim mit Leerzeichen"), ("nats_url", "http://user:geheim@host")):
        with pytest.raises(click.BadParameter) as caught:
            one(name, secret)
        assert "geheim" not in caught.value.format_message()


def test_settings_that_share_a_variable_read_it_alike() -> None:
    """One of the settings may be a list of the other's values."""
    owners: dict[str, list[click.Option]] = {}
    for setting in SETTINGS.values():
        for other in owners.setdefault(setting.variable, []):
            one_type, other_type = (getattr(each.type, "choices", each.type) for each in (setting, other))
            assert one_type == other_type or other.multiple != setting.multiple, setting.variable
        owners[setting.variable].append(setting)


def test_a_child_gets_its_secrets_by_environment_only(tmp_path: Path) -> None:
    names = (
        "nats_url",
        "admin_key",
        "api_key",
        "rl_port",
        "http_port",
        "weight_roots",
        "engine_args",
        "engine_args_file",
        "json",
        "model",
    )
    argv = [
        "--nats-url=nats://user:password@10.0.0.1:4222",
        "--admin-key=admin-geheim",
        "--http-port=off",
        f"--weight-root={tmp_path}",
        "--engine-arg=a=b c",
        f"--engine-args-file={__file__}",
        "--json",
    ]
    values = values_of(names, argv)
    inherited = {"PATH": "/bin", "RL_PLANE_API_KEY": "of-the-parent", "RL_PLANE_COPIES": "7"}
    argv, env = for_child(values, inherited)
    assert "geheim" not in " ".join(argv)
    assert "password" not in " ".join(argv)
    assert argv == [
        "--http-port=off",
        f"--weight-root={tmp_path}",
        "--engine-arg=a=b c",
        f"--engine-args-file={__file__}",
        "--json",
    ]
    assert env == {
        "PATH": "/bin",
        "RL_PLANE_NATS_URL": "nats://user:password@10.0.0.1:4222",
        "RL_PLANE_ADMIN_KEY": "admin-geheim",
    }
