"""The host agent with stand-ins for its ranks: staging, the copy, adapters, updates in place, and what fails."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rl_plane._util.tasks import never
from rl_plane.errors import EngineFailed, InvalidRequest, InvalidWeights, NotAtBase
from rl_plane.protocol.versions import HostTensor, TensorSpec
from rl_plane.transports.base import TransportContext
from rl_plane.weights.checkpoint import open_checkpoint
from rl_plane.weights.safetensors_file import write_safetensors
from tests.conftest import stop_process
from tests.support.host_ranks import OneHost
from tests.support.receive_requests import files_request, named_request
from worker.engines.fake.adapter import make_fake_model
from worker.receive.host_agent.host_agent_client import HostAgentClient
from worker.receive.host_agent.host_agent_process import HostAgentProcess
from worker.receive.host_agent.windows import AHEAD, WINDOW_BYTES
from worker.receive.rank_agents.agent_messages import socket_directory
from worker.receive.rank_agents.host_areas import staged_weights
from worker.receive.staging import DigestingStream, adapter_digest, model_digest
from worker.receive.staging_area import StagingArea

BOUND_S = 60.0
TENSORS = 6


def bytes_of(model: Path) -> dict[str, bytes]:
    with contextlib.closing(open_checkpoint(model)) as checkpoint:
        return {name: bytes(tensor.data) for name, tensor in checkpoint.tensors()}


def specs_of(model: Path) -> dict[str, TensorSpec]:
    with contextlib.closing(open_checkpoint(model)) as checkpoint:
        return dict(checkpoint.specs)


@pytest.fixture
def new(tmp_path: Path) -> Path:
    return make_fake_model(tmp_path / "new", 1, TENSORS, 4096)


@pytest.fixture
def window_bytes() -> int:
    """The bytes of a window of `one_host`. A test gives others as a parameter."""
    return WINDOW_BYTES


@pytest.fixture
def one_host(tmp_path: Path, new: Path, window_bytes: int) -> Iterator[OneHost]:
    directory = socket_directory()
    found = OneHost(directory, specs_of(new), (tmp_path,), window_bytes)
    yield found
    found.close()
    for path in directory.iterdir():
        path.unlink()
    directory.rmdir()


def test_all_ranks_load_what_was_staged_once(one_host: OneHost, new: Path) -> None:
    host = one_host.host
    assert "filesystem" in host.transports
    host.open(*files_request("s", new, digest=model_digest(new)))
    reply = host.receive("s", never)
    assert reply == {
        "digest": model_digest(new),
        "tensors": TENSORS,
        "bytes": TENSORS * 4096,
        "refetchable": True,
    }
    count = host.received()
    assert count is not None
    assert (count.received, count.expected) == (TENSORS * 4096, TENSORS * 4096)
    one_host.ranks.stage("s", never)
    one_host.ranks.take("s")
    host.take("s")
    assert [rank.loaded for rank in one_host.all] == [bytes_of(new)] * 2
    assert host.cached_digest() is None
    with pytest.raises(EngineFailed, match="nothing is staged"):
        one_host.ranks.stage("s", never)


def test_the_memory_of_loaded_weights_is_used_again(one_host: OneHost, new: Path, tmp_path: Path) -> None:
    host, receiver = one_host.host, one_host.agent.receiver

    def staged(name: str, keep: bool = False) -> StagingArea:
        host.open(*files_request(name, new, keep=keep))
        host.receive(name, never)
        area = receiver.staged_area(name)[1]
        one_host.ranks.stage(name, never)
        one_host.ranks.take(name)
        return area

    first = staged("s")
    host.take("s")
    host.loaded("s")
    assert staged("t", keep=True) is first
    host.take("t")
    host.loaded("t")
    assert staged("u") is first, "the copy made room"
    host.take("u")
    assert staged("v") is not first, "some rank may still load it"
    host.discard("v")
    other = staged("w")
    host.discard("w")
    assert staged("x") is other
    assert [rank.loaded for rank in one_host.all] == [bytes_of(new)] * 2


def test_the_area_becomes_the_copy(one_host: OneHost, new: Path) -> None:
    host, receiver = one_host.host, one_host.agent.receiver
    host.open(*files_request("s", new, keep=True))
    host.receive("s", never)
    _, area = receiver.staged_area("s")
    assert host.cached_digest() is None, "it may still be discarded"
    one_host.ranks.stage("s", never)
    host.take("s")
    assert host.cached_digest() == model_digest(new)
    assert receiver.kept is not None
    assert receiver.kept.area is area
    host.open(*files_request("t", new, keep=True))
    host.receive("t", never)
    _, staged = receiver.staged_area("t")
    assert receiver.kept is not None
    assert receiver.kept.area is staged, "equal weights take its place: memory has room for one copy"
    host.discard("t")
    with pytest.raises(EngineFailed, match="nothing is staged"):
        one_host.ranks.stage("t", never)


def test_the_ranks_load_the_copy_again(one_host: OneHost, new: Path) -> None:
    host, receiver = one_host.host, one_host.agent.receiver
    host.open(*files_request("s", new, keep=True))
    host.receive("s", never)
    one_host.ranks.stage("s", never)
    one_host.ranks.take("s")
    host.take("s")
    host.loaded("s")
    copy = receiver.kept
    assert copy is not None
    request = files_request("own", new, digest=model_digest(new)).request.full_from(None)
    for name in ("own", "again"):
        for rank in one_host.all:
            rank.loaded = {}
        host.open(name, request)
        reply = host.receive(name, never)
        assert (reply["digest"], reply["bytes"]) == (model_digest(new), 0)
        one_host.ranks.stage(name, never)
        one_host.ranks.take(name)
        host.take(name)
        host.loaded(name)
        assert [rank.loaded for rank in one_host.all] == [bytes_of(new)] * 2
        assert receiver.kept is copy
    next(iter(copy.tensors.values())).data[0] ^= 1
    host.open("damaged", request)
    with pytest.raises(NotAtBase, match="damaged"):
        host.receive("damaged", never)
    assert host.cached_digest() is None
    with pytest.raises(EngineFailed, match="nothing is staged"):
        one_host.ranks.stage("damaged", never)


def test_weights_are_staged_only_where_every_rank_is_there(one_host: OneHost, new: Path) -> None:
    one_host.host.open(*files_request("s", new))
    one_host.host.receive("s", never)
    one_host.all[1].server.close()
    with pytest.raises(EngineFailed, match="rank 1"):
        one_host.ranks.stage("s", never)


@pytest.mark.engines("nixl")
def test_the_copy_is_offered_to_other_workers(one_host: OneHost, new: Path) -> None:
    from rl_plane.transports.nixl.receiver import NixlTransport

    host = one_host.host
    host.open(*files_request("s", new, keep=True))
    host.receive("s", never)
    assert host.offer() == [], "it is not swapped in"
    host.take("s")
    (place,) = host.offer()
    assert [place] == host.offer()
    assert place["digest"] == model_digest(new)
    transport = NixlTransport(TransportContext())
    delivery = transport.open(place["transport"], "base")
    assert len(list(DigestingStream(delivery, expected_digest=model_digest(new)))) == TENSORS
    delivery.close()
    host.open(*files_request("t", new))
    host.receive("t", never)
    assert host.offer() == []
    with pytest.raises(InvalidRequest, match="source_gone"):
        transport.open(place["transport"], "base")


@pytest.mark.engines("nixl")
def test_adapters_of_a_source_that_may_end_are_offered_while_they_are_loaded(
    one_host: OneHost, new: Path, tmp_path: Path
) -> None:
    from rl_plane.transports.nixl.receiver import NixlTransport

    host, transport, config = one_host.host, NixlTransport(TransportContext()), b'{"peft_type": "LORA"}'
    digests = []
    for name, data in (("s", b"abcd"), ("t", b"efgh")):
        tensors = {"LORA.a": HostTensor(TensorSpec("U8", (4,)), memoryview(bytearray(data)))}
        source = dict(transport.offer(tensors, config))
        host.open(*named_request(name, source, kind="lora"))
        digests.append(host.receive(name, never)["digest"])
        assert len(host.offer(digests)) == len(digests) - 1, "the last one is only staged"
        if name == "t":
            host.discard(name)
            assert len(host.offer(digests)) == 1, "it was aborted"
            host.open(*named_request("again", source, kind="lora"))
            name = "again"
            assert host.receive(name, never)["digest"] == digests[-1]
        transport.withdraw(source)
        host.take(name)
        assert len(host.offer(digests[:-1])) == len(digests) - 1, "the last one is on its way into the engine"
        host.loaded(name)  # the ranks have their own form of it
        host.open(*files_request(f"base {name}", new))
        host.receive(f"base {name}", never)
        assert [place["digest"] for place in host.offer(digests)] == digests
    one, two = host.offer(digests)
    for place in (one, two):
        with contextlib.closing(transport.open(place["transport"], "lora")) as delivery:
            stream = DigestingStream(delivery, expected_digest=place["digest"])
            assert [name for name, _ in stream] == ["LORA.a"]
    assert host.offer(digests[1:]) == [two]
    with pytest.raises(InvalidRequest, match="source_gone"):
        transport.open(one["transport"], "lora")
    path = tmp_path / "adapter"
    path.mkdir()
    (path / "adapter_config.json").write_bytes(config)
    write_safetensors(path / "adapter_model.safetensors", {"LORA.a": (TensorSpec("U8", (4,)), b"file")})
    host.open(*files_request("u", path, kind="lora"))
    of_files = host.receive("u", never)["digest"]
    assert host.offer([*digests, of_files]) == [two], "files stay where they are"


@pytest.mark.engines("nixl")
def test_the_copy_of_an_adapter_ends_although_the_next_one_can_not_be_offered(one_host: OneHost) -> None:
    from rl_plane.transports.nixl.receiver import NixlTransport

    class Broken(NixlTransport):
        def offer(self, *_: Any) -> Any:
            raise EngineFailed("no memory can be registered")

    host, receiver, source = one_host.host, one_host.agent.receiver, NixlTransport(TransportContext())
    works, receiver.transports = receiver.transports, {"nixl": Broken(TransportContext())}
    areas, digests = [], []
    for name in ("s", "t"):
        tensors = {"LORA.a": HostTensor(TensorSpec("U8", (4,)), memoryview(bytearray(name.encode() * 4)))}
        place = dict(source.offer(tensors, b'{"peft_type": "LORA"}'))
        host.open(*named_request(name, place, kind="lora"))
        digests.append(host.receive(name, never)["digest"])
        areas.append(receiver.staged_area(name)[1])
        source.withdraw(place)
        host.take(name)
        host.loaded(name)
    with pytest.raises(EngineFailed, match="registered"):
        host.offer(digests[1:])
    with pytest.raises(ValueError, match="no descriptor"):
        _ = areas[0].descriptor
    receiver.transports = works
    assert [place["digest"] for place in host.offer(digests[1:])] == digests[1:]


def test_an_adapter_is_checked_by_a_rank_and_staged_once(one_host: OneHost, tmp_path: Path) -> None:
    path = tmp_path / "adapter"
    path.mkdir()
    (path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    write_safetensors(path / "adapter_model.safetensors", {"LORA.a": (TensorSpec("U8", (4,)), b"abcd")})
    one_host.host.open(*files_request("s", path, kind="lora"))
    assert one_host.host.receive("s", never)["digest"] == adapter_digest(path)
    one_host.ranks.stage_adapter("s", never)
    assert [rank.adapters for rank in one_host.all] == [{"s": {"LORA.a": b"abcd"}}] * 2
    (path / "adapter_config.json").write_text(json.dumps({"peft_type": "OTHER"}))
    with pytest.raises(InvalidWeights, match=r"OTHER\.a"):
        one_host.host.open(*files_request("t", path, kind="lora"))


@pytest.mark.parametrize("window_bytes", [1, 10_000, 1 << 20])
def test_an_update_in_place_goes_to_all_ranks_by_windows(one_host: OneHost, new: Path) -> None:
    one_host.host.open(*files_request("s", new, in_place=True, digest=model_digest(new)))
    assert one_host.host.receive("s", never)["digest"] == model_digest(new)
    assert [rank.loaded for rank in one_host.all] == [bytes_of(new)] * 2


@pytest.mark.parametrize("window_bytes", [1])
def test_an_update_in_place_holds_few_windows_while_a_rank_is_slow(one_host: OneHost, new: Path) -> None:
    slow = one_host.all[1]
    slow.goes_on.clear()
    one_host.host.open(*files_request("s", new, in_place=True))
    most = 0
    receiving = threading.Thread(target=lambda: one_host.host.receive("s", never))
    receiving.start()
    assert slow.begun.wait(BOUND_S)
    for _ in range(20):
        holder: Any = one_host.agent.receiver.holder
        most = max(most, len(holder.windows._windows))
        threading.Event().wait(0.01)
    assert most == AHEAD
    assert len(one_host.all[0].loaded) < TENSORS, "the slowest rank sets the pace"
    slow.goes_on.set()
    receiving.join(BOUND_S)
    assert [rank.loaded for rank in one_host.all] == [bytes_of(new)] * 2


@pytest.mark.parametrize("window_bytes", [1])
def test_a_rank_that_fails_ends_an_update_in_place(one_host: OneHost, new: Path) -> None:
    one_host.all[1].fails_after = 2
    one_host.host.open(*files_request("s", new, in_place=True))
    with pytest.raises(EngineFailed, match="rank 1 takes no more"):
        one_host.host.receive("s", never)
    one_host.all[1].fails_after = None
    one_host.host.open(*files_request("t", new, in_place=True))
    one_host.host.receive("t", never)
    assert [rank.loaded for rank in one_host.all] == [bytes_of(new)] * 2


@pytest.mark.parametrize("window_bytes", [1])
@pytest.mark.parametrize("why", ["digest", "cancelled"])
def test_an_update_in_place_that_is_wrong_or_cancelled_ends_in_all_ranks(
    one_host: OneHost, new: Path, why: str
) -> None:
    cancelled: Callable[[], bool] = never
    expected: tuple[type[Exception], str] = (InvalidWeights, "is wanted")
    digest = "blake3:" + "0" * 64
    if why == "cancelled":
        one_host.all[0].goes_on.clear()
        cancelled, expected, digest = one_host.all[0].begun.is_set, (EngineFailed, "cancelled"), model_digest(new)
    else:
        (new / "rl_plane_manifest.json").unlink(missing_ok=True)
    one_host.host.open(*files_request("s", new, in_place=True, digest=digest))
    with pytest.raises(expected[0], match=expected[1]):
        one_host.host.receive("s", cancelled)
    one_host.all[0].goes_on.set()
    one_host.host.open(*files_request("t", new, in_place=True))
    one_host.host.receive("t", never)
    assert [rank.loaded for rank in one_host.all] == [bytes_of(new)] * 2


def test_ranks_of_different_models_are_no_model(one_host: OneHost) -> None:
    one_host.all[1].specs = {"other": TensorSpec("U8", (1,))}
    with pytest.raises(EngineFailed, match="don't agree"):
        one_host.ranks.describe()


# the process


async def _answers(client: HostAgentClient) -> None:
    """Waits until the process answers within the time of a ping, which a busy machine may not give it at once."""
    async with asyncio.timeout(BOUND_S):
        while True:
            try:
                return await client.ping()
            except TimeoutError:
                continue


async def test_the_process_answers_hangs_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "worker.py").write_text("raise SystemExit('a file of the user')")
    monkeypatch.chdir(tmp_path)
    directory = socket_directory()
    process = HostAgentProcess(directory)
    client = HostAgentClient(directory, process.pid)
    try:
        await _answers(client)
        with pytest.raises(EngineFailed, match="does not know the model"):
            await asyncio.to_thread(client.cached_digest)
        with pytest.raises(EngineFailed, match="does not know the model"):
            await asyncio.to_thread(staged_weights, directory, "s")
        stop_process(process.pid)
        with pytest.raises(TimeoutError, match=rf"the host agent \(pid {process.pid}\) does not answer"):
            await client.ping()
        os.kill(process.pid, signal.SIGCONT)
        await _answers(client)
    finally:
        process.kill()
    with pytest.raises(EngineFailed, match=rf"the host agent \(pid {process.pid}\) can't be reached"):
        await client.ping()
    with pytest.raises(EngineFailed, match="does not answer"):
        staged_weights(directory, "s")
    (directory / "host.sock").unlink()
    directory.rmdir()


def test_the_process_ends_with_the_worker(tmp_path: Path) -> None:
    program = (
        "import pathlib, sys; from worker.receive.host_agent.host_agent_process import HostAgentProcess; "
        "print(HostAgentProcess(pathlib.Path(sys.argv[1])).pid, flush=True); input()"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        agent = os.pidfd_open(int(worker.stdout.readline()))
        worker.kill()
    try:
        import select

        assert select.select([agent], [], [], BOUND_S)[0], "the host agent lives on"
    finally:
        os.close(agent)
