"""`rl-plane publish DIR`, over the facade and over NATS, and what SkyRL's settings become."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from examples.skyrl_client import FleetInferenceClient
from frontend.server.options import FrontendOptions
from rl_plane.cli import main
from rl_plane.cli.settings import SETTINGS
from rl_plane.errors import InvalidRequest
from rl_plane.publish import WeightPublisher
from rl_plane.publish.integrations.skyrl import lora_disk_load, publisher_options
from rl_plane.sync import SyncRlClient
from rl_plane.transports.registry import installed
from tests.support.fleet_updates import all_serve
from tests.support.frontend_here import started
from tests.support.publishing import all_keep, nudged, on_another_machine
from worker.engines.fake.adapter import make_fake_adapter, make_fake_model
from worker.receive.staging import adapter_digest, model_digest

if TYPE_CHECKING:
    from tests.conftest import Plane


BOUND_S = 60.0


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for setting in SETTINGS.values():
        monkeypatch.delenv(setting.variable, raising=False)


async def test_publish_commits_over_the_facade_and_over_nats(
    plane: Plane, capsys: pytest.CaptureFixture[str]
) -> None:
    plane.spawn_many(2)
    root = ["--root", str(plane.tmp / "weights" / "published")]
    elsewhere = plane.model(1).rename(plane.tmp / "elsewhere")  # which no worker may read
    nats = ["--nats-url", plane.url, "--namespace", plane.namespace]
    options = FrontendOptions(plane.url, plane.namespace, plane.component, rl_port=0, http_port=None)
    async with started(options) as urls:
        facade = ["--url", urls["rl_url"], "--component", plane.component]
        argv = ["publish", str(elsewhere), *root, "--version", "one", *facade]
        assert await asyncio.to_thread(main.run, argv) == 0
        out, err = capsys.readouterr()
        assert "committed version 1 (one)" in out
        assert "sent by filesystem" in err
        adapter = make_fake_adapter(plane.tmp / "adapter", 1, plane.model())
        for label, op in (("a1", facade), ("a2", nats)):  # loaded, then swapped
            argv = ["publish", str(adapter), *root, "--adapter", "a", "--version", label, *op, "--json"]
            assert await asyncio.to_thread(main.run, argv) == 0
            reply = json.loads(capsys.readouterr().out)
            assert reply["version"]["digest"] == adapter_digest(adapter)
            assert reply["transport"] == "filesystem"
        # A failure: its error as JSON, exit code 1.
        wrong = plane.model(2, nbytes=2048)
        assert await asyncio.to_thread(main.run, ["publish", str(wrong), *root, *facade, "--json"]) == 1
        error = json.loads(capsys.readouterr().out)["error"]
        assert error["code"] == "invalid_weights"
        assert len(error["workers"]) == 2
    state = await (await plane.fleet()).run("state")
    assert state["version"]["digest"] == model_digest(elsewhere)
    assert state["adapters"]["a"]["label"] == "a2"


async def test_a_command_sends_what_differs_from_a_checkpoint(
    plane: Plane, capsys: pytest.CaptureFixture[str]
) -> None:
    plane.spawn_many(2)
    client = await plane.client()
    models = [plane.model(1)]
    models += [nudged(plane, models[0], 1)]
    models += [nudged(plane, models[1], 2)]
    root = str(plane.tmp / "weights" / "published")
    reach = ["--root", root, "--nats-url", plane.url, "--namespace", plane.namespace]

    async def publish(number: int, encoding: str) -> None:
        base = ["--base", str(models[number - 1])] if number else ["--keep-staged"]
        argv = ["publish", str(models[number]), *base, "--version", str(number), *reach, "--json"]
        assert await asyncio.to_thread(main.run, argv) == 0
        reply = json.loads(capsys.readouterr().out)
        assert (reply["encoding"], reply["version"]["digest"]) == (encoding, model_digest(models[number]))
        await plane.until(lambda: all_keep(client, models[number]), BOUND_S)

    await publish(0, "full")
    await publish(1, "partial")
    await publish(2, "partial")
    # Another version than the base is committed.
    body = {"transport": {"backend": "filesystem", "path": str(models[0])}}
    await client.run("update_weights", body)
    await publish(2, "full")
    argv = ["publish", str(models[0]), "--base", str(plane.tmp / "nowhere"), *reach]
    assert await asyncio.to_thread(main.run, argv) != 0
    assert "nowhere" in capsys.readouterr().err


async def test_a_version_published_without_a_root_outlives_the_command(
    plane: Plane, capsys: pytest.CaptureFixture[str]
) -> None:
    worker = plane.spawn()
    client = await plane.client()
    nats = ["--nats-url", plane.url, "--namespace", plane.namespace]
    argv = ["publish", str(plane.model(1)), "--version", "one", "--json", *nats]
    assert await asyncio.to_thread(main.run, argv) == 0
    assert json.loads(capsys.readouterr().out)["transport"] == "object_store"
    worker.kill()
    plane.spawn(instance_id=worker.instance_id)
    await plane.until(lambda: all_serve(client, "one"), BOUND_S)
    # Who knows the facade alone has no place that outlasts it: the record says so.
    options = FrontendOptions(plane.url, plane.namespace, plane.component, rl_port=0, http_port=None)
    async with started(options) as urls:
        argv = ["publish", str(plane.model(2)), "--version", "two", "--json", "--url", urls["rl_url"]]
        for more, transports in ((["--option", f"nats_url={plane.url}"], ["object_store"]), ([], ["nixl", "ipc"])):
            assert await asyncio.to_thread(main.run, [*argv, *more]) == 0
            assert json.loads(capsys.readouterr().out)["transport"] in transports
    (newest, *_) = (await client.run("updates"))["updates"]
    assert (newest["label"], newest["refetchable"]) == ("two", False)


NEEDS = {"gloo": [pytest.mark.engines("torch")], "nixl": [pytest.mark.engines("nixl")]}


@pytest.mark.parametrize(
    "transport",
    [pytest.param(each, marks=NEEDS.get(each, [])) for each in sorted(installed().keys() - {"nccl"})],
)
async def test_a_directory_goes_by_each_transport(
    transport: str, plane: Plane, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command sends weights, and then an adapter of them, into each worker, by each algorithm of digests."""
    plane.spawn_many(2)
    client = await plane.client()
    argv = ["--transport", transport, "--nats-url", plane.url, "--namespace", plane.namespace, "--json"]
    if transport == "filesystem":
        argv += ["--root", str(plane.tmp / "weights" / "published")]
    model = plane.model(1).rename(plane.tmp / "elsewhere")  # which no worker may read
    adapter = make_fake_adapter(plane.tmp / "adapter", 1, model)
    blake3 = ["--digest", "blake3"]
    for path, more, digest in (
        (model, ["--version", "one"], model_digest(model)),
        (adapter, ["--adapter", "a", "--version", "a1"], adapter_digest(adapter)),
        (model, ["--version", "one", *blake3], model_digest(model, algorithm="blake3")),
        (adapter, ["--adapter", "a", "--version", "a1", *blake3], adapter_digest(adapter, "blake3")),
    ):
        assert await asyncio.to_thread(main.run, ["publish", str(path), *more, *argv]) == 0
        reply = json.loads(capsys.readouterr().out)
        assert (reply["transport"], reply["version"]["digest"]) == (transport, digest)
        assert [row["status"] for row in reply["workers"]] == ["ok", "ok"]
    state = await client.run("state")
    assert (state["version"]["label"], state["loras"]) == ("one", ["a"])
    assert all(row["admission"]["open"] for row in state["workers"])


