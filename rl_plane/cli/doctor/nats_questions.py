"""Asks NATS for the doctor, and over it the workers."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

from rl_plane.bus.connection import Bus
from rl_plane.bus.credentials import NatsCredentials
from rl_plane.bus.state_store import read_frontends
from rl_plane.cli.doctor.doctor_facts import Asked, NatsFacts, Row
from rl_plane.client import RlClient
from rl_plane.errors import DeadlineExceeded, PlaneError
from rl_plane.protocol.subjects import DOCTOR, Subjects

CONNECT_S = 3.0
"""Seconds to reach NATS from here. A server on the network answers within milliseconds."""
QUESTIONS = 4
"""The questions whose bounds add up at most: the connection's, JetStream's, the write's and the workers'."""
WRITE_TTL_S = 60
"""The test write disappears after this time."""
FLUSH_TRIPS = 2
"""The round trips of one `Bus.flush`."""

Answers = tuple[NatsFacts, Asked | None, Row | None]
"""NATS, the workers' reply to `describe`, and the error of that question as on the wire."""


def ask_nats(
    url: str, keys: NatsCredentials, subjects: Subjects, body: dict[str, Any] | None, timeout_s: float
) -> Answers:
    """Asks NATS, and the workers if there is a `body` for `describe`. `timeout_s` bounds each question."""

    async def work() -> Answers:
        bound_s = CONNECT_S + QUESTIONS * timeout_s
        try:
            async with asyncio.timeout(bound_s):
                return await _ask(url, keys, subjects, body, timeout_s)
        except TimeoutError as error:
            raise DeadlineExceeded(f"NATS did not answer within {bound_s:g} s") from error

    return asyncio.run(work())


async def _ask(
    url: str, keys: NatsCredentials, subjects: Subjects, body: dict[str, Any] | None, timeout_s: float
) -> Answers:
    login = keys.load()
    shown: dict[str, Any] = {"url": url.rpartition("@")[2], "role": login.role, "key": login.public}
    try:
        bus = await Bus.connect(url, "rl-plane doctor", CONNECT_S, keys, must_carry=0)
    except PlaneError as error:
        return NatsFacts(**shown, error=error.to_wire()), None, error.to_wire() if body is not None else None
    try:
        start = time.monotonic()
        await bus.flush()
        facts: dict[str, Any] = {"server": bus.about, "round_trip_s": (time.monotonic() - start) / FLUSH_TRIPS}
        facts |= await _jetstream(bus, subjects)
    except PlaneError as error:
        facts = {"error": error.to_wire()}
    finally:
        await bus.close()
    nats = NatsFacts(**shown, **facts)
    if body is None or nats.error is not None:
        return nats, None, nats.error if body is not None else None
    since = time.time()
    try:
        async with await RlClient.connect(
            url,
            subjects.namespace,
            subjects.component,
            name="rl-plane doctor",
            credentials=keys,
            must_exist=True,
        ) as client:
            since = time.time()
            reply = await client.run("describe", body, timeout_s=timeout_s)
    except PlaneError as error:
        return nats, None, error.to_wire()
    return nats, Asked(reply, since, time.time()), None


async def _jetstream(bus: Bus, subjects: Subjects) -> dict[str, Any]:
    facts: dict[str, Any] = {"buckets": {}, "bucket_errors": {}}
    try:
        facts["account"] = await bus.jetstream_account()
    except PlaneError as error:
        facts["account_error"] = error.message
    for bucket in (subjects.members, subjects.state):
        try:
            facts["buckets"][bucket.name] = await bus.bucket_config(bucket)
        except PlaneError as error:
            facts["bucket_errors"][bucket.name] = error.message
    if facts["buckets"].get(subjects.state.name) is not None:
        since = time.time()
        with contextlib.suppress(PlaneError):  # the bucket's own line says so
            clock = await bus.server_time(subjects.state)
            facts["clock"] = Asked({"clock": clock}, since, time.time())
            facts["frontends"] = await read_frontends(bus, subjects.state)
        try:
            await bus.put(subjects.state, DOCTOR, b"", ttl_s=WRITE_TTL_S)
            facts["write_error"] = {}
        except PlaneError as error:
            facts["write_error"] = error.to_wire()
    return facts
