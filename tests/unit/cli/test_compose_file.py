"""docker-compose.yml and the image, without Docker: what is exposed, and that the commands are ours."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.smoke.__main__ import PROFILES, make_parser
from rl_plane.bus.server import CONFIG
from rl_plane.cli.settings import ENV_PREFIX, SETTINGS
from tests.support.paths import ROOT
from tests.support.settings import command_values

FLEET = {"nats", "frontend", "worker"}
SMOKE = {"sft-file": 1, "sft-file-2w": 2, "lora-file": 2, "tito-multiturn": 2, "sft-group": 2}
SMOKE_VARIABLES = ("RL_PLANE_SMOKE_KILL", "RL_PLANE_SMOKE_BACKEND")
KEYS = ("RL_PLANE_ADMIN_KEY", "RL_PLANE_API_KEY")


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    return loaded


@pytest.fixture(scope="module")
def services(compose: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = compose["services"]
    return found


@pytest.fixture(scope="module")
def dockerfile() -> str:
    return (ROOT / "deploy" / "Dockerfile").read_text()


def command_of(service: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Returns the values that the CLI reads from the service's command line and environment."""
    for setting in SETTINGS.values():
        monkeypatch.delenv(setting.variable, raising=False)
    for name, value in service["environment"].items():
        if name != "RL_PLANE_WEIGHT_ROOTS":  # must exist, and is there only in the container
            monkeypatch.setenv(name, re.sub(r"^\$\{.*\}$", "secret", value))
    return command_values(service["command"])


def test_only_the_frontend_is_published_and_on_loopback_only(services: dict[str, Any]) -> None:
    published = {name: service["ports"] for name, service in services.items() if "ports" in service}
    assert published == {"frontend": ["127.0.0.1:8000:8000", "127.0.0.1:8002:8002"]}
    assert not any(
        key in service for service in services.values() for key in ("network_mode", "privileged", "pid")
    )


@pytest.mark.parametrize("name", ["frontend", *SMOKE])
def test_without_keys_nothing_starts(services: dict[str, Any], name: str) -> None:
    for key in KEYS:
        assert services[name]["environment"][key].startswith(f"${{{key}:?")


def test_no_key_has_a_value_in_the_repository() -> None:
    lines = (ROOT / "deploy" / "env.example").read_text().splitlines()
    assert [line for line in lines if line.startswith(KEYS)] == [f"{key}=" for key in KEYS]


def test_nats_runs_our_config_with_its_store_on_a_volume(
    compose: dict[str, Any], services: dict[str, Any]
) -> None:
    nats = services["nats"]
    command = nats["command"]
    mounts = dict(reversed(mount.split(":", 1)) for mount in nats["volumes"])
    config, store = command[command.index("-c") + 1], command[command.index("-sd") + 1]
    assert (ROOT / mounts[f"{config}:ro"]).samefile(CONFIG)
    assert mounts[store] in compose["volumes"]
    assert "-js" in command


def test_nats_is_the_version_that_we_test_with(services: dict[str, Any], dockerfile: str) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert services["nats"]["entrypoint"] == ["nats-server"]
    assert "install.sh python hf frontend nats" in dockerfile
    assert f"\n{extras['nats'][0]} " in (ROOT / "deploy" / "locks" / "nats.txt").read_text()


def test_all_services_run_our_image(services: dict[str, Any]) -> None:
    for name, service in services.items():
        assert service["image"] == "localhost/rl-plane:latest", name
        assert (ROOT / service["build"]["context"] / service["build"]["dockerfile"]).is_file()


def test_the_fleet_checks_its_health_and_restarts(services: dict[str, Any]) -> None:
    assert {name for name, service in services.items() if "profiles" not in service} == FLEET
    for name in (*FLEET, "worker-2"):
        assert services[name]["healthcheck"]["test"][0] == "CMD"  # podman-compose breaks CMD-SHELL
        assert services[name]["restart"] == "on-failure"
    script = Path(services["worker"]["healthcheck"]["test"][-1])
    assert (ROOT / "deploy" / script.name).is_file()