async def test_publish_passes_options_to_the_transport(plane: Plane, capsys: pytest.CaptureFixture[str]) -> None:
    plane.spawn()
    with on_another_machine():  # than the engines
        argv = ["publish", str(plane.model(1)), "--transport", "gloo", "--nats-url", plane.url]
        argv += ["--namespace", plane.namespace, "--json"]
        for given, field in (
            ([], "options.host"),
            (["--option", "host=127.0.0.1", "--option", "port=x"], "options.port"),
        ):
            assert await asyncio.to_thread(main.run, [*argv, *given]) == 1
            error = json.loads(capsys.readouterr().out)["error"]
            assert error["field"] == field
        given = ["--option", "host=127.0.0.1", "--option", "port=0", "--option", "timeout_s=60"]
        assert await asyncio.to_thread(main.run, [*argv, *given]) == 0
    assert json.loads(capsys.readouterr().out)["transport"] == "gloo"


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ([], "Missing argument 'DIR'"),
        (["/nowhere"], "not there"),
        (["MODEL", "--transport", "filesystem"], "--root DIR"),
        (["MODEL", "--adapter", "a"], "leave --adapter out"),
        (["ADAPTER"], "--adapter NAME"),
        (["MODEL", "--transport", "a b"], "transport's name"),
        (["MODEL", "--component", "a,b"], "one component"),
        (["MODEL", "--option", "host"], "key=value"),
    ],
)
def test_wrong_usage_ends_with_an_error_that_says_why(
    more: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_fake_model(tmp_path / "m", 1)
    places = {"MODEL": model, "ADAPTER": make_fake_adapter(tmp_path / "a", 1, model)}
    assert main.run(["publish", *(str(places.get(one, one)) for one in more)]) == 2
    assert words in capsys.readouterr().err


def test_a_wrong_canary_beside_the_checkpoint_is_refused_before_anything_is_sent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_fake_model(tmp_path / "m", 1)
    (model / "canary.json").write_text('{"sequences": [[1]]}')
    argv = ["publish", str(model), "--url", "http://127.0.0.1:9", "--root", str(tmp_path / "root")]
    assert main.run(argv) == 2
    assert "canary.json: canary.sequences.0" in capsys.readouterr().err
    assert main.run([*argv, "--canary", "off"]) == 1, "then the file is not read"


def test_no_facade_is_an_error_of_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_fake_model(tmp_path / "m", 1)
    assert main.run(["publish", str(model), "--url", "http://127.0.0.1:9", "--root", str(tmp_path / "root")]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "no frontend answers" in err
    assert not (tmp_path / "root").exists()


# ---- SkyRL's names ----


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Returns the warnings of rl_plane. asyncio may warn of an earlier test at any time."""
    return [one.getMessage() for one in caplog.records if one.name.startswith("rl_plane")]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"transport": "nccl"}),
        (
            {"colocate_all": True, "weight_transfer_threshold_cuda_ipc_GB": 0.5},
            {"transport": "ipc", "bucket_bytes": 1 << 29},
        ),
        ({"colocate_all": True}, {"transport": "ipc", "bucket_bytes": 1 << 30}),
        ({"lora_sync_path": "/tmp/sync", "lora": True}, {"transport": "filesystem", "root": "/tmp/sync"}),
        ({"lora": True}, {"transport": "nccl"}),
        ({"override_existing_update_group": "enable"}, {"transport": "nccl"}),
    ],
)
def test_skyrl_settings_become_options_of_the_publisher(
    given: dict[str, Any], expected: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("WARNING", "rl_plane.publish")
    assert publisher_options(**given) == expected
    assert not warnings_of(caplog)


@pytest.mark.parametrize(
    ("given", "way"),
    [
        ({"weight_sync_backend": "gloo", "colocate_all": True}, "gloo"),
        ({"weight_transfer_threshold_cuda_ipc_GB": 1.0}, "nccl"),
        ({"lora_sync_path": "/tmp/skyrl_lora_sync"}, "nccl"),
        ({"lora_sync_path": "/tmp/sync", "lora": True, "colocate_all": True}, "filesystem"),
    ],
)
def test_skyrl_settings_that_change_nothing_are_named(
    given: dict[str, Any], way: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert publisher_options(**given)["transport"] == way
    (said,) = warnings_of(caplog)
    idle = given.keys() - {"weight_sync_backend", "lora"} - ({"lora_sync_path"} if way == "filesystem" else set())
    assert said.endswith(f"by {way}: {', '.join(idle)} has no effect")


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"weight_sync_backend": "mpi"}, "weight_sync_backend"),
        ({"weight_transfer_threshold_cuda_ipc_GB": 0}, "weight_transfer_threshold_cuda_ipc_GB"),
        ({"override_existing_update_group": "maybe"}, "override_existing_update_group"),
        ({"override_existing_update_group": "disable"}, "override_existing_update_group"),
        ({"override_existing_update_group": "enable", "colocate_all": True}, "override_existing_update_group"),
    ],
)
def test_wrong_skyrl_settings_are_named(given: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        publisher_options(**given)
    assert caught.value.facts["field"] == field


async def test_skyrl_settings_publish_and_override_a_group_that_is_there(plane: Plane) -> None:
    plane.spawn()
    client = await plane.client()
    options = publisher_options(weight_sync_backend="gloo", override_existing_update_group="enable")
    before = WeightPublisher(plane.model(1), client, **options)
    after = WeightPublisher(plane.model(2), client, **options)
    try:
        for publisher, label in ((before, "one"), (after, "two")):
            reply = (await publisher.publish_async(label)).result()
            assert (reply["version"]["label"], publisher.backend) == (label, "gloo")
    finally:
        await asyncio.to_thread(after.close)
        await asyncio.to_thread(before.close)


async def test_skyrls_repeated_lora_disk_load_reads_the_new_files(plane: Plane) -> None:
    """The example's drop-in writes other bytes to the same path each time, as SkyRL does."""
    plane.spawn()
    client, path = await plane.client(), plane.tmp / "weights" / "skyrl_lora_sync"
    sync = await asyncio.to_thread(SyncRlClient.connect, plane.url, plane.namespace, plane.component)
    skyrl = FleetInferenceClient(sync, "policy")
    request = {"names": ["lora_disk_load"], "extras": [{"lora_disk_path": str(path)}]}
    for seed in (1, 2, 3):
        make_fake_adapter(plane.tmp / f"step{seed}", seed, plane.model()).rename(path)
        await skyrl.update_named_weights(request)
        state = await client.run("state")
        assert state["loras"] == ["policy"]
        made = state["adapters"]["policy"]
        assert (made["digest"], made["sequence"]) == (adapter_digest(path), seed)
        path.rename(plane.tmp / f"before{seed}")
    await asyncio.to_thread(sync.close)


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        ({"names": ["model.weight"]}, "names"),
        ({"names": ["lora_disk_load"]}, "extras"),
        ({"names": ["lora_disk_load"], "extras": [{}]}, "extras"),
    ],
)
def test_other_requests_of_skyrl_are_refused(request_: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        lora_disk_load(request_, "policy")
    assert caught.value.facts["field"] == field
