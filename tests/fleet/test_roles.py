"""Keys with roles against a real nats-server: what each key may do, and how the folder of keys is made and changed."""

from __future__ import annotations

import asyncio
import re
import signal
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from rl_plane.bus.connection import SERVICE_CONNECT_S, Bus
from rl_plane.bus.credentials import NatsCredentials
from rl_plane.bus.key_folder import KeyFolder, ServerTls
from rl_plane.bus.roles import ROLES, Role
from rl_plane.bus.server import NatsServer, find_binary
from rl_plane.client import RlClient
from rl_plane.errors import InvalidRequest, PermissionDenied, Unauthorized
from rl_plane.protocol.record import DecisionRecord
from tests.support.paths import ROOT
from tests.support.role_walk import (
    ANOTHER,
    FLEET,
    OWN,
    WRITTEN,
    as_markdown,
    foreign_answers,
    server_with_keys,
    table_of_docs,
    walk,
)

BOUND_S = 30.0
WALKED = "<!-- made by `python -m tests.support.role_walk` -->"


@pytest.fixture
def folder(tmp_path: Path) -> KeyFolder:
    folder = KeyFolder(tmp_path / "keys")
    folder.init(FLEET.namespace, [FLEET.component])
    return folder


@pytest.fixture
def server(folder: KeyFolder) -> Iterator[NatsServer]:
    with server_with_keys(folder) as server:
        yield server


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():  # noqa: ASYNC110 - the condition has no event
            await asyncio.sleep(0.05)


@asynccontextmanager
async def connected(server: NatsServer, folder: KeyFolder, name: str) -> AsyncIterator[Bus]:
    bus = await Bus.connect(server.url, name, credentials=NatsCredentials(nkey=folder.seed_of(name)))
    try:
        yield bus
    finally:
        await bus.close()


# ---- the table ----


def test_the_table_of_the_docs_is_what_the_server_says() -> None:
    page = (ROOT / "docs" / "security.md").read_text()
    shown = page.partition(WALKED)[2].strip().partition("\n\n")[0]
    assert shown == table_of_docs(), "docs/security.md: put in what `python -m tests.support.role_walk` prints"


async def test_each_role_has_what_it_needs_and_no_more(folder: KeyFolder) -> None:
    table = await walk(folder)
    may = {role: {what for what, can in found.items() if "p" in can} for role, found in table.items()}
    hears = {role: {what for what, can in found.items() if "s" in can} for role, found in table.items()}
    decides = {"lock", "record", "pause", "memory", "session", "history", "admission", "fence"}
    assert decides <= may["trainer"] & may["frontend"]
    assert not decides & (may["worker"] | may["service"])
    of_others = {what for what in table["worker"] if "another" in what}
    assert not of_others & (may["worker"] | hears["worker"])
    assert not {what for what in table["trainer"] if what.startswith(("registration", "status"))} & may["trainer"]
    assert not {what for what in table["trainer"] if what.startswith(("ops of", "generation"))} & hears["trainer"]
    reads = ("read", "generation", "describe", "the fleet's r")
    assert not {what for what in may["service"] if not what.startswith(reads)}
    forged = {what for what in table["operator"] if what.startswith(("feed", "disconnect"))}
    assert forged
    for role in table:
        assert not forged & may[role], role
        assert not {"another's inbox", "everything", "another fleet's record"} & (may[role] | hears[role]), role
    assert as_markdown(table).count("\n") == len(table["worker"]) + 1


async def test_a_worker_cannot_empty_the_state_by_a_header(server: NatsServer, folder: KeyFolder) -> None:
    """`Nats-Rollup: all` on any write to a bucket deletes all of its entries."""
    async with connected(server, folder, "frontend") as frontend:
        for bucket in (FLEET.members, FLEET.state, FLEET.offers):
            await frontend.ensure_bucket(bucket)
        await frontend.put(FLEET.state, "record", b"the record")
        async with connected(server, folder, "worker") as worker:
            for key in ("kept.x", "fence", "record", "x"):
                with pytest.raises(PermissionDenied):
                    await worker._request(FLEET.state.key(key), b"", {"Nats-Rollup": "all"})
            await worker._request(FLEET.offers.key(ANOTHER), b"", {"Nats-Rollup": "all"})
        entry = await frontend.get(FLEET.state, "record")
        assert entry is not None
        assert entry.value == b"the record"


