"""The reader of prime-rl's description of a state dict: what it takes, what it refuses, and that nothing runs."""

from __future__ import annotations

import os
import pickle
import random
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from rl_plane.errors import InvalidWeights
from rl_plane.protocol.versions import TensorSpec
from rl_plane.transports.group.prime_rl_wire import (
    MAX_STATE_DICTS,
    MAX_TENSORS,
    read_description,
    read_number,
)
from rl_plane.weights.pickle_reader import MAX_PICKLE_BYTES
from tests.support.hostile_pickles import SYSTEM, Reduced, forbidden_to_run, mutated
from tests.support.prime_rl_trainer import by_dtype, description, state_dicts

MUTANTS = 6000
SEED = 20261128

TENSORS = {
    "model.embed_tokens.weight": torch.zeros(7, 3, dtype=torch.bfloat16),
    "model.norm.weight": torch.zeros(3),
    "model.scale": torch.tensor(1.0),
    **{f"model.layers.0.mlp.experts.{n}.up_proj.weight": torch.zeros(2, 3) for n in range(1200)},
    "model.layers.1.q.weight": torch.zeros(4, 3, dtype=torch.float8_e4m3fn),
}


def read(data: bytes) -> Any:
    with forbidden_to_run():
        return read_description(memoryview(data))


def refusal(data: bytes) -> str:
    with pytest.raises(InvalidWeights) as caught:
        read(data)
    assert (caught.value.facts["field"], bool(caught.value.facts["fix"])) == ("transport.format", True)
    return caught.value.message


@pytest.mark.parametrize("protocol", [4, 5])
def test_a_description_is_read_as_the_trainer_means_it(protocol: int) -> None:
    parts = state_dicts(TENSORS)
    assert [len(part) for part in parts] == [3, 1200, 1]
    for part in parts:
        data = pickle.dumps(pickle.loads(description(part)), protocol)  # noqa: S301 - the test's own
        found = read(data)
        assert [[name for name, _ in bucket] for bucket in found] == [
            [name for name, _ in some] for some in by_dtype(part).values()
        ]
        for bucket in found:
            for name, spec in bucket:
                assert spec.shape == tuple(part[name].shape)
                assert spec.nbytes == part[name].nbytes
    (bf16, f32) = read(description(parts[0]))
    assert bf16 == [("model.embed_tokens.weight", TensorSpec("BF16", (7, 3)))]
    assert f32[1] == ("model.scale", TensorSpec("F32", ()))


def test_an_empty_state_dict_gives_no_tensors() -> None:
    assert read(pickle.dumps({})) == []


SIZE = torch.Size([2])


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([("a", SIZE, 2)], "instead of a dict"),
        ({"float32": [("a", SIZE, 2)]}, "instead of tensors for a dtype"),
        ({torch.float32: []}, "instead of tensors for a dtype"),
        ({torch.float32: (("a", SIZE, 2),)}, "instead of tensors for a dtype"),
        ({torch.complex64: [("a", SIZE, 2)]}, "'complex64'"),
        ({torch.float32: [("a", [2], 2)]}, "instead of (name, shape"),
        ({torch.float32: [("a", (2,), 2)]}, "instead of (name, shape"),
        ({torch.float32: [("a", SIZE, True)]}, "instead of (name, shape"),
        ({torch.float32: [("a", SIZE, 3)]}, "3 elements of a"),
        ({torch.float32: [("a", SIZE, -2)]}, "-2 elements of a"),
        ({torch.float32: [("a", SIZE)]}, "instead of (name, shape"),
        ({torch.float32: [("a b", SIZE, 2)]}, "name that no tensor"),
        ({torch.float32: [("a", SIZE, 2), ("a", SIZE, 2)]}, "the tensor a twice"),
        ({torch.float32: [("a", SIZE, 2)], torch.int8: [("a", SIZE, 2)]}, "the tensor a twice"),
        ({torch.float32: [("a", Reduced(torch.Size, ((-2,),)), 2)]}, "a shape that no weight"),
        ({torch.float32: [("a", torch.zeros(2), 2)]}, "not part of a tensor"),
        ({torch.float32: Reduced(os.system, ("touch /tmp/owned",))}, "'posix' 'system'"),
        (Reduced(eval, ("1",)), "'builtins' 'eval'"),
        (Reduced(torch.load, ("x",)), "'torch.serialization' 'load'"),
    ],
)
def test_anything_else_is_refused_and_not_run(value: Any, words: str) -> None:
    assert words in refusal(pickle.dumps(value))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "protocol 4 or 5"),
        (b"\x80\x04.", "ends with 0 values"),
        (pickle.dumps({}) + b"x", "after the end"),
        (pickle.dumps({torch.float32: [("a", SIZE, 2)]})[:-3], "frame ends"),
        (b"\x80\x04" + SYSTEM + b"\x8c\x02id\x85R.", "'os' 'system'"),
        (b"\x80\x04cos\nsystem\n\x8c\x02id\x85R.", "opcode 'c'"),
        (b"\x80\x04}\x8c\x05torch\x8c\x04Size\x93Ns.", "as a key"),
        (b"\x80\x04}K\x01Ns.", "as a key"),
        (b"\x80\x04]" + b"]" * MAX_PICKLE_BYTES, "at most"),
    ],
)
def test_bytes_that_are_no_description_are_refused(data: bytes, words: str) -> None:
    assert words in refusal(data)


def test_too_many_tensors_are_refused() -> None:
    one = torch.zeros(1)
    message = refusal(description({f"t{number}": one for number in range(MAX_TENSORS + 1)}))
    assert f"more than {MAX_TENSORS} tensors" in message


def test_a_number_outside_its_range_is_refused() -> None:
    assert read_number(memoryview((7).to_bytes(8, "little")), MAX_STATE_DICTS, "the number") == 7
    for number in (0, -1, MAX_STATE_DICTS + 1, 1 << 62):
        with pytest.raises(InvalidWeights, match="as the number"):
            read_number(memoryview(number.to_bytes(8, "little", signed=True)), MAX_STATE_DICTS, "the number")


def test_changed_descriptions_are_tensors_or_refused() -> None:
    good = [description(part) for part in state_dicts({**TENSORS, "model.layers.2.a": torch.zeros(2, 2, 2, 2)})]
    good = [one for one in good if len(one) < 4000]
    chance, refused = random.Random(SEED), 0
    with forbidden_to_run():
        for _ in range(MUTANTS):
            try:
                found = read_description(memoryview(mutated(chance.choice(good), chance)))
            except InvalidWeights:
                refused += 1
            else:
                names = [name for bucket in found for name, _ in bucket]
                assert len(names) == len(set(names))
    assert MUTANTS // 2 < refused < MUTANTS, "some mutants are refused, and some are tensors all the same"
