"""Tensors that lie where a part says: in named shared memory, or, with a stand-in for torch's CUDA calls, on a GPU."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from frontend.dialects.sglang import shared_counts
from frontend.dialects.sglang.shared_counts import give_back
from rl_plane._util.tasks import never
from rl_plane.errors import EngineFailed, InvalidRequest, InvalidWeights, PlaneError, Unavailable, Unsupported
from rl_plane.protocol.shared_tensors import NamedMemory
from rl_plane.protocol.update_requests import ReceivePart
from rl_plane.protocol.versions import TensorSpec, tensor_digest
from rl_plane.transports.base import TransportContext
from rl_plane.transports.ipc.placed_delivery import PlacedDelivery
from rl_plane.transports.ipc.receiver import IpcTransport
from rl_plane.transports.ipc.torch_cuda import TorchCuda
from rl_plane.transports.trainer_memory import HEADER_BYTES, SHM, opened_memory
from tests.support.host_cuda import GPUS, HostCuda, at_call
from tests.support.other_user import as_another_user

Make = Callable[..., NamedMemory]
BOUND_S = 30.0


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes shared memory as torch does: a header with the count of its uses, and the bytes."""
    numbers, made = itertools.count(), list[Path]()

    def memory(data: bytes, uses: int = 2) -> NamedMemory:
        name = f"torch_{os.getpid()}_77_{next(numbers)}"
        made.append(SHM / name)
        made[-1].write_bytes(uses.to_bytes(HEADER_BYTES, "little") + data)
        return NamedMemory(name=name, nbytes=len(data))

    yield memory
    for one in made:
        one.unlink(missing_ok=True)


def part(tensors: Mapping[str, tuple[str, list[int], Any]], memories: list[Any], **more: Any) -> ReceivePart:
    return ReceivePart.model_validate(
        {
            "update_id": "one",
            "names": list(tensors),
            "dtypes": [dtype for dtype, _, _ in tensors.values()],
            "shapes": [shape for _, shape, _ in tensors.values()],
            "places": [place for _, _, place in tensors.values()],
            "memories": [one if isinstance(one, dict) else one.model_dump() for one in memories],
            "timeout_s": BOUND_S,
            **more,
        }
    )


def received(
    *parts: ReceivePart, cuda: TorchCuda | None = None, places: Any = None, context: TransportContext | None = None
) -> dict[str, bytes]:
    """The bytes of each tensor, whose digests are right where there are any."""
    transport = IpcTransport(context or TransportContext(), *([] if cuda is None else [cuda]))
    delivery = transport.open({"backend": "ipc", "in_parts": True, "fleet_ranks": 1}, "base")
    assert isinstance(delivery, PlacedDelivery)
    delivery.places = places
    specs = {name: spec for one in parts for name, spec in zip(one.names, one.specs, strict=True)}
    delivery.expect(specs, {}, lambda wanted, offered: None)
    found: dict[str, bytes] = {}

    def take() -> None:
        for name, tensor in delivery.tensors(never):
            assert tensor.digest in (None, tensor_digest(tensor.data))
            found[name] = bytes(tensor.data)

    with ThreadPoolExecutor(1) as pool:
        taking = pool.submit(take)
        try:
            for number, one in enumerate(parts, 1):
                left = delivery.receive_part(one.model_copy(update={"last": number == len(parts)}), never)
            assert left == 0
        except PlaneError:
            with pytest.raises(PlaneError):
                taking.result(BOUND_S)
            raise
        finally:
            delivery.close()
        taking.result(BOUND_S)
    return found


def place(memory: int, start: int = 0, strides: list[int] | None = None) -> dict[str, Any]:
    return {"memory": memory, "start": start, "strides": strides}


