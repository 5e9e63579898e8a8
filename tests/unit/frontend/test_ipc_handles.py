"""The reader of CUDA IPC handles of vLLM and SkyRL: what it takes, what it refuses, and that nothing runs."""

from __future__ import annotations

import base64
import json
import os
import pickle
import random
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from frontend.dialects.common.ipc_handles import HANDLE_BYTES, PART_BYTES, read_parts
from frontend.server.bodies import MAX_BODY_BYTES
from frontend.server.large_bodies import parse_large_object
from rl_plane.errors import InvalidRequest, Unsupported
from rl_plane.protocol.broadcast_plan import MEMORY_BYTES, pieces
from rl_plane.protocol.shared_tensors import GpuCopies
from rl_plane.protocol.update_requests import Part
from rl_plane.protocol.vllm_bodies import one_of_all
from tests.support.hostile_pickles import Reduced, forbidden_to_run, mutated

MUTANTS = 6000
SEED = 20261128
GPUS = ("GPU-0a1b-22", "GPU-0a1b-23")


def arguments(shape: tuple[int, ...], dtype: Any, nbytes: int | None = None, **changed: Any) -> tuple[Any, ...]:
    """Makes what torch's `reduce_tensor` gives for a contiguous CUDA tensor."""
    tensor = torch.empty(shape, dtype=dtype)
    values = {
        "class": torch.Tensor,
        "size": tensor.size(),
        "stride": tensor.stride(),
        "start": 0,
        "storage": torch.storage.TypedStorage,
        "dtype": dtype,
        "device": 0,
        "handle": b"\x01" * 66,
        "nbytes": tensor.nbytes if nbytes is None else nbytes,
        "offset": 512,
        "grad": False,
        "counter": b"/torch_7_11_1",
        "number": 3,
        "event": b"\x02" * 64,
        "sync": True,
    }
    return tuple({**values, **changed}.values())


def info(handles: Any, **more: Any) -> dict[str, Any]:
    tensors = {"names": ["a", "b"], "dtype_names": ["bfloat16", "float32"], "shapes": [[2, 3], [4]]}
    pickled = base64.b64encode(handles if isinstance(handles, bytes) else pickle.dumps(handles)).decode()
    return {**tensors, "ipc_handles_pickled": pickled, **more}


def each(**changed: Any) -> list[Any]:
    return [
        {gpu: arguments((2, 3), torch.bfloat16) for gpu in GPUS},
        {gpu: arguments((4,), torch.float32, **changed) for gpu in GPUS},
    ]


def read(given: dict[str, Any]) -> list[Part]:
    with forbidden_to_run():
        found = list(read_parts(given))
    return [Part.model_validate(one) for one in found]


def copies_of(part: Part) -> list[GpuCopies]:
    assert all(isinstance(one, GpuCopies) for one in part.memories)
    return [one for one in part.memories if isinstance(one, GpuCopies)]


def test_vllms_handles_give_the_memory_of_each_tensor() -> None:
    (part,) = read(info(each()))
    assert (part.names, part.dtypes, part.shapes) == (["a", "b"], ["bfloat16", "float32"], [[2, 3], [4]])
    assert [one and (one.memory, one.start, one.strides) for one in part.places or ()] == [
        (0, 0, None),
        (1, 0, None),
    ]
    for memory in copies_of(part):
        assert ([one.gpu for one in memory.copies], memory.held) == ([*GPUS], False)
    first = copies_of(part)[0].copies[0]
    assert (first.counter, first.counter_offset, first.offset) == ("/torch_7_11_1", 3, 512)


def test_vllms_packed_buffer_is_one_memory_for_all_calls() -> None:
    handles = {gpu: arguments((64,), torch.uint8) for gpu in GPUS}
    (part,) = read(info(handles, tensor_sizes=[12, 16]))
    assert [one and (one.memory, one.start) for one in part.places or ()] == [(0, 0), (0, 12)]
    (memory,) = copies_of(part)
    assert memory.held, "the trainer shares it once for all calls"


def test_skyrls_packed_buffer_is_one_memory_for_one_call() -> None:
    handles = {gpu: (rebuild_cuda_tensor, arguments((10,), torch.float32)) for gpu in GPUS}
    (part,) = read(info(handles, dtype_names=["float32"] * 2, sizes=[6, 4]))
    assert [one and (one.memory, one.start) for one in part.places or ()] == [(0, 0), (0, 24)]
    (memory,) = copies_of(part)
    assert not memory.held


def many(count: int) -> dict[str, Any]:
    """Handles of so many tensors, `t0`, `t1`, …"""
    handles = [{gpu: arguments((4,), torch.float32) for gpu in GPUS} for _ in range(count)]
    names = [f"t{number}" for number in range(count)]
    return info(handles, names=names, dtype_names=["float32"] * count, shapes=[[4]] * count)


