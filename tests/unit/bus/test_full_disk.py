"""A nats-server whose disk was full for a moment: it answers no write until it starts again, and this is said."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest

from rl_plane.bus.connection import Bus
from rl_plane.bus.credentials import NO_CREDENTIALS
from rl_plane.bus.server import ERRORS_SHOWN, LOG_BYTES, NatsServer
from rl_plane.cli.children import Printer
from rl_plane.cli.doctor.nats_questions import ask_nats
from rl_plane.cli.supervisor import Supervisor
from rl_plane.errors import BusUnreachable
from rl_plane.protocol.subjects import Subjects
from tests.conftest import Plane
from tests.support.full_disk import full_disk

if sys.platform != "linux":
    pytest.skip("sets a limit of another process", allow_module_level=True)

BOUND_S = 30.0


async def fill_for_a_moment(server: NatsServer, bus: Bus, subjects: Subjects) -> BusUnreachable:
    await bus.ensure_bucket(subjects.state)
    with full_disk(server.process.pid), pytest.raises(BusUnreachable):
        await bus.put(subjects.state, "lock", b"x" * 5000)
    with pytest.raises(BusUnreachable) as refused:  # there is room again
        await bus.put(subjects.state, "lock", b"x")
    return refused.value


async def test_a_write_without_an_answer_names_the_disk_and_the_doctor_finds_it(
    own_nats: tuple[NatsServer, Plane],
) -> None:
    server, _ = own_nats
    subjects = Subjects("demo", "engine")
    bus = await Bus.connect(server.url)
    await bus.ensure_bucket(subjects.state)

    async def examined() -> Any:
        nats, _, _ = await asyncio.to_thread(ask_nats, server.url, NO_CREDENTIALS, subjects, None, 5.0)
        return nats.write_error

    try:
        assert await examined() == {}
        refused = await fill_for_a_moment(server, bus, subjects)
        assert "if the disk of its store was full, make room, then restart" in refused.facts["fix"]
        found = await examined()
        assert found["code"] == "bus_unreachable"
        assert found["fix"] == refused.facts["fix"]
        errors = server.new_errors()
        assert "failed to store a msg" in errors[0]
        assert errors[-1].startswith("it takes no more writes to this stream until it starts again; make room")
        assert server.new_errors() == []
        assert server.needs_restart
        await asyncio.to_thread(server.restart)
        await fill_for_a_moment(server, bus, subjects)
        assert server.new_errors()
        assert not server.needs_restart, "a restart that has not helped is not repeated at once"
    finally:
        await bus.close()


async def test_the_supervisor_restarts_a_server_whose_disk_has_room_again_but_not_again_and_again() -> None:
    server = NatsServer()
    events: list[tuple[str, dict[str, Any]]] = []
    back, stuck_again = asyncio.Event(), asyncio.Event()

    def note(words: str, **facts: Any) -> None:
        events.append((words, facts))
        if facts["event"] == "back":
            back.set()
        elif back.is_set() and "takes no more writes" in words:
            stuck_again.set()

    supervisor = Supervisor(Printer(), note, lambda name, line, fd: None)
    supervisor.supervise_nats(server)
    bus = await Bus.connect(server.url)
    subjects = Subjects("demo", "engine")
    again = asyncio.Event()

    async def reconnected() -> None:
        again.set()

    bus.on_reconnect(reconnected)
    try:
        await fill_for_a_moment(server, bus, subjects)
        async with asyncio.timeout(BOUND_S):
            await back.wait()
            await again.wait()
        await bus.put(subjects.state, "lock", b"x")
        assert "failed to store a msg" in events[0][0]
        assert [facts["event"] for _, facts in events] == ["error", "error", "error", "died", "back"]
        await fill_for_a_moment(server, bus, subjects)
        async with asyncio.timeout(BOUND_S):
            await stuck_again.wait()
        assert "takes no more writes" in events[-1][0], "it was to start again at once"
    finally:
        await bus.close()
        await supervisor.stop([])


def test_one_look_returns_a_few_errors_and_counts_the_others() -> None:
    server = NatsServer()
    try:
        server.log_path.write_text("[1] [INF] ready\n" + "[1] [ERR] refused\n" * 10 + "[1] [FTL] cut")
        assert server.new_errors() == ["[ERR] refused"] * ERRORS_SHOWN + [f"{10 - ERRORS_SHOWN} more errors"]
        with server.log_path.open("a") as log:
            log.write(" off\n")
        assert server.new_errors() == ["[FTL] cut off"]
        with server.log_path.open("a") as log:
            log.write("[1] [INF] " + "x" * LOG_BYTES + "\n[1] [ERR] last\n")
        assert server.new_errors() == ["[ERR] last"]
    finally:
        server.stop()
