"""`rl-plane doctor` over real fleets: what workers say of their machines, and of a weight root that one of them
lacks."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from frontend.server.options import FrontendOptions
from rl_plane.bus.connection import Bus
from rl_plane.bus.server import NatsServer
from rl_plane.cli import main
from rl_plane.cli.settings import SETTINGS
from rl_plane.errors import InvalidRequest
from rl_plane.protocol.subjects import Subjects
from tests.conftest import Plane
from tests.support.frontend_here import started
from worker.ops.host_facts import HostFacts, look_at_root


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for setting in SETTINGS.values():
        monkeypatch.delenv(setting.variable, raising=False)


async def doctor(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, list[dict[str, str]]]:
    capsys.readouterr()
    code = await asyncio.to_thread(main.run, ["doctor", *argv, "--json"])
    reply: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert reply["healthy"] == (code == 0)
    return code, reply["checks"]


async def test_a_sound_fleet_is_healthy_and_another_root_is_not(
    plane: Plane, capsys: pytest.CaptureFixture[str]
) -> None:
    options = FrontendOptions(
        plane.url, plane.namespace, plane.component, rl_port=0, http_port=None, dialects=(), admin_key="a-key"
    )
    await asyncio.to_thread(plane.spawn_many, 2)
    async with started(options) as urls:
        here = ("--url", urls["rl_url"], "--admin-key", "a-key")
        root = str(plane.tmp / "weights")
        code, checks = await doctor(capsys, *here, "--weight-root", root)
        assert code == 0, checks
        by_name = {one["check"]: one["words"] for one in checks}
        assert by_name["weight root"].startswith(f"{root} is the same directory for all 2 workers")
        assert "a version takes" in by_name["disk"]
        assert by_name["clocks"].startswith("4 clocks")
        assert "2 describe themselves (2 fake)" in by_name["workers"]
        assert "the key for HTTP is admin_key, with the role admin" in [one["words"] for one in checks]
        code, checks = await doctor(capsys, *here, "--weight-root", "/somewhere/else")
        assert code == 1
        (bad,) = [one for one in checks if one["level"] == "error"]
        assert "leads outside the weight roots" in bad["words"]
        assert "--weight-root" in bad["fix"]


async def test_the_buckets_are_those_of_the_frontend_that_is_asked(
    plane: Plane, capsys: pytest.CaptureFixture[str]
) -> None:
    options = FrontendOptions(plane.url, plane.namespace, "rollout", rl_port=0, http_port=None, dialects=())
    async with started(options) as urls:
        _, checks = await doctor(capsys, "--url", urls["rl_url"])
        own = Subjects(plane.namespace, "rollout")
        buckets = [one["words"].partition(":")[0] for one in checks if one["check"] == "bucket"]
        assert buckets == [own.members.name, own.state.name]
        _, checks = await doctor(capsys, "--url", urls["rl_url"], "--namespace", "another", "--component", "c")
        named = [one["words"] for one in checks if one["check"] == "bucket"]
        assert all(Subjects("another", "c").namespace in words for words in named)


async def test_the_fleet_is_examined_over_nats_without_a_frontend(
    plane: Plane, capsys: pytest.CaptureFixture[str]
) -> None:
    await asyncio.to_thread(plane.spawn)
    code, checks = await doctor(capsys, "--nats-url", plane.url, "--namespace", plane.namespace)
    assert code == 0, checks
    words = [one["words"] for one in checks]
    assert any(line.startswith("nats-server 2.") for line in words)
    assert "1 describe themselves (1 fake)" in words
    assert sum("file storage, 1 copy" in line for line in words) == 2
    assert [one["words"] for one in checks if one["level"] == "warning"] == ["none delivers tokens now"]
    code, checks = await doctor(capsys, "--nats-url", "nats://127.0.0.1:1", "--namespace", plane.namespace)
    assert code == 1
    assert {one["check"] for one in checks if one["level"] == "error"} == {"NATS", "workers"}


async def test_a_server_that_takes_only_small_messages_is_refused_and_examined(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise each longer answer would be lost, and its caller would only see a time-out."""
    config = tmp_path / "nats.conf"
    config.write_text("max_payload: 64KB")
    server = NatsServer(config=config)
    server.start()
    try:
        with pytest.raises(InvalidRequest, match="messages of at most 65536 bytes") as refused:
            await Bus.connect(server.url)
        assert refused.value.facts["field"] == "nats_url"
        assert "max_payload" in refused.value.facts["fix"]
        code, checks = await doctor(capsys, "--nats-url", server.url)
        assert code == 1
        found = {one["words"]: one["level"] for one in checks}
        assert found["max_payload is 65.5 kB"] == "error"
        assert any(words.startswith("it is on") for words in found), "JetStream is examined too"
    finally:
        server.stop()


