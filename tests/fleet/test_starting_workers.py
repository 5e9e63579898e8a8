"""Workers that load their engines: `state` lists them apart from the members until they join or end."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from frontend.server.options import FrontendOptions
from rl_plane.protocol.notices import ExitNotice, StartNotice
from rl_plane.protocol.subjects import Subjects
from tests.conftest import Plane, Spawned
from tests.support.frontend_here import started
from tests.support.plain_client import plain_client

BOUND_S = 30.0
HELD = """
import asyncio
from pathlib import Path
import worker.engines.fake.adapter as fake
async def start(self):
    while not Path({path!r}).exists():
        await asyncio.sleep(0.02)
    return await really(self)
really, fake.FakeEngine.start = fake.FakeEngine.start, start
"""
"""The engine has loaded when the file is there."""
ID = "0123456789abcdef"


async def test_a_worker_is_listed_while_its_engine_loads_and_takes_no_part(plane: Plane, tmp_path: Path) -> None:
    options = FrontendOptions(plane.url, plane.namespace, plane.component, rl_port=0, http_port=None, dialects=())
    loaded = tmp_path / "loaded"
    async with (
        started(options) as urls,
        plain_client(base_url=f"{urls['rl_url']}/v1/rl/", timeout=BOUND_S) as rl,
    ):

        async def read(op: str = "state") -> dict[str, Any]:
            reply = await rl.get(f"{op}?min_workers=0&wait_s=0")
            assert reply.status_code == 200, reply.text
            return dict(reply.json())

        def spawn(name: str) -> Spawned:
            return plane.spawn(ready=False, patch=HELD.format(path=str(loaded / name)))

        one, two = [await asyncio.to_thread(spawn, name) for name in ("one", "two")]

        async def both_start() -> dict[str, Any] | None:
            found = await read()
            return found if len(found["starting"]) == 2 else None

        state = await plane.until(both_start)
        assert state["workers"] == []
        assert {worker["instance_id"] for worker in state["starting"]} == {one.instance_id, two.instance_id}
        (first,) = [worker for worker in state["starting"] if worker["instance_id"] == one.instance_id]
        assert (first["engine"], first["phase"]) == ("fake", "loading the model")
        assert (first["pid"], bool(first["host"])) == (one.process.pid, True)
        assert first["elapsed_s"] >= first["in_phase_s"] > 0
        assert first["since"] > 0
        assert (await read("workers"))["starting"]
        error = (await rl.get("state?wait_s=0")).json()["error"]
        assert (error["code"], len(error["starting"])) == ("no_workers", 2), "an empty fleet names them"

        loaded.mkdir()
        (loaded / "one").touch()
        await asyncio.to_thread(one.wait_ready)
        state = await read()
        assert [row["instance_id"] for row in state["workers"]] == [one.instance_id]
        assert [worker["instance_id"] for worker in state["starting"]] == [two.instance_id]
        assert state["ready"], "a worker that starts keeps no fleet from being ready"
        model = plane.model(1)
        body = {"transport": {"backend": "filesystem", "path": str(model)}, "version": "step_1"}
        reply = (await rl.post("update_weights", json=body)).json()
        assert [row["instance_id"] for row in reply["workers"]] == [one.instance_id], "no update waits for it"

        two.kill()

        async def none_starts() -> bool:
            return not (await read())["starting"]

        await plane.until(none_starts)
        assert [row["instance_id"] for row in (await read())["workers"]] == [one.instance_id]


async def test_a_notice_that_can_not_be_read_is_left_out(plane: Plane) -> None:
    options = FrontendOptions(plane.url, plane.namespace, plane.component, rl_port=0, http_port=None, dialects=())
    client = await plane.client()
    subjects = Subjects(plane.namespace, plane.component)
    server_id, client_id = client.bus.identity
    good = StartNotice(
        engine="fake",
        host="h",
        pid=1,
        phase="loading the model",
        elapsed_s=2.0,
        in_phase_s=1.0,
        server_id=server_id,
        client_id=client_id,
    )
    wire = good.model_dump()
    async with (
        started(options) as urls,
        plain_client(base_url=f"{urls['rl_url']}/v1/rl/", timeout=BOUND_S) as rl,
    ):
        bad: list[tuple[str, bytes]] = [
            (ID, b"\xff"),
            (ID, good.encode() + b"\0" * 5000),
            (ID, StartNotice.model_construct(**{**wire, "elapsed_s": -1.0}).encode()),
            (ID, StartNotice.model_construct(**{**wire, "host": "\x1b[2J"}).encode()),
            (ID, StartNotice.model_construct(**{**wire, "phase": "x" * 300}).encode()),
            ("no-id", good.encode()),
        ]
        for instance_id, data in bad:
            await client.bus.nc.publish(subjects.starting(instance_id), data)
        await client.bus.nc.publish(subjects.exited(ID), b"{}")
        never = ExitNotice(engine="fake", host="h", pid=7, exit_code=70)
        for pid in (6, 7):
            notice = never.model_copy(update={"pid": pid})
            await client.bus.nc.publish(subjects.exited(ID), notice.encode())
        await client.bus.nc.publish(subjects.starting("f" * 16), good.encode())
        await client.bus.flush()

        async def listed() -> list[dict[str, Any]]:
            return list((await rl.get("state?min_workers=0&wait_s=0")).json()["starting"])

        found = await plane.until(listed)
        assert [one["instance_id"] for one in found] == ["f" * 16]
        (left,) = (await rl.get("state?min_workers=0&wait_s=0")).json()["left"]
        assert (left["instance_id"], left["pid"], left["exit_code"], left["reason"]) == (ID, 7, 70, "start")
        assert left["why"] == "its process has ended before it joined"
        await client.bus.close()

        async def gone() -> bool:
            return not await listed()

        await plane.until(gone)