def test_tensors_are_read_from_their_places_with_any_strides(make: Make) -> None:
    whole = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    first, second = make(whole.numpy().tobytes()), make(bytes(range(8)))
    found = received(
        part(
            {
                "whole": ("float32", [3, 4], place(0)),
                "turned": ("float32", [4, 3], place(0, strides=[1, 4])),
                "column": ("float32", [3], place(0, 8, [4])),
                "wide": ("float32", [2, 3], place(0, 4, [0, 1])),
                "other": ("uint8", [4], place(1, 4)),
                "none": ("float32", [0, 3], None),
            },
            [first, second],
        ),
        part({"scalar": ("float32", [], place(0, 20))}, [first]),
    )
    expected = {
        "whole": whole,
        "turned": whole.t(),
        "column": whole[:, 2],
        "wide": whole.flatten()[1:4].expand(2, 3),
        "scalar": torch.tensor(5.0),
    }
    for name, tensor in expected.items():
        assert found[name] == tensor.contiguous().numpy().tobytes(), name
    assert (found["other"], found["none"]) == (b"\x04\x05\x06\x07", b"")


def test_tensors_go_where_the_receiver_wants_them(make: Make) -> None:
    into = bytearray(8)

    def places(name: str, spec: TensorSpec) -> memoryview | None:
        return memoryview(into) if name == "a" else None

    memory = make(bytes(range(16)))
    tensors = {"a": ("uint8", [8], place(0, 8)), "b": ("int16", [2], place(0))}
    found = received(part(tensors, [memory]), places=places)
    assert bytes(into) == found["a"] == bytes(range(8, 16))
    assert found["b"] == bytes(range(4))


@pytest.mark.parametrize(
    ("dtype", "shape", "where"),
    [
        ("float32", [3], place(0)),
        ("float32", [2], place(0, 4)),
        ("float32", [2], place(0, 0, [2])),
        ("float32", [1], place(1)),
        ("float32", [1], None),
        ("float32", [2, 1], place(0, 0, [1])),
        ("float32", [2], place(0, 0, [-1])),
    ],
)
def test_an_impossible_place_is_refused(make: Make, dtype: str, shape: list[int], where: Any) -> None:
    with pytest.raises(InvalidRequest) as refused:
        received(part({"a": (dtype, shape, where)}, [make(bytes(8))]))
    assert refused.value.facts["field"] == "places"


def test_a_part_without_places_is_refused(make: Make) -> None:
    with pytest.raises(InvalidRequest, match="by places"):
        received(part({"a": ("uint8", [1], None)}, [], places=None))
    with pytest.raises(InvalidRequest, match="1 names and 0 places"):
        part({"a": ("uint8", [1], None)}, [], places=[])


def test_memory_that_gets_shorter_is_no_crash(make: Make) -> None:
    memory = make(bytes(64))

    def places(name: str, spec: TensorSpec) -> None:
        os.truncate(SHM / memory.name, HEADER_BYTES)  # after every check

    with pytest.raises(InvalidWeights, match="ends after"):
        received(part({"a": ("uint8", [64], place(0))}, [memory]), places=places)


def test_only_a_file_of_ones_own_is_opened(make: Make, tmp_path: Path) -> None:
    def refused(memory: NamedMemory) -> str:
        with pytest.raises(InvalidRequest) as caught, opened_memory(memory, shm=tmp_path):
            pass
        assert caught.value.facts["field"] == "memories"
        return caught.value.message

    secret, name = tmp_path / "secret", "torch_1_2_3"
    secret.write_bytes(bytes(200))
    memory = NamedMemory(name=name, nbytes=8)
    assert "no shared memory torch_1_2_3 here" in refused(memory)
    (tmp_path / name).symlink_to(secret)
    assert "no shared memory" in refused(memory)
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    assert "of this worker's user" in refused(memory)
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()
    assert "of this worker's user" in refused(memory)
    (tmp_path / name).rmdir()
    (tmp_path / name).write_bytes(bytes(HEADER_BYTES + 7))
    assert "less than a storage of 8 bytes" in refused(memory)
    (tmp_path / name).write_bytes(bytes(HEADER_BYTES + 8))
    with opened_memory(memory, shm=tmp_path) as descriptor:
        assert os.fstat(descriptor).st_size == HEADER_BYTES + 8
    with as_another_user():
        assert "of this worker's user" in refused(memory)
    for wrong in ("../secret", "torch_1_2", "torch_1_2_3/../secret", "/torch_1_2_3", "torch_1_2_3\n", ""):
        with pytest.raises(ValueError, match="name"):
            NamedMemory(name=wrong, nbytes=8)