async def test_a_worker_describes_its_machine_only_if_it_is_asked(plane: Plane) -> None:
    fleet = await plane.fleet()
    await asyncio.to_thread(plane.spawn)
    (row,) = (await fleet.run("describe"))["workers"]
    assert row["host"] is None
    (row,) = (await fleet.run("describe", {"host": True}))["workers"]
    host = row["host"]
    assert host["nats"]["connected"]
    assert host["free_memory_bytes"] > 0
    assert [root["path"] for root in host["roots"]] == [str(plane.tmp / "weights")]


def test_a_look_at_a_root_names_its_fault(tmp_path: Path) -> None:
    (tmp_path / "share" / "step_1").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "share")
    roots = [tmp_path / "share"]
    seen = look_at_root(str(tmp_path / "share"), roots)
    assert (seen["error"], seen["entries"]) == (None, 1)
    linked = look_at_root(str(tmp_path / "link"), roots)
    assert {**linked, "path": ""} == {**seen, "path": ""}
    assert look_at_root(str(tmp_path / "share" / "none"), roots)["error"] == "No such file or directory"
    assert look_at_root(str(tmp_path / "a\0b"), roots)["error"] == "embedded null byte"
    outside = look_at_root("/etc", roots)
    assert outside["error"] is not None
    assert outside["error"].startswith("'/etc' leads outside the weight roots")
    assert outside["inode"] is None, "it says nothing of a place that it may not read"


async def test_a_file_system_that_hangs_costs_one_thread(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked, go = [], asyncio.Event()
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()

    def hang(path: str, roots: Any) -> Any:
        asked.append(path)
        asyncio.run_coroutine_threadsafe(go.wait(), loop).result()
        loop.call_soon_threadsafe(ended.set)
        return look_at_root(path, roots)

    monkeypatch.setattr("worker.ops.host_facts.look_at_root", hang)
    host = HostFacts([tmp_path], dict, look_s=0.05)
    for _ in range(2):
        (root,) = (await host.reply(()))["roots"]
        assert root["error"] == "the file system does not answer within 0.05 s"
    assert asked == [str(tmp_path)], "a second look would hang too"
    go.set()
    await ended.wait()


async def test_a_command_makes_no_component_of_a_mistaken_name(
    plane: Plane, capsys: pytest.CaptureFixture[str]
) -> None:
    own = Subjects(plane.namespace, "mistaken")
    there = ("--nats-url", plane.url, "--namespace", plane.namespace, "--component", "mistaken")
    for argv in (["state"], ["workers"], ["explain"], ["ready"], ["pause"], ["doctor"]):
        assert await asyncio.to_thread(main.run, [*argv, *there]) == 1, argv
        said = "".join(capsys.readouterr())
        assert "no component 'mistaken' in the namespace" in said, argv
    bus = (await plane.client()).bus
    assert not [one for one in (own.members, own.state, own.offers) if await bus.bucket_exists(one)]


async def test_ready_waits_over_nats_for_a_fleet_that_is_not_there_yet(
    plane: Plane, capsys: pytest.CaptureFixture[str]
) -> None:
    there = ("--nats-url", plane.url, "--namespace", plane.namespace)
    waiting = asyncio.create_task(asyncio.to_thread(main.run, ["ready", "--wait", "60s", *there]))
    said = ""

    async def is_told() -> bool:
        nonlocal said
        said += capsys.readouterr().err
        return "not ready yet: no component 'engine'" in said

    await plane.until(is_told)
    await asyncio.to_thread(plane.spawn)
    assert await waiting == 0
