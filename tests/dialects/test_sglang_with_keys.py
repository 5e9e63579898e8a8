"""SGLang's calls on a fleet whose processes have keys of NATS."""

from __future__ import annotations

import base64
from pathlib import Path

from frontend.server.options import FrontendOptions
from rl_plane.bus.credentials import NatsCredentials
from rl_plane.bus.key_folder import KeyFolder
from tests.conftest import Plane
from tests.support.dialect_facade import fine, served
from tests.support.frontend_here import started
from tests.support.plain_client import plain_client
from tests.support.role_walk import FLEET, server_with_keys

BOUND_S = 30.0
WITH_KEY = """
from rl_plane.bus.credentials import NatsCredentials
options["credentials"] = NatsCredentials(nkey=Path({!r}))
"""


async def test_tensors_in_a_body_reach_the_workers_of_a_fleet_with_keys(tmp_path: Path) -> None:
    folder = KeyFolder(tmp_path / "keys")
    folder.init(FLEET.namespace, [FLEET.component])
    key = NatsCredentials(nkey=folder.seed_of("frontend"))
    with server_with_keys(folder) as server:
        plane = Plane(server.url, FLEET.namespace, tmp_path, FLEET.component)
        options = FrontendOptions(
            plane.url, FLEET.namespace, FLEET.component, rl_port=0, http_port=None, credentials=key
        )
        try:
            async with (
                started(options) as urls,
                plain_client(base_url=urls["rl_url"], timeout=2 * BOUND_S) as http,
            ):
                plane.spawn(patch=WITH_KEY.format(str(folder.seed_of("worker"))))
                fine(await http.get("/v1/rl/ready", params={"wait_s": BOUND_S}))
                data = base64.b64encode((plane.model(1) / "model.safetensors").read_bytes()).decode()
                body = {"serialized_named_tensors": [data], "load_format": "safetensors", "weight_version": "one"}
                fine(await http.post("/update_weights_from_tensor", json=body))
                assert await served(http) == [(True, "one")]
        finally:
            await plane.close()