def test_a_cancelled_update_ends(make: Make) -> None:
    delivery = PlacedDelivery(HostCuda())
    delivery.expect({"a": TensorSpec("U8", (4,))}, {}, lambda wanted, offered: None)
    with ThreadPoolExecutor(1) as pool:
        taking = pool.submit(lambda: list(delivery.tensors(lambda: True)))
        with pytest.raises(EngineFailed, match="cancelled"):
            taking.result(BOUND_S)


# ---- on a GPU ----


def shared_on(cuda: HostCuda, gpu: str, tensor: Any) -> dict[str, Any]:
    memory, nbytes, offset, counter, counter_offset, event, event_sync = cuda.share(tensor.untyped_storage())
    return {
        "gpu": gpu,
        "memory": memory.hex(),
        "nbytes": nbytes,
        "offset": offset,
        "counter": counter.decode(),
        "counter_offset": counter_offset,
        "event": event.hex(),
        "event_sync": event_sync,
    }


def test_tensors_on_a_gpu_are_opened_once_and_released() -> None:
    cuda = HostCuda()
    whole, other = torch.arange(6, dtype=torch.int32).reshape(2, 3), torch.arange(4, dtype=torch.uint8)
    memories = [shared_on(cuda, GPUS[0], whole), shared_on(cuda, GPUS[1], other)]
    unused = [shared_on(cuda, GPUS[1], whole)]
    tensors = {
        "a": ("int32", [2, 3], place(0)),
        "b": ("uint8", [2], place(1, 2)),
        "turned": ("int32", [3, 2], place(0, 0, [1, 3])),
    }
    found = received(part(tensors, memories, unused=unused), cuda=cuda)
    assert found["a"] == whole.numpy().tobytes()
    assert found["b"] == b"\x02\x03"
    assert found["turned"] == whole.t().contiguous().numpy().tobytes()
    assert cuda.calls.count("open") == 2
    assert cuda.held == [], "torch in the trainer may free the memory"


def test_memory_on_a_gpu_that_is_not_here_is_refused() -> None:
    cuda = HostCuda((GPUS[0],))
    there = shared_on(cuda, GPUS[1], torch.zeros(4))
    tensors = {"a": ("float32", [4], place(0))}
    with pytest.raises(Unsupported, match=f"the GPU {GPUS[1]}, which this worker does not see"):
        received(part(tensors, [there]), cuda=cuda)
    with pytest.raises(Unsupported, match="machine has no CUDA"):
        received(part(tensors, [there]), cuda=HostCuda(()))
    odd = {**shared_on(cuda, GPUS[0], torch.zeros(4)), "offset": 1}
    with pytest.raises(InvalidRequest, match="handle"):
        received(part(tensors, [odd]), cuda=cuda)


def test_gpu_memory_that_can_not_be_opened_is_reported_and_released() -> None:
    cuda = HostCuda()
    memory, unused = shared_on(cuda, GPUS[0], torch.zeros(4)), shared_on(cuda, GPUS[1], torch.zeros(4))
    cuda.before["open"] = at_call(0, RuntimeError("CUDA error: invalid resource handle"))
    with pytest.raises(Unavailable, match="can't be opened: CUDA error"):
        received(part({"a": ("float32", [4], place(0))}, [memory], unused=[unused]), cuda=cuda)
    assert cuda.held == []


def copies_on(cuda: HostCuda, tensor: Any, *, held: bool = False) -> dict[str, Any]:
    """Copies of a tensor on all GPUs."""
    return {"copies": [shared_on(cuda, gpu, tensor) for gpu in GPUS], "held": held}


def received_on(cuda: HostCuda, devices: tuple[str, ...], *parts: ReceivePart) -> dict[str, bytes]:
    """Receives as a process whose ranks are on these devices."""
    return received(*parts, cuda=cuda, context=TransportContext(device=devices[0], rank_devices=devices))


def test_each_worker_reads_the_copy_on_its_own_gpu() -> None:
    cuda, whole = HostCuda(), torch.arange(4, dtype=torch.uint8)
    one = part({"a": ("uint8", [4], place(0))}, [copies_on(cuda, whole)])
    assert received_on(cuda, ("cuda:1",), one) == {"a": bytes(range(4))}
    assert cuda.held == [0], "the other copy is another worker's"
    assert received_on(cuda, ("cuda:0",), one) == {"a": bytes(range(4))}
    assert cuda.held == []