def test_the_frontend_serves_the_published_ports(
    services: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    values = command_of(services["frontend"], monkeypatch)
    assert (values["host"], values["http_port"], values["rl_port"]) == ("0.0.0.0", 8000, 8002)
    assert (values["admin_key"], values["api_key"], values["insecure"]) == ("secret", "secret", False)
    assert values["nats_url"] == "nats://nats:4222"


@pytest.mark.parametrize("name", ["worker", "worker-2"])
def test_the_workers_run_hf_and_read_published_weights(
    services: dict[str, Any], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    values = command_of(services[name], monkeypatch)
    assert (values["engine"], values["model"]) == ("hf", None)
    assert values["nats_url"] == "nats://nats:4222"
    environment = services[name]["environment"]
    mounts = [f"models:{environment['XDG_CACHE_HOME']}", f"weights:{environment['RL_PLANE_WEIGHT_ROOTS']}:ro"]
    assert services[name]["volumes"] == mounts


def test_every_variable_is_a_setting(services: dict[str, Any]) -> None:
    known = {setting.variable for setting in SETTINGS.values()} | {*SMOKE_VARIABLES}
    given = {name for service in services.values() for name in service.get("environment", ())}
    assert {name for name in given if name.startswith(ENV_PREFIX)} <= known


def workdir(dockerfile: str) -> str:
    (found,) = re.findall(r"(?m)^WORKDIR (.*)$", dockerfile)
    return str(found)


@pytest.mark.parametrize("name", SMOKE)
def test_a_smoke_profile_brings_its_fleet(services: dict[str, Any], dockerfile: str, name: str) -> None:
    service = services[name]
    args = make_parser().parse_args(service["command"])
    workers = [other for other in service["depends_on"] if other.startswith("worker")]
    assert args.profile == name
    assert args.workers == len(workers) == SMOKE[name]
    assert f"weights:{args.weights}" in service["volumes"]
    assert service["profiles"] == [name]
    for other in service["depends_on"]:
        assert name in services[other].get("profiles", [name])
    assert service["entrypoint"] == ["python", "-m", "deploy.smoke"]
    assert service["environment"]["PYTHONPATH"] == workdir(
        dockerfile
    )  # PYTHONSAFEPATH hides the current directory


def test_smoke_services_are_the_only_profiles(services: dict[str, Any]) -> None:
    assert {name for service in services.values() for name in service.get("profiles", ())} == set(SMOKE)
    assert set(PROFILES) == set(SMOKE)


def test_the_smoke_reads_each_of_its_variables(services: dict[str, Any]) -> None:
    source = (ROOT / "deploy" / "smoke" / "__main__.py").read_text()
    example = (ROOT / "deploy" / "env.example").read_text()
    for name in SMOKE_VARIABLES:
        assert f'"{name}"' in source
        assert f"#{name}=" in example
        for profile in SMOKE:
            assert services[profile]["environment"][name].startswith(f"${{{name}:-")


def test_volumes_are_declared(compose: dict[str, Any], services: dict[str, Any]) -> None:
    named = {mount.split(":")[0] for service in services.values() for mount in service.get("volumes", ())}
    assert {name for name in named if not name.startswith(".")} == set(compose["volumes"])


def test_the_image_is_slim_python_and_not_root(dockerfile: str) -> None:
    assert re.findall(r"(?m)^FROM (.*)$", dockerfile) == ["${PYTHON_IMAGE}"]
    assert "ARG PYTHON_IMAGE=docker.io/library/python:3.11-slim@sha256:" in dockerfile
    assert re.findall(r"(?m)^USER (.*)$", dockerfile) == ["rlplane"]
    assert "PYTHONSAFEPATH=1" in dockerfile
    assert "://" not in dockerfile  # no index of ours


def test_the_image_has_every_package_of_ours(dockerfile: str) -> None:
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]
    allowed = (ROOT / ".dockerignore").read_text().splitlines()
    assert "COPY deploy/smoke deploy/smoke" in dockerfile
    for package in (pattern.rstrip("*") for pattern in build["include"]):
        assert f"COPY {package} {package}" in dockerfile
        assert f"!{package}" in allowed
