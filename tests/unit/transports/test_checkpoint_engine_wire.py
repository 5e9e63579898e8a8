"""The reader of checkpoint-engine's messages: what it takes, what it refuses, and that nothing runs."""

from __future__ import annotations

import os
import pickle
import random
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from safetensors.torch import save_file
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from rl_plane.errors import InvalidRequest, Unsupported
from rl_plane.protocol.versions import TensorSpec
from rl_plane.transports.base import TransportContext
from rl_plane.transports.ipc.checkpoint_engine import CheckpointEngineDelivery
from rl_plane.transports.ipc.checkpoint_engine_wire import BufferHandle, Failure, read_handle, read_tensors
from rl_plane.transports.ipc.receiver import IpcTransport
from rl_plane.weights.pickle_reader import UnreadablePickle
from tests.support.checkpoint_engine_server import ParameterServer
from tests.support.host_cuda import GPUS, HostCuda
from tests.support.hostile_pickles import Reduced, forbidden_to_run, mutated
from tests.support.shared_host_cuda import SharedHostCuda

MUTANTS = 6000
SEED = 20261128
ROOM = 1024
VALUES: dict[str, Any] = {
    "class": torch.Tensor,
    "size": torch.Size([ROOM]),
    "stride": (1,),
    "start": 0,
    "storage": torch.storage.TypedStorage,
    "dtype": torch.uint8,
    "device": 0,
    "handle": b"\x01" * 66,
    "nbytes": ROOM,
    "offset": 512,
    "grad": False,
    "counter": b"/torch_7_11_1",
    "number": 3,
    "event": b"\x02" * 64,
    "sync": True,
}


def handle(**changed: Any) -> bytes:
    return pickle.dumps((rebuild_cuda_tensor, tuple({**VALUES, **changed}.values())))


def tensors(*changes: dict[str, Any]) -> bytes:
    one = {"name": "a", "dtype": torch.bfloat16, "shape": torch.Size([2, 3]), "offset": 0}
    two = {"name": "b", "dtype": torch.float32, "shape": (4,), "offset": 256}
    return pickle.dumps([{**known, **more} for known, more in zip((one, two), (*changes, {}, {}), strict=False)])


def test_each_message_of_an_update_is_read_without_running_it() -> None:
    with forbidden_to_run():
        share = read_handle(handle())
        assert isinstance(share, BufferHandle)
        assert (share.nbytes, share.start, share.wire[:3]) == (ROOM, 0, [VALUES["handle"], ROOM, 512])
        assert read_tensors(tensors(), ROOM) == {
            "a": (TensorSpec("BF16", (2, 3)), 0),
            "b": (TensorSpec("F32", (4,)), 256),
        }
        assert read_tensors(pickle.dumps(None), ROOM) is None
        gave_up = pickle.dumps(RuntimeError("Some workers failed to update weights"))
        assert read_tensors(gave_up, ROOM) == Failure("Some workers failed to update weights")
        assert read_handle(gave_up) == Failure("Some workers failed to update weights")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (handle(size=torch.Size([2, 2])), "more than one axis"),
        (handle(stride=(2,)), "more than one axis"),
        (handle(dtype=torch.int8), "something else than a buffer"),
        (handle(start=1), "within its memory"),
        (handle(nbytes=ROOM - 1), "within its memory"),
        (pickle.dumps((os.system, ("id",))), "'posix' 'system'"),
        (pickle.dumps((torch.Tensor, ())), "instead of the handle"),
        (pickle.dumps((rebuild_cuda_tensor, (1,))), "1 values instead of 15"),
        (pickle.dumps(Reduced(rebuild_cuda_tensor, tuple(VALUES.values()))), "a call of"),
        (pickle.dumps(None), "instead of the handle"),
        (b"", "protocol 4 or 5"),
    ],
)
def test_a_wrong_handle_is_refused_with_the_reason(data: bytes, words: str) -> None:
    with forbidden_to_run(), pytest.raises(UnreadablePickle, match=words):
        read_handle(data)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (tensors({"offset": ROOM - 11}), "outside of the buffer"),
        (tensors({"offset": -1}), "outside of the buffer"),
        (tensors({"offset": True}), "outside of the buffer"),
        (tensors({"shape": (-1,)}), "no weight can have"),
        (tensors({"shape": [2, 3]}), "no weight can have"),
        (tensors({"dtype": "bfloat16"}), "no weight can have"),
        (tensors({"name": "b"}), "has already"),
        (tensors({"name": "a b"}), "no tensor can have"),
        (tensors({"more": 1}), "instead of name, dtype, shape and offset"),
        (pickle.dumps([]), "instead of a list of tensors"),
        (pickle.dumps("text"), "instead of a list of tensors"),
        (pickle.dumps(Reduced(os.system, ("id",))), "'posix' 'system'"),
        (pickle.dumps(Reduced(RuntimeError, (["x"],))), "an error without a text"),
    ],
)
def test_wrong_tensors_are_refused_with_the_reason(data: bytes, words: str) -> None:
    with forbidden_to_run(), pytest.raises(UnreadablePickle, match=words):
        read_tensors(data, ROOM)