def test_a_worker_with_several_ranks_reads_one_copy_and_releases_the_others() -> None:
    cuda, whole = HostCuda(), torch.arange(4, dtype=torch.uint8)
    one = part({"a": ("uint8", [4], place(0))}, [copies_on(cuda, whole)])
    assert received_on(cuda, ("cuda:1", "cuda:0"), one) == {"a": bytes(range(4))}
    assert (cuda.calls.count("open"), cuda.held) == (1, [])


def test_a_memory_that_is_filled_again_is_opened_once_for_all_parts() -> None:
    cuda, buffer = HostCuda(), torch.arange(8, dtype=torch.uint8)
    copies = copies_on(cuda, buffer, held=True)
    own = ("cuda:0", "cuda:1")
    parts = [part({name: ("uint8", [4], place(0, start))}, [copies]) for name, start in (("a", 0), ("b", 4))]
    nothing = part({}, [])
    found = received_on(cuda, own, *parts, nothing)
    assert found == {"a": bytes(range(4)), "b": bytes(range(4, 8))}
    assert (cuda.calls.count("open"), cuda.calls.count("release"), cuda.held) == (1, 2, [])


def test_a_gpu_without_a_copy_is_named() -> None:
    cuda = HostCuda()
    one = part({"a": ("uint8", [4], place(0))}, [{"copies": [shared_on(cuda, GPUS[0], torch.zeros(1))]}])
    with pytest.raises(Unsupported, match=f"on {GPUS[0]}, and this worker's model is on {GPUS[1]}"):
        received_on(cuda, ("cuda:1",), one)
    with pytest.raises(Unsupported, match="is on no GPU"):
        received_on(cuda, ("cpu",), one)
    with pytest.raises(InvalidRequest, match="two copies are on one GPU"):
        part({}, [{"copies": [shared_on(cuda, GPUS[0], torch.zeros(1))] * 2}])
    assert "open" not in cuda.calls


def test_a_share_of_a_dead_trainer_or_another_machine_is_not_opened() -> None:
    cuda = HostCuda()
    one = part({"a": ("uint8", [4], place(0))}, [copies_on(cuda, torch.zeros(1))])
    cuda.sender_lives = False
    with pytest.raises(InvalidRequest, match="is not on this machine, or has ended"):
        received_on(cuda, ("cuda:0",), one)
    assert "open" not in cuda.calls


def test_a_share_that_is_longer_than_its_allocation_is_released_unread() -> None:
    cuda = HostCuda()
    one = part({"a": ("float32", [4], place(0))}, [copies_on(cuda, torch.zeros(4))])
    cuda.cut_off = 1
    with pytest.raises(InvalidRequest, match=r"a share of 16 bytes .* has 15 bytes to the end"):
        received_on(cuda, ("cuda:0", "cuda:1"), one)
    assert cuda.held == []


def test_torch_counts_in_a_file_of_a_process_that_lives() -> None:
    name = f"torch_{os.getpid()}_78_1"
    assert not TorchCuda().is_counted(f"/{name}".encode())
    (SHM / name).touch()
    try:
        assert TorchCuda().is_counted(f"/{name}".encode())
    finally:
        (SHM / name).unlink()
    assert TorchCuda().bytes_left(torch.zeros(1).untyped_storage()) is None, "there is no CUDA here"


# ---- the uses that torch counts ----


def test_one_use_is_given_back_for_each_time_of_sharing(make: Make) -> None:
    memory = make(bytes(8), uses=4)

    def uses() -> int:
        return int.from_bytes((SHM / memory.name).read_bytes()[:HEADER_BYTES], "little")

    give_back([memory, memory])
    assert uses() == 2
    give_back([memory] * 5)
    assert uses() == 1, "the last use is the trainer's own"
    assert (SHM / memory.name).read_bytes()[HEADER_BYTES:] == bytes(8)


def test_memory_that_is_gone_is_named_once(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    shared_counts._report.cache_clear()
    with caplog.at_level(logging.WARNING):
        give_back([NamedMemory(name="torch_1_1_1", nbytes=1), NamedMemory(name="torch_1_1_2", nbytes=1)])
    assert [record.message for record in caplog.records] == [
        "a trainer's shared memory can't be given back here: No such file or directory. "
        "It stays until the trainer's process ends"
    ]
