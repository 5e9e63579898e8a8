"""The history and the events name the key of a caller over NATS, as the caller says it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from frontend.server.options import FrontendOptions
from rl_plane.bus.connection import Bus
from rl_plane.bus.credentials import NatsCredentials
from rl_plane.bus.key_folder import KeyFolder
from rl_plane.bus.server import NatsServer
from rl_plane.client import RlClient
from rl_plane.errors import NotFound
from tests.conftest import Plane
from tests.support.frontend_here import started
from tests.support.plain_client import plain_client
from tests.support.role_walk import FLEET, server_with_keys

BOUND_S = 30.0
WITH_KEY = """
from rl_plane.bus.credentials import NatsCredentials
options["credentials"] = NatsCredentials(nkey=Path({!r}))
"""


@pytest.fixture
def folder(tmp_path: Path) -> KeyFolder:
    folder = KeyFolder(tmp_path / "keys")
    folder.init(FLEET.namespace, [FLEET.component])
    return folder


@pytest.fixture
def server(folder: KeyFolder) -> Iterator[NatsServer]:
    with server_with_keys(folder) as server:
        yield server


@pytest_asyncio.fixture
async def keyed_plane(server: NatsServer, tmp_path: Path) -> AsyncIterator[Plane]:
    plane = Plane(server.url, FLEET.namespace, tmp_path, FLEET.component)
    yield plane
    await plane.close()


class Events:
    """The events of a frontend."""

    def __init__(self, response: httpx.Response) -> None:
        self._lines = response.aiter_lines()

    async def next(self, **facts: str) -> dict[str, Any]:
        """The next event that has these facts."""
        async for line in self._lines:
            if line.startswith("data: "):
                event: dict[str, Any] = json.loads(line[6:])
                if facts.items() <= event.items():
                    return event
        raise AssertionError("the stream has ended")


async def test_a_trainers_key_is_said_in_history_and_events(keyed_plane: Plane, folder: KeyFolder) -> None:
    def key(role: str) -> NatsCredentials:
        return NatsCredentials(nkey=folder.seed_of(role))

    plane, where = keyed_plane, (FLEET.namespace, FLEET.component)
    keys = {each.name: each.public for each in folder.known()}
    said = f"{keys['trainer']} (said)"
    options = FrontendOptions(
        plane.url, *where, rl_port=0, http_port=None, credentials=key("frontend"), dialects=()
    )
    async with started(options) as urls, plain_client(base_url=urls["rl_url"], timeout=BOUND_S) as http:
        plane.spawn(patch=WITH_KEY.format(str(folder.seed_of("worker"))))
        assert (await http.get("/v1/rl/ready", params={"wait_s": BOUND_S})).status_code == 200
        trainer = await RlClient.connect(plane.url, *where, name="trainer", credentials=key("trainer"))
        service = await Bus.connect(plane.url, "service", credentials=key("trainer"))
        try:
            async with http.stream("GET", "/v1/rl/events") as stream:
                events = Events(stream)

                # A trainer coordinates by itself, with an RlClient.
                transport = {"backend": "filesystem", "path": str(plane.model(1))}
                await trainer.run("update_weights", {"transport": transport, "version": "one"})
                assert (await events.next(change="began"))["asked_by"] == said
                done = await events.next(op="update_weights")
                assert (done["asked_by"], done["outcome"]) == (said, "ok")
                assert done["who"] == trainer.owner
                with pytest.raises(NotFound):
                    await trainer.run("disable", {"workers": ["f" * 16]})
                assert (await events.next(op="disable"))["outcome"] == NotFound.code

                # A service on NATS asks a frontend.
                answer = await service.nc.request(FLEET.fleet, b'{"op": "pause"}', timeout=BOUND_S)
                assert json.loads(answer.data)["status"] == "ok"
                paused = await events.next(op="pause")
                assert (paused["asked_by"], paused["outcome"]) == (said, "ok")
                assert paused["who"].startswith("frontend-")

                # No key is reported for a caller without one.
                assert (await http.post("/v1/rl/resume")).status_code == 200
                assert (await events.next(op="resume"))["asked_by"] == ""
            for reply in (await trainer.run("updates"), (await http.get("/v1/rl/updates")).json()):
                assert [each["asked_by"] for each in reply["updates"] if each["label"] == "one"] == [said]
        finally:
            await service.close()
            await trainer.close()
