"""Helpers of `tests/fleet/test_plane_adapters.py` and of other tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rl_plane.client import RlClient
from tests.conftest import Plane
from worker.engines.fake.adapter import make_fake_adapter


def adapter(plane: Plane, seed: int) -> Path:
    return make_fake_adapter(plane.tmp / "weights" / f"adapter{seed}", seed, plane.model())


def target(op: str, name: str = "a", path: Path | None = None, **more: Any) -> dict[str, Any]:
    body: dict[str, Any] = {"target": {"kind": "lora", "op": op, "name": name}, **more}
    return body if path is None else {**body, "transport": {"backend": "filesystem", "path": str(path)}}


async def load(client: RlClient, path: Path, op: str = "load", name: str = "a", **policy: Any) -> dict[str, Any]:
    version: dict[str, Any] = (await client.run("update_weights", target(op, name, path, policy=policy)))[
        "version"
    ]
    return version