@pytest.mark.parametrize("role", ROLES)
async def test_no_answer_brings_what_a_worker_has_written_to_the_record(folder: KeyFolder, role: Role) -> None:
    own = folder.add("worker", OWN)
    keys = {key.name: key for key in folder.known()}
    key = own if role == "worker" else keys[role]
    with server_with_keys(folder) as server:
        changed = await foreign_answers(server.url, folder, key, own)
    copied = [call for call, record in changed.items() if WRITTEN in record]
    if role in ("worker", "service"):
        assert copied == []
    else:
        assert copied, "a role that may write the record shows that the walk sees a copy"
    for call, record in changed.items():
        with pytest.raises(ValueError, match=r"."):
            DecisionRecord.decode(record)
        assert call


async def test_a_service_and_a_worker_read_all_entries_without_a_batch(
    server: NatsServer, folder: KeyFolder
) -> None:
    async with connected(server, folder, "frontend") as frontend:
        for bucket in (FLEET.members, FLEET.offers):
            await frontend.ensure_bucket(bucket)
        keys = [f"w.{number:016x}" for number in range(3)]
        for key in keys:
            await frontend.put(FLEET.members, key, key.encode())
        await frontend.purge(FLEET.members, keys[1], await frontend.last_sequence(FLEET.members) - 1)
        entries, last = await frontend.read_keys(FLEET.members, "w.*")
        assert [entry.value for entry in entries] == [keys[0].encode(), keys[2].encode(), None]
        async with connected(server, folder, "service") as service:
            assert await service.read_keys(FLEET.members, "w.*") == (entries, last)
        async with connected(server, folder, "worker") as worker:
            for number in range(3):
                await worker.put(FLEET.offers, f"{number:016x}", b"an offer")
            offers = await worker.list_keys(FLEET.offers, ">")
            assert [entry.key for entry in offers] == [f"{number:016x}" for number in range(3)]


# ---- denied requests ----


async def test_a_denied_request_is_an_error_at_once_that_names_the_subject_and_the_role(
    server: NatsServer, folder: KeyFolder
) -> None:
    async with connected(server, folder, "frontend") as frontend, connected(server, folder, "service") as service:
        await frontend.ensure_bucket(FLEET.state)
        with pytest.raises(PermissionDenied) as denied:
            await service.put(FLEET.state, "lock", b"{}")
        assert denied.value.facts["subject"] == FLEET.state.key("lock")
        assert denied.value.facts["role"] == "service"
        assert "a key of the role service may not publish to $KV.rlp_demo_engine_state.lock" in str(denied.value)
        assert denied.value.facts["fix"]

        async def ignore(message: object) -> None: ...

        await service.subscribe("demo.engine.generate.*", ignore)
        with pytest.raises(PermissionDenied, match=r"may not subscribe to demo\.engine\.generate\.\*"):
            await service.flush()
        await service.flush()


async def test_a_service_without_a_fleet_learns_at_once_what_is_missing(
    server: NatsServer, folder: KeyFolder
) -> None:
    key = NatsCredentials(nkey=folder.seed_of("service"))
    async with asyncio.timeout(SERVICE_CONNECT_S / 2):  # a wait as long as a worker's would fail here
        with pytest.raises(PermissionDenied) as missing:
            await RlClient.connect(server.url, FLEET.namespace, FLEET.component, credentials=key)
    assert "there is no fleet in namespace demo, component engine" in missing.value.message
    assert "start a frontend" in missing.value.facts["fix"]


async def test_a_worker_cannot_ask_another_worker(server: NatsServer, folder: KeyFolder) -> None:
    own = folder.add("worker", "one")
    server.stop()
    again = NatsServer(config=folder.config)
    again.start()
    try:
        async with connected(again, folder, own.name) as worker, connected(again, folder, "frontend") as frontend:
            await frontend.ensure_bucket(FLEET.members)
            with pytest.raises(PermissionDenied):
                await worker.put(FLEET.members, f"w.{ANOTHER}", b"", last=0)
            assert own.instance_id is not None
            assert await worker.put(FLEET.members, f"w.{own.instance_id}", b"", last=0)
    finally:
        again.stop()


async def test_a_client_without_a_key_or_with_a_key_of_another_folder_stays_out(
    server: NatsServer, folder: KeyFolder, tmp_path: Path
) -> None:
    with pytest.raises(Unauthorized, match="wants a key") as refused:
        await Bus.connect(server.url, wait_s=30.0)
    assert "--nats-nkey" in refused.value.facts["fix"]
    other = KeyFolder(tmp_path / "other")
    other.init(FLEET.namespace, [FLEET.component])
    with pytest.raises(Unauthorized, match="does not know a key of the role operator"):
        await RlClient.connect(
            server.url, wait_s=30.0, credentials=NatsCredentials(nkey=other.seed_of("operator"))
        )


