"""The traits of transports: each transport here has a row, and installed packages state their own."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rl_plane._util.plugins import SENDERS, TRANSPORTS, plugins
from rl_plane.errors import InvalidRequest, Unsupported
from rl_plane.protocol.transport_traits import BUILT_IN, TransportTraits, known_transports, traits_of
from rl_plane.protocol.update_requests import UpdateWeights
from rl_plane.transports.registry import candidates
from worker.reconcile.staged_updates import WeightUpdates

PIGEON = """
from rl_plane.protocol.transport_traits import TransportTraits

TRAITS = TransportTraits(
    auto=True, lasting=True, pushed=True, in_parts=True, described_by="ring", source="a pigeon", if_lacking="feed it"
)
"""
ENTRY_POINTS = """
[rl_plane.transport_traits]
pigeon = pigeon_traits:TRAITS
ipc = pigeon_traits:TRAITS
raven = raven_traits:TRAITS
dove = pigeon_traits:TransportTraits
"""


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Installs a package that states the traits of its transport, and three that do it wrongly."""
    (tmp_path / "pigeon_traits.py").write_text(PIGEON)
    info = tmp_path / "pigeon-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pigeon\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    caches = plugins, known_transports
    for one in caches:
        one.cache_clear()
    yield
    sys.modules.pop("pigeon_traits", None)
    for one in caches:
        one.cache_clear()


def updates_of_a_worker() -> WeightUpdates:
    """The updates of a worker whose only transport is `filesystem`."""
    info: Any = SimpleNamespace(transports=("filesystem",), require=lambda op, field: None)
    engine: Any = None
    return WeightUpdates(engine, info, lambda staged: None, lambda: None)


def test_each_transport_here_has_a_row() -> None:
    ours = {
        point.name
        for group in (TRANSPORTS, SENDERS)
        for point in plugins(group).values()
        if point.value.startswith("rl_plane.transports.")
    }
    assert ours == BUILT_IN.keys()


def test_a_package_states_the_traits_of_its_transport(packages: None) -> None:
    assert traits_of("pigeon").lasting
    transport: dict[str, Any] = {"backend": "pigeon"}
    assert UpdateWeights.model_validate({"transport": transport}).pushed
    assert UpdateWeights.model_validate({"transport": transport | {"in_parts": True}}).in_parts
    assert UpdateWeights.model_validate({"transport": transport | {"ring": 1}}).described_as_it_comes
    assert not UpdateWeights.model_validate({"transport": transport | {"format": 1}}).described_as_it_comes
    both = ["gloo", "pigeon"]
    worker = {"instance_id": "a", "host": "here", "transports": both}
    assert candidates("auto", [worker], both, with_root=False, host="here") == ["gloo", "pigeon"]
    stays = candidates("auto", [worker], both, with_root=False, trainer_stays=False, host="here")
    assert stays == ["pigeon", "gloo"]


def test_wrong_traits_are_logged_and_a_transport_here_keeps_its_row(
    packages: None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert traits_of("ipc") is BUILT_IN["ipc"]
    assert traits_of("raven") == traits_of("dove") == TransportTraits()
    dove, raven = (record.getMessage() for record in caplog.records)
    assert "the transport raven gets the default traits" in raven
    assert "No module named 'raven_traits'" in raven
    assert "pigeon_traits:TransportTraits is <class" in dove


@pytest.mark.parametrize(
    ("backend", "fix"),
    [
        ("pigeon", "feed it"),
        ("nixl", "install rl-plane[nixl] beside this worker, or use filesystem"),
        ("object_store", "use a transport that this worker has: filesystem"),
    ],
)
def test_a_worker_lacks_a_known_transport(packages: None, backend: str, fix: str) -> None:
    with pytest.raises(Unsupported, match=f"this worker has no {backend} transport") as caught:
        updates_of_a_worker().check_backend(backend)
    assert (caught.value.facts["field"], caught.value.facts["fix"]) == ("transport.backend", fix)


def test_no_worker_knows_a_transport_without_a_row() -> None:
    with pytest.raises(InvalidRequest, match="unknown transport 'raven'") as caught:
        updates_of_a_worker().check_backend("raven")
    assert caught.value.facts["fix"] == "use a transport that this worker has: filesystem"
