"""Entries that can't be decoded, in every key of both buckets: a serving fleet continues, and new processes start."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from frontend.server.options import FrontendOptions
from rl_plane._util.limited_log import LimitedLog
from rl_plane.bus import entries
from rl_plane.bus.entries import decoded
from rl_plane.bus.state_store import read_record
from rl_plane.client import RlClient
from rl_plane.errors import BusUnreachable
from rl_plane.protocol.record import DecisionRecord
from rl_plane.protocol.subjects import LOCK, RECORD, Entry
from tests.support.bad_entries import BAD_VALUES, broken, keys_of
from tests.support.fleet_updates import states, update_of
from tests.support.frontend_here import started
from tests.support.plain_client import plain_client

if TYPE_CHECKING:
    from tests.conftest import Plane

pytestmark = [pytest.mark.slow, pytest.mark.parallel, pytest.mark.timeout(500)]

UPDATE = "the update"
BOUND_S = 60.0
LOGGED = re.compile(r"the entry .* at revision \d+ can't be read")


class Http:
    """Both listeners of a frontend. No answer may be an internal error."""

    def __init__(self, rl: httpx.AsyncClient, generation: httpx.AsyncClient) -> None:
        self._rl = rl
        self._generation = generation

    async def call(self, op: str, body: dict[str, Any] | None = None) -> int:
        """Calls an op, and returns the status."""
        path = f"/v1/rl/{op}"
        response = await (self._rl.get(path) if body is None else self._rl.post(path, json=body))
        assert response.status_code != 500, f"{op}: {response.text}"
        return response.status_code

    async def generate(self) -> str:
        """Generates, and returns the label of the weights."""
        response = await self._generation.post(
            "/v1/completions", json={"prompt_token_ids": [5, 6, 7], "max_tokens": 2}
        )
        assert response.status_code == 200, response.text
        return str(response.json()["nvext"]["weight_version"]["label"])


@asynccontextmanager
async def frontend(plane: Plane) -> AsyncIterator[Http]:
    options = FrontendOptions(plane.url, plane.namespace, plane.component, rl_port=0, http_port=0)
    async with (
        started(options) as urls,
        plain_client(base_url=urls["rl_url"], timeout=30) as rl,
        plain_client(base_url=urls["http_url"], timeout=30) as generation,
    ):
        yield Http(rl, generation)


async def works(plane: Plane, client: RlClient, http: Http, label: str, workers: int) -> None:
    """Checks that the fleet serves now, and that every kind of call works soon."""
    assert await http.generate() == label
    for op, body in (
        ("state", None),
        ("updates", None),
        ("pause", {"mode": "keep"}),
        ("resume", {}),
        ("flush_cache", {}),
    ):

        async def succeeds(op: str = op, body: dict[str, Any] | None = body) -> bool:
            return await http.call(op, body) == 200

        await plane.until(succeeds, BOUND_S)

    async def all_serve() -> bool:
        found = await states(client)
        return len(found) == workers and all(
            one["admission"]["open"] and one["applied_weight_version"] == label for one in found.values()
        )

    await plane.until(all_serve, BOUND_S)


def check_logs(plane: Plane, caplog: pytest.LogCaptureFixture) -> None:
    """No process has logged a traceback, and each worker has logged an entry at most once."""
    assert not [record.getMessage() for record in caplog.records if record.exc_info]
    logged = 0
    for worker in plane.spawned:
        text = worker.log.read_text()
        assert "Traceback" not in text, text
        counted = Counter(LOGGED.findall(text))
        assert set(counted.values()) <= {1}
        logged += len(counted)
    assert logged


async def test_a_serving_fleet_continues_and_new_processes_start(
    plane: Plane, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    one, _ = plane.spawn_many(2)
    client = await plane.client()
    await client.wait_for(2)
    subjects, bus = client.subjects(), client.bus
    await bus.ensure_bucket(subjects.offers)
    async with frontend(plane) as http:
        await client.run("update_weights", update_of(plane.model(1), "step_1"), request_id=UPDATE)
        for bucket, key in list(keys_of(subjects, one.instance_id, UPDATE)):
            entry = await bus.get(bucket, key)
            for kind, value in {**BAD_VALUES, **broken(entry.value if entry else None)}.items():
                sequence = await bus.put(bucket, key, value)
                await works(plane, client, http, "step_1", 2)
                if key == RECORD:
                    stored = await bus.get(bucket, key)
                    assert stored is not None, kind
                    assert stored.sequence > sequence, kind
                    assert decoded(stored, DecisionRecord.decode) is not None, kind

        for bucket, key in keys_of(subjects, one.instance_id, UPDATE):
            await bus.put(bucket, key, b"garbage")
        async with frontend(plane) as second:
            plane.spawn()
            await works(plane, client, second, "step_1", 3)
            for bucket, key in keys_of(subjects, one.instance_id, UPDATE):
                await bus.put(bucket, key, b"garbage")
            await client.run("update_weights", update_of(plane.model(2), "step_2"))
            await works(plane, client, second, "step_2", 3)
            await works(plane, client, http, "step_2", 3)
    check_logs(plane, caplog)


async def test_a_frontend_alone_restores_the_record(plane: Plane) -> None:
    plane.spawn()
    client = await plane.client()
    await client.wait_for(1)
    async with frontend(plane) as http:
        await client.run("update_weights", update_of(plane.model(1), "step_1"))
        committed = await read_record(client.bus, client.subjects().state)
        assert await http.generate() == "step_1"
        plane.kill_all()
        await client.bus.put(client.subjects().state, RECORD, b"{}")
        plane.spawn()
        await works(plane, client, http, "step_1", 1)
        assert await read_record(client.bus, client.subjects().state) == committed


async def test_a_worker_that_knows_no_record_stays_closed_until_the_entry_is_gone(plane: Plane) -> None:
    """The fleet may serve a version: without its record a new worker must not begin a run of its own."""
    client = await plane.client()
    subjects, bus = client.subjects(), client.bus
    sequence = await bus.put(subjects.state, RECORD, b'{"of": "a newer release"}')
    plane.spawn()
    await client.wait_for(1)
    async with frontend(plane) as http:
        assert await http.call("state") == 200
        with pytest.raises(BusUnreachable, match="the committed version is not known") as error:
            await client.run("update_weights", update_of(plane.model(1), "step_1"))
        assert "purge the key `record`" in error.value.facts["fix"]
        (state,) = (await states(client)).values()
        assert not state["admission"]["open"]
        there = await bus.get(subjects.state, RECORD)
        assert there is not None
        assert there.sequence == sequence
        await bus.purge(subjects.state, RECORD, sequence)
        await works(plane, client, http, "initial", 1)


async def test_a_restored_record_bars_the_holders_before(plane: Plane) -> None:
    """The unreadable value may have barred a coordinator that has lost the lock."""
    plane.spawn()
    client = await plane.client()
    await client.wait_for(1)
    state = client.subjects().state
    async with client.lock(await client.view()) as held:
        fence = held.fence
    await client.bus.put(state, RECORD, b"garbage")

    async def restored() -> DecisionRecord | None:
        return decoded(await client.bus.get(state, RECORD), DecisionRecord.decode)

    record: DecisionRecord = await plane.until(restored)
    assert record.barred >= fence
    await client.run("update_weights", update_of(plane.model(1), "step_1"))


async def test_a_lock_that_cannot_be_read_is_taken_from_its_holder(plane: Plane) -> None:
    client, other = await plane.client("one"), await plane.client("two")
    async with client.lock(await client.view()) as held:
        await client.bus.put(client.subjects().state, LOCK, b"x")
        async with other.lock(await other.view()) as theirs:
            assert theirs.fence > held.fence
            assert theirs.taken


def test_an_entry_is_logged_once_for_each_revision(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entries, "_warnings", LimitedLog(logging.getLogger("entries of this test")))
    for sequence in (101, 102, 101, 102):
        assert decoded(Entry("a key of this test", b"x", sequence), DecisionRecord.decode) is None
    assert sum("a key of this test" in record.getMessage() for record in caplog.records) == 2
