"""A transport in a third party's package: installed, it works on both sides, and nothing in the product names it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from rl_plane._util.tasks import Cancelled, never
from rl_plane.errors import InvalidWeights
from rl_plane.protocol.versions import HostTensor, TensorSpec, tensor_digest, tensors_digest
from rl_plane.transports.base import Delivery
from tests.support.frontend_process import frontend
from tests.support.hf_fleet import proven
from tests.support.packages import install
from tests.support.paths import ROOT
from worker.receive.staging import DigestingStream
from worker.testing.tiny_adapter import make_witness_adapter
from worker.testing.tiny_model import make_witness_model

if TYPE_CHECKING:
    from rl_plane.fleet.fleet import Fleet
    from tests.conftest import Plane

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

PACKAGE = ROOT / "examples" / "plain_http_transport"
START_S = 150.0
PUBLISH_S = 120.0


def publish(plane: Plane, directory: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "rl_plane.cli.main",
        "publish",
        str(directory),
        "--transport",
        "plain_http",
        *more,
    ]
    command += ["--nats-url", plane.url, "--namespace", plane.namespace, "--component", plane.component]
    return subprocess.run(command, capture_output=True, text=True, timeout=PUBLISH_S, check=False)


class Lying(Delivery):
    """A delivery that presents other bytes as the published ones."""

    def __init__(self) -> None:
        self.specs: Mapping[str, TensorSpec] = {"weight": TensorSpec("U8", (9,))}
        self.published = tensor_digest(memoryview(b"published"))

    def tensors(self, cancelled: Cancelled = never) -> Iterator[tuple[str, HostTensor]]:
        yield "weight", HostTensor(self.specs["weight"], memoryview(b"something"), digest=self.published)


def test_a_transports_own_digest_is_not_trusted() -> None:
    lying = Lying()
    expected = tensors_digest([("weight", lying.specs["weight"], lying.published)])
    with pytest.raises(InvalidWeights, match="the bytes make"):
        list(DigestingStream(lying, expected_digest=expected))


async def only(fleet: Fleet, instance_id: str) -> bool:
    return [row["instance_id"] for row in (await fleet.run("workers"))["workers"]] == [instance_id]


async def test_a_transport_installed_as_a_package_works(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (
        make_witness_model(plane.tmp / name, seed) for name, seed in (("weights/first", 1), ("second", 2))
    )
    adapter = make_witness_adapter(second, plane.tmp / "adapter", 1)
    lacking = plane.spawn(model=first, engine="hf", ready=False)
    await asyncio.to_thread(install, PACKAGE, plane.tmp / "package")
    path = [str(plane.tmp / "package" / "site"), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))  # of every process from here on
    shown = "from rl_plane.protocol.transport_traits import traits_of; print(traits_of('plain_http').source)"
    printed = await asyncio.to_thread(subprocess.check_output, [sys.executable, "-c", shown], text=True)
    assert printed == "the bytes of the trainer's HTTP server\n"
    having = plane.spawn(model=first, engine="hf", ready=False)
    ids = [(await asyncio.to_thread(one.wait_ready, START_S)).instance_id for one in (lacking, having)]
    async with frontend(plane) as http:
        refused = await asyncio.to_thread(publish, plane, second, "--version", "two")
        assert refused.returncode == 1
        assert f"no plain_http transport on {ids[0]}" in refused.stderr
        lacking.kill()
        fleet = await plane.fleet()
        await plane.until(lambda: only(fleet, ids[1]))
        done = await asyncio.to_thread(publish, plane, second, "--version", "two")
        assert done.returncode == 0, done.stderr
        await proven(http, ids[1:], 2)
        done = await asyncio.to_thread(publish, plane, adapter, "--adapter", "tone")
        assert done.returncode == 0, done.stderr
        state = await fleet.run("state")
        assert list(state["adapters"]) == ["tone"]
