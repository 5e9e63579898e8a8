"""The staging area, in this process and mapped by another, and the room that it needs."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rl_plane._util.tasks import never
from rl_plane.errors import InvalidRequest
from rl_plane.protocol.versions import HostTensor, TensorSpec
from rl_plane.weights.hashed_copy import address_of
from tests.support.receive_requests import files_request
from worker.engines.base import EngineOptions
from worker.engines.fake.adapter import FakeEngine, make_fake_model
from worker.receive.area_pool import AreaPool
from worker.receive.host_room import MemoryFiles
from worker.receive.staging_area import ALIGN_BYTES, STAT_BLOCK_BYTES, MappedArea, StagingArea
from worker.receive.weight_receiver import Receiver

SPECS = {"a": TensorSpec("F32", (3,)), "empty": TensorSpec("F32", (0,)), "b": TensorSpec("I8", (3 << 20,))}
BYTES = {"a": bytes(range(12)), "empty": b"", "b": os.urandom(3 << 20)}


def filled(shared: bool) -> StagingArea:
    area = StagingArea.for_specs(SPECS, shared=shared)
    for name, spec in SPECS.items():
        placed = area.put(name, HostTensor(spec, memoryview(BYTES[name])))
        assert (bytes(placed.data), placed.owned) == (BYTES[name], True)
    return area


@pytest.mark.parametrize("shared", [False, True])
def test_each_tensor_has_an_aligned_place_of_its_own(shared: bool) -> None:
    area = filled(shared)
    assert {name: bytes(tensor.data) for name, tensor in area.tensors().items()} == BYTES
    assert all(address_of(area.place(name)) % ALIGN_BYTES == 0 for name in SPECS)
    place = area.place("a")
    place[:] = bytes(12)
    assert bytes(area.put("a", HostTensor(SPECS["a"], place)).data) == bytes(12), "it lies there already"
    assert area.find("other", SPECS["a"]) is None
    assert area.find("a", TensorSpec("F64", (3,))) is None, "it would lie over the next tensor"
    with pytest.raises(ValueError, match="room for 12"):
        area.put("a", HostTensor(TensorSpec("F64", (3,)), memoryview(bytes(24))))
    assert bytes(area.tensors()["b"].data) == BYTES["b"]


def test_a_place_may_get_a_smaller_tensor() -> None:
    area = StagingArea.for_specs({"a": TensorSpec("F64", (3,)), "b": SPECS["b"]}, shared=True)
    area.put("a", HostTensor(SPECS["a"], memoryview(BYTES["a"])))
    assert {name: tensor.spec for name, tensor in area.tensors().items()} == {"a": SPECS["a"]}
    assert [(name, dtype, tuple(shape)) for name, dtype, shape, _ in area.layout] == [("a", "F32", (3,))]


def test_a_map_of_the_area_takes_memory_only_for_the_tensors_that_have_come() -> None:
    """The places of an update in parts have room for tensors of any dtype."""
    count = 1 << 18
    wide, narrow = TensorSpec("F64", (count,)), TensorSpec("BF16", (count,))
    area = StagingArea.for_specs(dict.fromkeys("abcd", wide), shared=True)
    sent = {name: os.urandom(narrow.nbytes) for name in "bd"}
    for name, data in sent.items():
        area.put(name, HostTensor(narrow, memoryview(data)))
    mapped = MappedArea(area.descriptor, area.layout)
    assert {name: bytes(tensor.data) for name, tensor in mapped.tensors.items()} == sent
    assert os.fstat(area.descriptor).st_blocks * STAT_BLOCK_BYTES == len(sent) * narrow.nbytes
    assert area.resident_bytes == len(sent) * narrow.nbytes
    assert area.nbytes == 4 * wide.nbytes


def test_a_map_of_the_area_survives_it_and_changes_nothing_in_it() -> None:
    area = filled(shared=True)
    mapped = MappedArea(area.descriptor, area.layout)
    mapped.tensors["a"].data[0] = 99
    assert bytes(area.tensors()["a"].data) == BYTES["a"]
    mapped = MappedArea(area.descriptor, area.layout)
    area.close()
    area.close()
    assert {name: bytes(tensor.data) for name, tensor in mapped.tensors.items()} == BYTES
    with pytest.raises(ValueError, match="no descriptor"):
        _ = area.descriptor


def test_a_killed_process_leaves_nothing() -> None:
    before = set(os.listdir("/dev/shm"))
    program = (
        "from worker.receive.staging_area import StagingArea; from rl_plane.protocol.versions import TensorSpec; "
        "a = StagingArea.for_specs({'a': TensorSpec('U8', (1 << 20,))}, shared=True); a.place('a')[:] = bytes(1 << 20);"
        "print('up', flush=True); input()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", program], **pipes) as process:  # type: ignore[call-overload]
        assert process.stdout.readline() == b"up\n"
        assert set(os.listdir("/dev/shm")) <= before, "it has no name"
        process.kill()


async def test_weights_without_room_are_refused_before_a_byte_comes(tmp_path: Path) -> None:
    engine = FakeEngine(EngineOptions(make_fake_model(tmp_path / "base", 0), weight_roots=(tmp_path,)))
    await engine.start()
    new = make_fake_model(tmp_path / "new", 1)
    group, proc = tmp_path / "group", tmp_path / "proc"
    group.mkdir()
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text("0::/none/of/these\n")
    (proc / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable: 9999999 kB\n")
    files = MemoryFiles(proc, group)
    engine.receiver = Receiver(engine.receiver.holder, engine.receiver.transports, memory_files=files)
    (group / "memory.max").write_text("5000\n")
    (group / "memory.current").write_text("2000\n")
    (group / "memory.stat").write_text("anon 700\ninactive_file 500\nactive_file 500\n")
    with pytest.raises(InvalidRequest, match=r"needs 1 MiB .*memory\.max of the control group") as refused:
        engine.receiver.open(*files_request("s", new))
    assert (refused.value.facts["needed_bytes"], refused.value.facts["free_bytes"]) == (4096, 4000)
    assert "the container's memory limit" in refused.value.facts["fix"]
    (group / "memory.max").write_text("5096\n")
    engine.receiver.open(*files_request("s", new, keep=True))
    engine.receiver.receive("s", never)
    engine.receiver.take("s")
    (group / "memory.max").write_text("999\n")
    with pytest.raises(InvalidRequest, match="staging needs"):
        engine.receiver.open(*files_request("t", new))
    (group / "memory.max").write_text("1000\n")
    engine.receiver.open(*files_request("t", new))  # the copy of the version before makes room
    engine.receiver.discard("t")
    (group / "memory.max").write_text("max\n")
    engine.receiver.open(*files_request("u", new))
    (proc / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable: 0 kB\n")
    engine.receiver.discard("u")
    engine.receiver.kept = None
    with pytest.raises(InvalidRequest, match="MemAvailable"):
        engine.receiver.open(*files_request("v", new))
    await engine.close()


def test_memory_is_used_again_only_when_no_rank_reads_it() -> None:
    pool = AreaPool(shared=True)
    first = pool.make(SPECS)
    first.put("a", HostTensor(SPECS["a"], memoryview(BYTES["a"])))
    pool.lend("s", first)
    assert pool.returned("other") is None
    assert pool.returned("s") is first
    pool.give_back(first)
    assert pool.spare_bytes == mmap.PAGESIZE, "only the first tensor has come"
    again = pool.make(dict(reversed(SPECS.items())))
    assert again is first
    assert (again.tensors(), pool.spare_bytes) == ({}, 0), "the tensors before are gone"
    pool.lend("t", again)
    pool.give_back(again)  # the ranks have not said that they are done
    assert pool.spare_bytes == 0
    assert pool.make(SPECS) is not again
    pool.give_back(pool.make(SPECS))
    assert pool.make({"a": SPECS["a"]}).nbytes == ALIGN_BYTES
    assert pool.spare_bytes == 0, "memory of another size makes room"
    plain = AreaPool(shared=False)
    plain.give_back(plain.make(SPECS))
    assert plain.spare_bytes == 0