def test_handles_in_a_body_of_more_than_1_mb_are_read() -> None:
    given = many(4000)
    body = json.dumps({"update_info": [given, given]}).encode()
    assert len(body) > MAX_BODY_BYTES
    parsed = one_of_all(parse_large_object(bytearray(body))["update_info"])
    assert read(parsed) == read(given)


def test_long_handles_that_differ_from_rank_to_rank_are_refused() -> None:
    body = json.dumps({"update_info": [many(4000), many(4001)]}).encode()
    with pytest.raises(Unsupported):
        one_of_all(parse_large_object(bytearray(body))["update_info"])


def test_many_handles_go_in_several_messages() -> None:
    of_a_message = PART_BYTES // (HANDLE_BYTES * len(GPUS))
    count = 4 * of_a_message
    given = many(count)
    parts = read(given)
    assert [len(part.names) for part in parts] == [of_a_message] * 4
    assert [name for part in parts for name in part.names] == given["names"]
    for part in parts:
        assert pieces(part) == [part]
        (copy, *_) = copies_of(part)[0].copies
        assert (
            sum(len(one) for one in copy.model_dump().values() if isinstance(one, str)) + MEMORY_BYTES
            < HANDLE_BYTES
        )


ONE = arguments((4,), torch.float32)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (info([]), "instead of handles for each of 2 tensors"),
        (info({}), "instead of handles for each of 2 tensors"),
        (info([{}, {}]), "a handle for each GPU"),
        (info([{GPUS[0]: ONE}, {GPUS[0]: ONE}]), "'a' has handles of another shape or dtype"),
        (info(each(nbytes=15)), "within its memory"),
        (info(each(nbytes=-1)), "handles are not torch's"),
        (info(each(counter=b"/../../etc/passwd")), "handles are not torch's"),
        (info(each(handle="text")), "without its handles"),
        (info(each(stride=(-1,))), "negative or endless"),
        (info(each(grad=0)), "of an unknown storage"),
        (info([{GPUS[0]: ONE[:14]}] * 2), "instead of the 15 values"),
        (info([{"GPU/../x": ONE}] * 2), "handles are not torch's"),
        (
            info([{GPUS[0]: arguments((4,), torch.float32), GPUS[1]: arguments((2,), torch.float32)}] * 2),
            "lies other",
        ),
        (info([{GPUS[0]: (os.system, ONE)}] * 2), "'posix' 'system'"),
        (info([{GPUS[0]: (torch.Tensor, ONE)}] * 2), "instead of the 15 values"),
        (info(Reduced(os.system, ("touch /tmp/owned",))), "'posix' 'system'"),
        (
            info(Reduced(rebuild_cuda_tensor, ONE)),
            "a call of torch.multiprocessing.reductions.rebuild_cuda_tensor",
        ),
        (info({GPUS[0]: ONE}, tensor_sizes=[12, 15]), "sizes that are not those of the shapes"),
        (info({GPUS[0]: arguments((20,), torch.uint8)}, tensor_sizes=[12, 16]), "too short for its tensors"),
        (
            info({GPUS[0]: arguments((4, 9), torch.uint8)}, tensor_sizes=[12, 16]),
            "contiguous tensor with one axis",
        ),
        (info({GPUS[0]: ONE}, sizes=[6, 4]), "another dtype than its tensors"),
        (info(each(), dtype_names=["complex64", "float32"]), "unknown dtype 'complex64'"),
        (info(each(), names=["a"]), "1 names and 2 dtype_names"),
        (info(each(), shapes=[[-1], [4]]), "negative side"),
    ],
)
def test_anything_else_is_refused_and_not_run(given: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(given)
    assert words in caught.value.message
    assert caught.value.facts["field"].startswith("update_info.")
    assert caught.value.facts["fix"]


def test_changed_handles_are_memory_or_refused() -> None:
    chance, refused = random.Random(SEED), 0
    packed = {gpu: arguments((64,), torch.uint8) for gpu in GPUS}
    skyrl = {gpu: (rebuild_cuda_tensor, arguments((10,), torch.float32)) for gpu in GPUS}
    good: list[tuple[bytes, dict[str, Any]]] = [
        (pickle.dumps(each()), {}),
        (pickle.dumps(packed), {"tensor_sizes": [12, 16]}),
        (pickle.dumps(skyrl), {"dtype_names": ["float32"] * 2, "sizes": [6, 4]}),
    ]
    with forbidden_to_run():
        for _ in range(MUTANTS):
            data, more = chance.choice(good)
            try:
                found = list(read_parts(info(bytes(mutated(data, chance)), **more)))
            except InvalidRequest:
                refused += 1
            else:
                for one in found:
                    Part.model_validate(one)
    assert MUTANTS // 2 < refused < MUTANTS, "some mutants are refused, and some are memory all the same"
