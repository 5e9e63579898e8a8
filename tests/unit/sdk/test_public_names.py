"""The public names of `rl_plane`, and the typed methods of its two clients."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rl_plane
from rl_plane.client import RlClient
from rl_plane.fleet.fleet_method import FleetRequest
from rl_plane.fleet.fleet_methods import FleetMethods
from rl_plane.protocol.fleet_ops import FLEET_OPS
from rl_plane.sync import SyncRlClient
from tests.support.without_nats import without_nats

ONLY_ASYNC = {"ask", "ask_frontends", "beside", "lock", "subjects", "view", "watch"}
"""Methods for coordinators and watchers, which need the event loop."""


def public(client: type) -> dict[str, Callable[..., object]]:
    return {
        name: member
        for name, member in inspect.getmembers(client)
        if not name.startswith("_") and callable(member) and not isinstance(member, property)
    }


PARTS = ("lock_timings", "connect_bus")
"""Arguments of the asynchronous client alone: the limits and the connection that a program of its own may replace."""


def parameters(method: Callable[..., object]) -> list[tuple[str, object, object]]:
    found = inspect.signature(method).parameters.values()
    return [(one.name, one.default, one.annotation) for one in found if one.name not in ("self", "held", *PARTS)]


def test_the_two_clients_have_the_same_methods_and_arguments() -> None:
    awaited, blocking = public(RlClient), public(SyncRlClient)
    assert awaited.keys() - ONLY_ASYNC == blocking.keys()
    for name, method in blocking.items():
        assert parameters(awaited[name]) == parameters(method), name


def test_each_op_of_the_fleet_has_a_documented_method() -> None:
    methods = public(SyncRlClient)
    assert FLEET_OPS.keys() <= methods.keys()
    assert all(inspect.getdoc(methods[name]) for name in methods)


def test_each_type_that_a_method_of_the_fleet_names_is_public() -> None:
    named = set()
    for name in FLEET_OPS:
        for kind in typing.get_type_hints(getattr(FleetMethods, name)).values():
            named |= {
                one for one in (kind, *_within(kind)) if getattr(one, "__module__", "").startswith("rl_plane")
            }
    shown = {one for one in named if one is not FleetRequest and inspect.isclass(one)}
    assert {one.__name__ for one in shown} >= {
        "Transport",
        "UpdateKeywords",
        "UpdatePolicy",
        "Selection",
        "UpdateReply",
        "FleetState",
    }
    for one in shown:
        assert getattr(rl_plane, one.__name__) is one
        assert one.__name__ in rl_plane.__all__


def _within(kind: object) -> list[Any]:
    """The types that a generic type or a union is made of, and the types of unpacked keywords."""
    parts = list(typing.get_args(kind))
    if typing.get_origin(kind) is typing.Unpack:
        parts += typing.get_type_hints(parts[0]).values()
    return [found for one in parts for found in (one, *_within(one))]


def test_each_public_name_is_there_and_sorted_and_no_other_is() -> None:
    assert rl_plane.__all__ == sorted(set(rl_plane.__all__))
    for name in rl_plane.__all__:
        assert getattr(rl_plane, name), name  # some are loaded when they are asked for
    values = {name for name, value in vars(rl_plane).items() if not inspect.ismodule(value)}
    assert {name for name in values if not name.startswith("_")} == set(rl_plane.__all__)


@pytest.mark.parametrize("statement", ["from rl_plane import WeightPublisher", "import rl_plane.publish"])
def test_a_publisher_without_its_extra_names_the_extra(statement: str) -> None:
    code = f"import sys; sys.modules['blake3'] = None\n{statement}"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60)
    last = done.stderr.strip().splitlines()[-1]
    assert last == (
        "ModuleNotFoundError: rl_plane.publish: the Python module blake3 is not installed; "
        "fix: pip install 'rl-plane[publish]'"
    )
    assert "During handling" not in done.stderr


HASHERS = "rl_plane.protocol.hashers"
SUITE, POOLING_SUITE = "worker.testing.engine_contract", "worker.testing.pooling_contract"


@pytest.mark.parametrize(
    ("imported", "lacking", "needs", "extra"),
    [
        ("rl_plane.transports.testing", "blake3", HASHERS, "worker"),
        ("rl_plane.transports.testing", "xxhash", HASHERS, "worker"),
        ("worker.engines.base", "blake3", HASHERS, "worker"),
        (SUITE, "blake3", SUITE, "worker"),
        (SUITE, "psutil", SUITE, "worker"),
        (POOLING_SUITE, "blake3", POOLING_SUITE, "worker"),
        (POOLING_SUITE, "psutil", POOLING_SUITE, "worker"),
        ("frontend.main", "starlette", "frontend.main", "frontend"),
        ("frontend.main", "uvicorn", "frontend.main", "frontend"),
        ("frontend.main", "orjson", "frontend.main", "frontend"),
    ],
)
def test_an_import_without_its_extra_names_the_extra(imported: str, lacking: str, needs: str, extra: str) -> None:
    code = f"import sys; sys.modules['{lacking}'] = None\nimport {imported}"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60)
    last = done.stderr.strip().splitlines()[-1]
    assert last == (
        f"ModuleNotFoundError: {needs}: the Python module {lacking} is not installed; "
        f"fix: pip install 'rl-plane[{extra}]'"
    )
    assert "During handling" not in done.stderr


def test_the_processes_of_an_engine_import_no_nats(tmp_path: Path) -> None:
    """An engine, its transports and the agents in its processes; what speaks NATS says what it lacks."""
    path = without_nats(tmp_path)

    def run(code: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": path}
        return subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60
        )

    model = "worker.engines.base, worker.receive.weight_receiver, worker.receive.rank_agents.agent_server"
    model += ", rl_plane.transports.filesystem.receiver"
    assert run(f"import rl_plane, {model}").stderr == ""
    assert run("from rl_plane import RlClient").stderr.endswith("No module named 'nats'\n")
