"""Fuzzes a real fleet: mutated messages on every subject, mutated entries in every key, and mutated HTTP bodies.

The fleet must survive: no process ends, no answer is an internal error, no log has a traceback, memory stays bounded,
and an update still commits afterwards."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgpack
import psutil
from nats.aio.msg import Msg

from frontend.server.options import FrontendOptions
from rl_plane.bus.server import NatsServer
from rl_plane.client import RlClient
from rl_plane.protocol.envelope import decode
from rl_plane.protocol.worker_ops import OPS
from tests.conftest import Plane
from tests.fuzz.mutations import as_json, of_bytes, of_message, packed
from tests.support.bad_entries import BAD_VALUES, broken, keys_of
from tests.support.fleet_updates import states, update_of
from tests.support.frontend_here import started

ROUND = 200
"""Mutated inputs between two checks of the fleet."""
BOUND_S = 60.0
"""The bound of a wait for the fleet. Leases and retries take some seconds of it."""
PAUSED_S = 3.0
"""The longest wait for the answer to a mutated body. The checks wait for longer."""
MAX_GROWTH_BYTES = 300 << 20
"""A process may grow by so much: the allocator keeps what some large messages needed."""
UPDATE = "the update"

FLEET_CALLS: tuple[dict[str, Any], ...] = (
    {"op": "state", "body": {"min_workers": 1, "wait_s": 0.0}},
    {"op": "updates", "body": {"limit": 3}},
    {"op": "weight_version"},
    {"op": "pause", "body": {"mode": "keep"}},
    {"op": "resume", "body": {}},
    {"op": "flush_cache", "body": {}},
    {"op": "abort_requests", "body": {"request_ids": ["x"]}},
    {"op": "update_weights", "body": {"transport": {"backend": "filesystem", "path": "/nowhere"}, "version": "x"}},
)
"""Calls after which the fleet serves, or serves after `resume`."""
HTTP_CALLS = tuple((f"/v1/rl/{call['op']}", call.get("body", {})) for call in FLEET_CALLS[3:])
COMPLETION = {"prompt_token_ids": [5, 6, 7], "max_tokens": 2, "stop": ["x"], "logit_bias": {"5": 1.0}}


class Errors(logging.Handler):
    """Collects log records with a traceback."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self.found.append(self.format(record))


