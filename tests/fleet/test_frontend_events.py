"""`GET /v1/rl/events`: the events that a listener gets, and its isolation from the rest of the fleet."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import pytest_asyncio
from starlette.requests import ClientDisconnect

from frontend.facade.events import HELLO, KEEP_ALIVE, FleetEvents, Listener
from frontend.frontend_limits import LIMITS, FrontendLimits
from frontend.main import Frontend
from frontend.routing.fleet_status import FleetStatus
from frontend.server.event_stream import EventStream, unless_gone
from frontend.server.options import FrontendOptions
from rl_plane.cli import main
from rl_plane.errors import InvalidRequest, Unavailable
from tests.support.committed_records import record, rolling
from tests.support.faults import spawn_faulty
from tests.support.frontend_here import started
from tests.support.plain_client import plain_client

if TYPE_CHECKING:
    from tests.conftest import Plane

KEY = "a key"
BOUND_S = 20.0
LARGE = 1 << 18
"""Bytes of each tensor: more than the first request of a file brings."""

Event = tuple[int | None, str, dict[str, Any]]


def parsed(block: str) -> Event | None:
    """`(id, kind, data)`, without an id for an event that is not kept; None for a comment."""
    fields = dict(line.split(": ", 1) for line in block.strip().splitlines() if not line.startswith(":"))
    if not fields:
        return None
    data = json.loads(fields["data"])
    assert abs(data.pop("at") - time.time()) < 600
    return int(fields["id"]) if "id" in fields else None, fields["event"], data


class Reader:
    """One open stream."""

    def __init__(self, lines: AsyncIterator[str]) -> None:
        self._lines = lines
        self.seen: list[Event] = []

    async def block(self) -> str | None:
        found: list[str] = []
        async for line in self._lines:
            if not line:
                return "\n".join(found)
            found.append(line)
        return None

    async def until(self, holds: Callable[[str, dict[str, Any]], bool]) -> dict[str, Any]:
        """The first event from now on for which it holds."""
        async with asyncio.timeout(BOUND_S):
            while (block := await self.block()) is not None:
                if (event := parsed(block)) is not None:
                    self.seen.append(event)
                    if holds(event[1], event[2]):
                        return event[2]
        raise AssertionError(f"the stream has ended: {self.seen}")


@asynccontextmanager
async def reading(rl: httpx.AsyncClient, query: str = "", **headers: str) -> AsyncIterator[Reader]:
    async with rl.stream("GET", f"events{query}", headers=headers) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        reader = Reader(response.aiter_lines())
        async with asyncio.timeout(BOUND_S):
            assert await reader.block() == HELLO.decode().strip()
        yield reader


@pytest_asyncio.fixture
async def rl(plane: Plane) -> AsyncIterator[httpx.AsyncClient]:
    async with facade_of(plane) as client:
        yield client


@asynccontextmanager
async def facade_of(plane: Plane, limits: FrontendLimits = LIMITS) -> AsyncIterator[httpx.AsyncClient]:
    options = FrontendOptions(
        plane.url, plane.namespace, plane.component, rl_port=0, http_port=None, admin_key=KEY, limits=limits
    )
    headers = {"Authorization": f"Bearer {KEY}"}
    async with (
        started(options) as urls,
        plain_client(base_url=f"{urls['rl_url']}/v1/rl/", headers=headers, timeout=BOUND_S) as client,
    ):
        yield client


def update_of(plane: Plane, seed: int) -> dict[str, Any]:
    transport = {"backend": "filesystem", "path": str(plane.model(seed))}
    return {"transport": transport, "version": f"step_{seed}"}


async def test_the_events_show_each_member_that_joins_or_leaves(plane: Plane, rl: httpx.AsyncClient) -> None:
    async with reading(rl) as reader:
        worker = plane.spawn()
        joined = await reader.until(lambda kind, data: kind == "member" and data["change"] == "joined")
        assert joined["instance_id"] == worker.instance_id
        opened = await reader.until(lambda kind, data: kind == "admission" and data["open"])
        assert (opened["instance_id"], opened["reasons"], opened["paused"]) == (worker.instance_id, [], False)
        assert opened["version"]["label"] == "initial"
        assert (opened["sequence"], opened["adapters"]) == (0, {})
        worker.kill()
        left = await reader.until(lambda kind, data: kind == "member" and data["change"] == "left")
        assert (left["instance_id"], left["incarnation"]) == (worker.instance_id, joined["incarnation"])
        assert left["epoch"] > joined["epoch"]
        plane.spawn(instance_id=worker.instance_id)
        again = await reader.until(lambda kind, data: kind == "member")
        assert (again["change"], again["incarnation"] != joined["incarnation"]) == ("joined", True)
        ids = [number for number, _, _ in reader.seen if number is not None]
        assert ids == sorted(set(ids))


async def test_an_update_is_followed_from_its_beginning_to_its_end(plane: Plane, rl: httpx.AsyncClient) -> None:
    worker = plane.spawn()
    other = await plane.client("another coordinator")
    async with reading(rl) as reader:
        await rl.post("update_weights", json=update_of(plane, 1), headers={"Idempotency-Key": "id-1"})
        await reader.until(lambda kind, data: data.get("change") == "finished")
        told = [data for _, kind, data in reader.seen if kind == "update"]
        assert [data["change"] for data in told] == ["began", "committed", "finished"]
        assert {data["update_id"] for data in told} == {"id-1"}
        assert {data["label"] for data in told} == {"step_1"}
        assert [data["version"] and data["version"]["sequence"] for data in told] == [None, 1, 1]
        assert [data["state"]["version"] for data in told if data["change"] == "committed"] == [told[1]["version"]]
        admissions = [data for _, kind, data in reader.seen if kind == "admission"]
        assert ["updating"] in [data["reasons"] for data in admissions]
        if not admissions[-1]["open"]:
            await reader.until(lambda kind, data: kind == "admission" and data["open"])
        with pytest.raises(InvalidRequest):
            await other.run("update_weights", {"transport": {"backend": "filesystem", "path": "/etc"}}, "id-2")
        aborted = await reader.until(lambda kind, data: data.get("change") == "aborted")
        assert (aborted["update_id"], aborted["who"]) == ("id-2", other.owner)
        assert aborted["error"]["code"] == "invalid_request"
        await rl.post("pause")
        paused = await reader.until(lambda kind, data: kind == "admission" and data["paused"])
        assert paused["instance_id"] == worker.instance_id
        await rl.post("resume")
        await reader.until(lambda kind, data: kind == "admission" and not data["paused"])


async def test_the_events_and_metrics_report_an_updates_canary(plane: Plane, rl: httpx.AsyncClient) -> None:
    bad, *others = [spawn_faulty(plane) for _ in range(3)]
    bad.fail("miscompute")
    async with reading(rl) as reader:
        reply = (await rl.post("update_weights", json=update_of(plane, 1))).json()
        finished = await reader.until(lambda kind, data: data.get("change") == "finished")
        assert finished["canary"] == reply["canary"]
        assert finished["canary"]["reasons"] == {"fleet": 1}
        assert finished["excluded"] == [bad.instance_id]
    url = str(rl.base_url).removesuffix("/v1/rl/") + "/metrics"
    wanted = {
        'rl_plane_canary_failures_total{component="engine",reason="fleet"} 1.0',
        'rl_plane_canary_failures_total{component="engine",reason="trainer"} 0.0',
        f'rl_plane_canary_last_difference{{component="engine"}} {reply["canary"]["difference"]!r}',
        f'rl_plane_canary_last_mismatch_kl{{component="engine"}} {reply["canary"]["mismatch_kl"]!r}',
        'rl_plane_workers_closed{component="engine",reason="numerics"} 1.0',
        'rl_plane_workers_closed{component="engine",reason="disabled"} 0.0',
    }

    async def told() -> bool:
        return wanted <= set((await rl.get(url)).text.splitlines())

    await plane.until(told)
    states = {row["instance_id"]: row for row in (await rl.get("state")).json()["workers"]}
    assert (states[bad.instance_id]["canary"]["passed"], states[bad.instance_id]["canary"]["reason"]) == (
        False,
        "reference",
    )
    assert states[others[0].instance_id]["canary"]["passed"]


async def test_two_listeners_get_the_same_events(plane: Plane, rl: httpx.AsyncClient) -> None:
    async with reading(rl) as one, reading(rl) as two:
        plane.spawn()
        for reader in (one, two):
            await reader.until(lambda kind, data: kind == "admission" and data["open"])
        assert one.seen == two.seen


async def test_the_event_stream_needs_the_key_and_takes_no_fields(plane: Plane, rl: httpx.AsyncClient) -> None:
    response = await rl.get("events", headers={"Authorization": "Bearer x"})
    assert response.status_code == 401
    response = await rl.get("events?since=1")
    assert (response.status_code, response.json()["error"]["field"]) == (400, "since")
    assert (await rl.post("events")).status_code == 405
    schema = (await rl.get(str(rl.base_url).removesuffix("/v1/rl/") + "/openapi.json")).json()
    operation = schema["paths"]["/v1/rl/events"]["get"]
    assert "text/event-stream" in operation["responses"]["200"]["content"]
    assert "admission" in operation["description"]


async def test_the_number_of_listeners_is_bounded(plane: Plane) -> None:
    async with facade_of(plane, FrontendLimits(event_listeners=1)) as rl:
        async with reading(rl):
            response = await rl.get("events")
            assert response.status_code == 503
            assert response.headers["retry-after"]

        async def free() -> bool:
            async with rl.stream("GET", "events") as response:
                return response.status_code == 200

        await plane.until(free)  # the first reader has left, and its place is free


async def test_an_open_stream_does_not_hold_the_stop(plane: Plane) -> None:
    limits = FrontendLimits(grace_s=int(3 * BOUND_S))  # which it would take
    options = FrontendOptions(
        plane.url, plane.namespace, plane.component, rl_port=0, http_port=None, limits=limits
    )
    async with started(options) as urls:
        client = plain_client(base_url=f"{urls['rl_url']}/v1/rl/", timeout=BOUND_S)
        stream = reading(client)
        reader = await stream.__aenter__()
        begun = time.monotonic()
    assert time.monotonic() - begun < BOUND_S
    assert await reader.until(lambda kind, data: kind == "end") == {"reason": "stopping"}
    assert await reader.block() is None
    await stream.__aexit__(None, None, None)
    await client.aclose()


async def test_an_event_while_a_frontend_ends_is_stored_for_the_next_one(plane: Plane) -> None:
    options = FrontendOptions(plane.url, plane.namespace, plane.component, rl_port=0, http_port=None)
    async with Frontend.running(options) as ending:
        ending.end_streams()  # the graces follow, of listeners and of ops
        worker = await asyncio.to_thread(plane.spawn)

        async def has_joined() -> bool:
            return len(ending.own.view.snapshot()) == 1

        await plane.until(has_joined)
    async with Frontend.running(options) as following:
        blocks = [block.decode() async for block in following.own.events.listen(since_s=3600, follow=False)]
    told = [event[2] for block in blocks if (event := parsed(block)) and event[1] == "member"]
    assert [(one["change"], one["instance_id"]) for one in told] == [("joined", worker.instance_id)]


# ---- one listener, without a network ----


async def made(plane: Plane, limits: FrontendLimits = LIMITS) -> FleetEvents:
    client = await plane.client()
    view = await client.view()
    return FleetEvents(view, FleetStatus(client, view), "f1", limits)


async def test_a_listener_gets_each_committed_update_once(plane: Plane) -> None:
    client = await plane.client()
    view = await client.view()
    hub = FleetEvents(view, FleetStatus(client, view), "f1")
    await hub.start()
    stream = hub.listen()
    assert await anext(stream) == HELLO
    closed = replace(record(1), open=False)
    loaded = replace(rolling(record(1, a=2), record(1)), update_id="lora")
    unloaded = replace(record(1), made=record(3).made)
    for number, one in enumerate([closed, record(1), loaded, loaded.opened(), unloaded]):
        view.take_record(one, number + 1)
    hub.stop()
    told = [event[2] for block in [block async for block in stream] if (event := parsed(block.decode()))]
    *updates, end = told
    assert [(one["change"], one["version"]["sequence"]) for one in updates] == [
        ("committed", 1),
        ("committed", 2),
        ("committed", 3),
    ]
    assert [one["state"]["version"]["sequence"] for one in updates] == [1, 1, 1]
    assert [{name: of["sequence"] for name, of in one["state"]["adapters"].items()} for one in updates] == [
        {},
        {"a": 2},
        {},
    ]
    assert updates[1]["update_id"] == "lora"
    assert end == {"reason": "stopping"}


async def test_the_frontend_sends_keep_alives_on_a_silent_stream(plane: Plane) -> None:
    stream = (await made(plane, FrontendLimits(event_keep_alive_s=0.01))).listen()
    assert [await anext(stream) for _ in range(3)] == [HELLO, KEEP_ALIVE, KEEP_ALIVE]
    await stream.aclose()


async def test_a_slow_listener_is_cut_with_a_last_event_and_delays_no_other(plane: Plane) -> None:
    client = await plane.client()
    view = await client.view()
    hub = FleetEvents(view, FleetStatus(client, view), "f1", FrontendLimits(queued_events=2))
    await hub.start()
    slow, fast = hub.listen(), hub.listen()
    assert [await anext(slow), await anext(fast)] == [HELLO, HELLO]
    heard = []
    for number in range(1, 5):
        view.take_record(record(number), number)
        heard.append(parsed((await anext(fast)).decode()))
    assert [event and event[2]["version"]["sequence"] for event in heard] == [1, 2, 3, 4]
    left = [parsed(block.decode()) async for block in slow]
    *updates, end = [event[1:] for event in left if event]
    assert [(kind, data["version"]["sequence"]) for kind, data in updates] == [("update", 1), ("update", 2)]
    assert end == ("end", {"reason": "slow"})
    ids = [event[0] for event in left if event and event[0] is not None]
    assert ids == sorted(set(ids))
    hub.stop()
    last = parsed((await anext(fast)).decode())
    assert last is not None
    assert last[1:] == ("end", {"reason": "stopping"})
    with pytest.raises(Unavailable):
        await anext(hub.listen())
    await fast.aclose()


@pytest.mark.parametrize("framed", [True, False])
async def test_a_reader_that_takes_nothing_is_dropped(plane: Plane, framed: bool) -> None:
    stall = FrontendLimits(event_stall_s=0.05) if framed else FrontendLimits(token_stall_s=0.05)
    hub = await made(plane, replace(stall, event_listeners=1))

    async def stuck(message: Any) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    async def silent() -> Any:
        await asyncio.Event().wait()

    with pytest.raises(ClientDisconnect):
        await EventStream(hub.listen(), framed=framed, limits=hub.limits)({}, silent, stuck)
    next_one = hub.listen()
    assert await anext(next_one) == HELLO, "the only place is free again"
    await next_one.aclose()


async def test_work_ends_when_its_client_goes_and_only_then() -> None:
    goes, begun, cancelled = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def receive() -> Any:
        await goes.wait()
        return {"type": "http.disconnect"}

    async def working(error: Exception) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise error from None

    async def done(result: int | Exception) -> int:
        await asyncio.sleep(0)
        if isinstance(result, Exception):
            raise result
        return result

    assert await unless_gone(receive, done(7)) == 7
    with pytest.raises(TimeoutError, match="its own"):
        await unless_gone(receive, done(TimeoutError("its own")))
    call = asyncio.create_task(unless_gone(receive, working(ValueError("while it ended"))))
    async with asyncio.timeout(10):
        await begun.wait()
        goes.set()
        with pytest.raises(ClientDisconnect):
            await call
    assert cancelled.is_set()
    ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    ended.set_result(None)
    with pytest.raises(ClientDisconnect):
        await unless_gone(asyncio.Event().wait, working(ValueError("likewise")), ended)  # type: ignore[arg-type]


def test_a_listener_ends_once() -> None:
    listener = Listener(max_events=3)
    listener.end("stopping")
    listener.end("slow")
    listener.put(b"late")
    assert (listener.ending, listener.queue.qsize()) == ("stopping", 2)


async def test_a_reader_sees_the_progress_of_an_update_that_stands_still(
    plane: Plane, rl: httpx.AsyncClient
) -> None:
    server = plane.weight_server
    served, model = (plane.model(seed, tensors=4, nbytes=LARGE) for seed in (0, 1))
    await asyncio.to_thread(plane.spawn_many, 1, weight_urls=[server.url], model=served)
    server.behaviour.hold_after = LARGE
    body = {"transport": {"backend": "http", "url": f"{server.url}/{model.name}"}, "version": "one"}
    async with reading(rl) as reader:
        call = asyncio.create_task(rl.post("update_weights", json=body))

        def stands_still(kind: str, data: dict[str, Any]) -> bool:
            return kind == "update" and data["change"] == "progress" and data["total_bytes"] > 0

        found = await reader.until(stands_still)
        assert found["label"] == "one"
        assert found["waits_for"].startswith("the bytes of an HTTP server")
        assert found["caller"] == "127.0.0.1"
        async with reading(rl) as late:
            assert (await late.until(stands_still))["update_id"] == found["update_id"], "it came in the middle"
        server.behaviour.go.set()
        ended = await reader.until(lambda kind, data: kind == "update" and data["change"] == "finished")
        assert ended["update_id"] == found["update_id"]
        assert {"prepare_s", "gate_s"} <= ended["phases"].keys()
        assert (await call).status_code == 200
    began = [data for _, kind, data in reader.seen if kind == "update" and data["change"] == "began"]
    assert [one["caller"] for one in began] == ["127.0.0.1"]


async def test_a_reader_that_connects_again_gets_what_it_has_missed(plane: Plane) -> None:
    async with facade_of(plane, replace(LIMITS, kept_events=20)) as rl:
        plane.spawn()
        assert (await rl.get("ready?wait_s=20")).status_code == 200
        async with reading(rl) as reader:
            await rl.post("update_weights", json=update_of(plane, 1))
            await reader.until(lambda kind, data: kind == "update" and data["change"] == "finished")
        last = str(reader.seen[-1][0])
        await rl.post("update_weights", json=update_of(plane, 2))
        again = {"Last-Event-ID": last}
        async with reading(rl, **again) as late:
            await late.until(lambda kind, data: kind == "update" and data["change"] == "finished")
        assert {data["label"] for _, kind, data in late.seen if kind == "update"} == {"step_2"}
        ids = [number for number, _, _ in late.seen if number is not None]
        assert ids == sorted(set(ids))
        assert ids[0] > int(last)
        async with reading(rl, "?since_s=600") as recent:
            await recent.until(lambda kind, data: kind == "update" and data.get("label") == "step_2")
        for _ in range(20):
            await rl.post("resume", json={})
        async with reading(rl, **again) as too_late:
            assert "event: missed" in (await too_late.block() or "")
        for number in ("1", str(int(last) + 10**9)):
            async with reading(rl, **{"Last-Event-ID": number}) as stranger:
                assert "event: missed" in (await stranger.block() or "")
        refused = await rl.get("events", headers={"Last-Event-ID": "x"})
        assert refused.status_code == 400
        assert refused.json()["error"]["field"] == "Last-Event-ID"
        for query, fix in (
            ("since_s=x", "send a whole number"),
            ("follow=x", "send true or false"),
            ("a=1", "leave it out"),
        ):
            error = (await rl.get(f"events?{query}")).json()["error"]
            assert (error["field"], error["fix"]) == (query.partition("=")[0], fix)


async def test_the_command_line_shows_the_kept_events_and_ends(
    plane: Plane, capsys: pytest.CaptureFixture[str]
) -> None:
    options = FrontendOptions(plane.url, plane.namespace, plane.component, rl_port=0, http_port=None)
    async with (
        started(options) as urls,
        plain_client(base_url=f"{urls['rl_url']}/v1/rl/", timeout=BOUND_S) as rl,
    ):
        worker = plane.spawn()
        assert (await rl.get("ready?wait_s=20")).status_code == 200
        reply = await rl.post("update_weights", json=update_of(plane, 1), headers={"Idempotency-Key": "the-id"})
        assert reply.status_code == 200
        argv = ["events", "--since", "1h", "--url", urls["rl_url"]]
        assert await asyncio.to_thread(main.run, argv) == 0
        out = capsys.readouterr().out
        assert f"worker {worker.instance_id} joined" in out
        assert "update the-id (step_1) began, asked by 127.0.0.1" in out
        assert "update the-id (step_1) finished (" in out
        assert await asyncio.to_thread(main.run, [*argv, "--json"]) == 0
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert {"member", "update", "admission"} <= {line["event"] for line in lines}
        assert await asyncio.to_thread(main.run, ["events", "--since", "soon"]) == 2