async def test_a_reload_adds_and_removes_keys_while_the_rest_stays(server: NatsServer, folder: KeyFolder) -> None:
    async with connected(server, folder, "operator") as stays:
        added = folder.add("service", "new")
        server.process.send_signal(signal.SIGHUP)
        async with asyncio.timeout(10):
            while True:
                try:
                    async with connected(server, folder, added.name) as bus:
                        await bus.flush()
                    break
                except Unauthorized:
                    await asyncio.sleep(0.05)
        copy = folder.path / "copy.nk"
        copy.touch(mode=0o600)
        copy.write_bytes(folder.seed_of(added.name).read_bytes())
        folder.remove(added.name)
        leaves = await Bus.connect(server.url, credentials=NatsCredentials(nkey=copy))
        server.process.send_signal(signal.SIGHUP)
        await until(lambda: not leaves.nc.is_connected)
        with pytest.raises(Unauthorized, match="does not know a key of the role service"):
            await Bus.connect(server.url, wait_s=30.0, credentials=NatsCredentials(nkey=copy))
        await leaves.close()
        await stays.ensure_bucket(FLEET.state)


async def test_an_answer_that_nats_refuses_is_a_warning(
    server: NatsServer, folder: KeyFolder, caplog: pytest.LogCaptureFixture
) -> None:
    async with connected(server, folder, "worker") as bus:
        await bus.nc.publish("_INBOX.another.1", b"nothing was asked")
        await until(lambda: "an answer is lost" in caplog.text)


# ---- the folder ----


def test_only_this_user_can_read_the_keys_and_the_configuration_has_none(folder: KeyFolder) -> None:
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    folder.add("worker", "gpu-1")
    for file in folder.path.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
        seeds = re.findall(r"\bSU[A-Z2-7]{20,}", file.read_text())
        assert bool(seeds) == (file.suffix == ".nk"), file


def test_no_key_is_ever_overwritten(folder: KeyFolder) -> None:
    before = {file.name: file.read_bytes() for file in folder.path.glob("*.nk")}
    with pytest.raises(InvalidRequest, match="is there already") as again:
        folder.init(FLEET.namespace, [FLEET.component])
    assert "rl-plane keys add" in again.value.facts["fix"]
    with pytest.raises(InvalidRequest, match="there is a key worker already"):
        folder.add("worker")
    folder.add("worker", "gpu-1")
    with pytest.raises(InvalidRequest, match="there is a key worker-gpu-1 already"):
        folder.add("worker", "gpu-1")
    after = {file.name: file.read_bytes() for file in folder.path.glob("*.nk")}
    assert before.items() <= after.items()
    assert after.keys() - before.keys() == {"worker-gpu-1.nk"}


def test_keys_that_are_added_at_once_are_all_known(folder: KeyFolder) -> None:
    names = [f"gpu-{number}" for number in range(4)]
    command = [sys.executable, "-m", "rl_plane.cli.main", "keys", "add", "worker"]
    adding = [subprocess.Popen([*command, name, "--keys", str(folder.path)]) for name in names]
    assert [one.wait(BOUND_S) for one in adding] == [0] * len(names)
    assert {f"worker-{name}" for name in names} <= {key.name for key in folder.known()}


def test_the_seed_of_a_key_that_was_never_known_is_replaced(folder: KeyFolder) -> None:
    """The process that made it was killed before it had written the other files."""
    folder.seed_of("worker-gpu-1").write_text("half")
    added = folder.add("worker", "gpu-1")
    assert added in folder.known()
    assert "half" not in folder.seed_of("worker-gpu-1").read_text()


def test_nats_reads_paths_that_are_not_ascii(tmp_path: Path) -> None:
    home = tmp_path / "josé"
    folder = KeyFolder(home / "keys")
    folder.init(FLEET.namespace, [FLEET.component], ServerTls(home / "server.pem", home / "server-key.pem"))
    done = subprocess.run(
        [find_binary(), "-t", "-c", str(folder.config)], capture_output=True, text=True, timeout=BOUND_S
    )
    said = done.stdout + done.stderr
    assert "no such file" in said, said  # it has read the path, where no certificate is


@pytest.mark.parametrize(
    ("role", "name"), [("boss", None), ("worker", "../../x"), ("worker", ""), ("trainer", "A B")]
)
def test_a_wrong_role_or_name_is_refused(folder: KeyFolder, role: str, name: str | None) -> None:
    with pytest.raises(InvalidRequest) as refused:
        folder.add(role, name)
    assert refused.value.facts["fix"]