class FuzzedFleet:
    """Sends mutated inputs to one fleet. `sent` is its input of the last round, for the report of a failure."""

    def __init__(self, plane: Plane, client: RlClient, urls: dict[str, Any], seed: int) -> None:
        self._plane = plane
        self._client = client
        self._pick = random.Random(seed)
        self._rl = httpx.AsyncClient(base_url=urls["rl_url"], timeout=BOUND_S)
        self._generation = httpx.AsyncClient(base_url=urls["http_url"], timeout=BOUND_S)
        self._inbox = client.bus.nc.new_inbox()
        self._internal: list[bytes] = []
        self._instance_id = plane.spawned[0].instance_id
        self._processes = [psutil.Process(one.process.pid) for one in plane.spawned]
        self._sizes: list[int] = []
        self.sent: list[tuple[str, bytes]] = []

    async def start(self) -> None:
        await self._client.bus.ensure_bucket(self._client.subjects().offers)
        await self._client.bus.subscribe(f"{self._inbox}.*", self._replied)
        await self._client.bus.flush()
        self._sizes = [one.memory_info().rss for one in self._processes]

    async def close(self) -> None:
        await self._rl.aclose()
        await self._generation.aclose()

    async def _replied(self, message: Msg) -> None:
        try:
            wire = decode(message.data)
        except Exception:  # a token stream's message, or a status without a body
            return
        if isinstance(wire.get("error"), dict) and wire["error"].get("code") == "internal":
            self._internal.append(message.data)

    async def round(self) -> None:
        """Sends ROUND inputs, and checks the fleet."""
        self.sent = []
        for number in range(ROUND):
            kind = self._pick.randrange(10)
            if kind < 6:
                subject, data = self._message()
                self.sent.append((subject, data))
                await self._client.bus.nc.publish(subject, data, reply=f"{self._inbox}.{number}")
            elif kind < 9:
                await self._entry()
            else:
                await self._http()
        await self._client.bus.flush()
        await self._check()

    def _message(self) -> tuple[str, bytes]:
        pick, subjects = self._pick, self._client.subjects()
        encode = pick.choice([packed, as_json])
        request: dict[str, Any] = {"v": 1, "op": pick.choice(sorted(OPS)), "id": "x", "fence": 3, "body": {}}
        kind = pick.randrange(7)
        if kind == 0:
            return subjects.fleet, of_message(pick, pick.choice(FLEET_CALLS), encode)
        if kind == 1:
            return subjects.rl, of_message(pick, request, encode)
        if kind == 2:
            return subjects.rl_direct(self._instance_id), of_message(pick, request, encode)
        if kind == 3:
            opening = {"kind": "open", "id": f"r{pick.random()}", "request": COMPLETION, "sequence": 1}
            credit = {"kind": "credit", "id": "r1", "consumed": 1, "have": 1, "resend": True}
            return subjects.generate(self._instance_id), of_message(pick, pick.choice([opening, credit]), packed)
        if kind == 4:
            status = {
                "instance_id": self._instance_id,
                "incarnation": "x",
                "admission": {"open": True, "reasons": []},
            }
            return subjects.status(self._instance_id), of_message(
                pick, {**status, "running": 0, "waiting": 0}, packed
            )
        if kind == 5:
            notice = {"op": "pause", "who": "x", "key": "U" * 56, "outcome": "ok"}
            return subjects.op_notices, of_message(pick, notice, encode)
        return subjects.state.feed("record"), of_message(pick, {"version": {}}, as_json)

    async def _entry(self) -> None:
        pick, bus = self._pick, self._client.bus
        bucket, key = pick.choice(list(keys_of(self._client.subjects(), self._instance_id, UPDATE)))
        there = await bus.get(bucket, key)
        value = there.value if there is not None else None
        values = [
            *BAD_VALUES.values(),
            *broken(value).values(),
            of_bytes(pick, pick.choice(list(BAD_VALUES.values()))),
        ]
        data = pick.choice(values)
        self.sent.append((bucket.key(key), data))
        await bus.put(bucket, key, data)

    async def _http(self) -> None:
        path, body = self._pick.choice(HTTP_CALLS)
        client = self._rl
        if self._pick.random() < 0.5:
            path, body, client = "/v1/completions", COMPLETION, self._generation
            await self._rl.post("/v1/rl/resume", json={})
        data = of_message(self._pick, body, as_json)
        self.sent.append((path, data))
        headers = {"content-type": "application/json"}
        try:
            response = await client.post(path, content=data, headers=headers, timeout=PAUSED_S)
        except httpx.ReadTimeout:
            return  # an earlier input has paused the fleet, or the request asks for many tokens
        if response.status_code >= 500:
            assert response.json()["error"]["code"] != "internal", response.text

    async def _check(self) -> None:
        """Checks that the fleet is whole and serves."""
        assert not self._internal, self._internal[:3]
        for one in self._plane.spawned:
            assert one.process.poll() is None, one.log.read_text()[-3000:]
            text = one.log.read_text()
            assert "Traceback" not in text, text[text.index("Traceback") :][:3000]
        for process, before in zip(self._processes, self._sizes, strict=True):
            assert process.memory_info().rss - before < MAX_GROWTH_BYTES
        await self._plane.until(self._serves, BOUND_S)

    async def _serves(self) -> bool:
        resumed = await self._rl.post("/v1/rl/resume", json={})
        response = await self._generation.post("/v1/completions", json=COMPLETION)
        found = await states(self._client)
        return (
            resumed.status_code == response.status_code == 200
            and len(found) == len(self._plane.spawned)
            and all(one["admission"]["open"] for one in found.values())
        )

    async def commit(self) -> None:
        """Commits an update, and checks that every worker serves it."""
        await self._client.run("update_weights", update_of(self._plane.model(2), "step_2"))
        for one in (await states(self._client)).values():
            assert one["applied_weight_version"] == "step_2"


@contextmanager
def _own_nats(directory: Path) -> Iterator[NatsServer]:
    server = NatsServer(store=directory / "store")
    server.start()
    try:
        yield server
    finally:
        server.stop()


async def fuzz(directory: Path, seed: int, rounds: int | None = None, seconds: float = 0.0) -> int:
    """Fuzzes a fleet for so many rounds, or else for some seconds. Returns the number of rounds."""
    errors = Errors()
    logging.getLogger().addHandler(errors)
    end = time.monotonic() + seconds
    done = 0
    try:
        with _own_nats(directory) as server:
            plane = Plane(server.url, "fuzzed", directory)
            try:
                plane.spawn_many(2)
                client = await plane.client()
                await client.wait_for(2)
                await client.run("update_weights", update_of(plane.model(1), "step_1"), request_id=UPDATE)
                async with started(
                    FrontendOptions(server.url, "fuzzed", "engine", rl_port=0, http_port=0)
                ) as urls:
                    fleet = FuzzedFleet(plane, client, urls, seed)
                    await fleet.start()
                    try:
                        while done < rounds if rounds is not None else time.monotonic() < end:
                            await fleet.round()
                            assert not errors.found, errors.found[0]
                            done += 1
                        await fleet.commit()
                        assert not errors.found, errors.found[0]
                    except BaseException:
                        _save(directory, fleet.sent)
                        raise
                    finally:
                        await fleet.close()
            finally:
                await plane.close()
    finally:
        logging.getLogger().removeHandler(errors)
    return done


def _save(directory: Path, sent: list[tuple[str, bytes]]) -> None:
    """Writes the inputs of the last round, for a fixed case."""
    (directory / "last_round.msgpack").write_bytes(msgpack.packb(sent))
