"""The id of a group that a trainer forms by vLLM's NCCL engine: taken out of a pickle that is never opened."""

from __future__ import annotations

import ctypes
import pickle
import random
import threading
from dataclasses import replace
from typing import Any

import pytest

from rl_plane.errors import InvalidRequest
from rl_plane.transports.group.rank_layout import Place
from rl_plane.transports.group.torch_group import Group
from rl_plane.transports.group.vllm_rendezvous import ID_KEY, MAX_PICKLE_BYTES, nccl_id_of, store_with_id
from rl_plane.transports.torch_calls import import_torch

BOUND_S = 10.0
ID = bytes(range(128))
RUN: list[str] = []
"""Grows if a pickle is opened."""


class NcclUniqueId(ctypes.Structure):
    """A structure like vLLM's `ncclUniqueId`."""

    _fields_ = (("internal", ctypes.c_byte * 128),)


class Attack:
    def __reduce__(self) -> Any:
        return RUN.append, ("opened",)


def pickled(value: Any = None, protocol: int = 4) -> bytes:
    return pickle.dumps(NcclUniqueId.from_buffer_copy(ID) if value is None else value, protocol)


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_the_id_is_read(protocol: int) -> None:
    assert nccl_id_of(pickled(protocol=protocol)) == ID


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80\x04.",
        ID,
        pickled()[:-20],
        pickled(bytes(127)),
        pickled([bytes(128), bytes(range(128))]),
        pickled(Attack()),
        pickled(b"x" * (MAX_PICKLE_BYTES + 1)),
    ],
)
def test_anything_else_is_refused_and_not_run(data: bytes) -> None:
    with pytest.raises(InvalidRequest) as caught:
        nccl_id_of(data)
    assert caught.value.facts["field"] == "rendezvous"
    assert not RUN


def test_a_pickle_with_an_id_and_an_attack_runs_nothing() -> None:
    assert nccl_id_of(pickled([Attack(), ID])) == ID
    assert not RUN


def test_changed_pickles_give_an_id_or_an_error() -> None:
    changes = random.Random(7)
    for _ in range(3000):
        data = bytearray(pickled())
        for _ in range(changes.randrange(1, 6)):
            data[changes.randrange(len(data))] = changes.randrange(256)
        try:
            assert len(nccl_id_of(bytes(data))) == 128
        except InvalidRequest:
            pass
    assert not RUN


class Connected:
    """A stand-in for torch's nccl group that notes what a rank does with it."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.done: list[Any] = []

    def eager_connect_single_device(self, device: Any) -> None:
        self.done.append(self.store.get("0"))

    def allreduce(self, tensors: Any, options: Any) -> Any:
        self.done.append([(tensor.dtype, tuple(tensor.shape)) for tensor in tensors])
        work: Any = import_torch().futures.Future()
        work.set_result(tensors)
        return work

    def abort(self) -> None:
        pass


def test_a_rank_joins_by_the_id_and_reduces_one_number() -> None:
    torch = import_torch()
    store = torch.distributed.TCPStore("127.0.0.1", 0, 3, True, wait_for_workers=False, use_libuv=False)
    store.set(ID_KEY, pickled())
    place = Place("nccl", "vllm", "127.0.0.1", store.port, world_size=3, rank=1, form="torch", rendezvous="vllm")
    place = replace(place, fleet_ranks=2, device="cpu")
    other = threading.Thread(
        target=store_with_id, args=(torch.distributed, ("127.0.0.1", store.port), 3, BOUND_S), daemon=True
    )
    other.start()
    made: list[Connected] = []

    def make(place: Place, there: Any, timeout_s: float) -> Connected:
        made.append(Connected(there))
        return made[-1]

    # The third rank is the trainer itself, which torch's own store counts when it waits for its workers.
    trainer = torch.distributed.TCPStore(
        "127.0.0.1", store.port, 3, False, wait_for_workers=False, use_libuv=False
    )
    trainer.add("init/", 1)
    group = Group(place, BOUND_S, make=make)
    assert made[0].done == [ID, [(torch.float32, (1,))]]
    other.join(BOUND_S)
    group.drop("it is enough")
    group.await_end(BOUND_S)