def test_changed_messages_are_tensors_or_refused() -> None:
    chance, refused = random.Random(SEED), 0
    good = [handle(), tensors(), pickle.dumps(None), pickle.dumps(RuntimeError("no"))]
    with forbidden_to_run():
        for _ in range(MUTANTS):
            data = bytes(mutated(chance.choice(good), chance))
            for reader in (read_handle, lambda one: read_tensors(one, ROOM)):
                try:
                    reader(data)
                except UnreadablePickle:
                    refused += 1
    assert MUTANTS < refused < 2 * MUTANTS, "some mutants are refused, and some are messages all the same"


def test_only_sockets_of_this_machine_for_each_gpu_are_taken() -> None:
    pytest.importorskip("zmq")

    def opened(handles: Any, *devices: str) -> CheckpointEngineDelivery:
        context = TransportContext(device=devices[0], rank_devices=devices)
        transport = IpcTransport(context, HostCuda())
        found = transport.open({"backend": "ipc", "zmq_handles": handles}, "base")
        assert isinstance(found, CheckpointEngineDelivery)
        return found

    here = {gpu: f"ipc://@checkpoint-engine-{gpu}-0.sock" for gpu in GPUS}
    assert opened(here, "cuda:1", "cuda:0").addresses == [here[GPUS[1]], here[GPUS[0]]]
    named = {f"GPU-{gpu}": address for gpu, address in here.items()}  # as vLLM's platform names a GPU
    assert opened(named, "cuda:0").addresses == [here[GPUS[0]]]
    for wrong in (
        None,
        {},
        {GPUS[0]: 1},
        {GPUS[0]: "tcp://10.0.0.1:5555"},
        {GPUS[0]: "ipc:///tmp/x.sock"},
        {GPUS[0]: "ipc://@checkpoint-engine-x-0.sock\n"},
    ):
        with pytest.raises((InvalidRequest, Unsupported)) as caught:
            opened(wrong, "cuda:0")
        assert caught.value.facts["field"] == "transport.zmq_handles"
    with pytest.raises(Unsupported, match=f"no socket for {GPUS[1]}"):
        opened({GPUS[0]: here[GPUS[0]]}, "cuda:0", "cuda:1")
    with pytest.raises(Unsupported, match="a worker without a GPU"):
        opened(here, "cpu")


def test_a_worker_that_stops_in_the_middle_reports_it_to_the_server(tmp_path: Path) -> None:
    """The server waits for every worker without a bound, so it must hear of an update that was aborted."""
    pytest.importorskip("zmq")
    save_file({name: torch.ones(4) for name in "abc"}, tmp_path / "model.safetensors")
    server = ParameterServer()
    try:
        handles = server.begin({"directory": str(tmp_path), "buckets": 3, "gpus": GPUS[:1]})
        tensors = CheckpointEngineDelivery(handles, SharedHostCuda(GPUS[0]), ["cuda:0"]).tensors()
        assert isinstance(tensors, Generator)
        next(tensors)
        tensors.close()
        assert "remote errors" in server.end(None)
    finally:
        server.close()
