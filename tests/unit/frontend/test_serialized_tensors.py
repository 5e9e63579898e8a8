"""The reader of SGLang's serialized tensors: what it takes, what it refuses, and that nothing runs."""

from __future__ import annotations

import io
import os
import pickle
import random
import struct
from copyreg import _extension_registry, add_extension, remove_extension  # type: ignore[attr-defined]
from typing import Any

import pytest

from frontend.dialects.sglang import serialized_tensors
from frontend.dialects.sglang.serialized_tensors import (
    MAX_ELEMENTS,
    MAX_NESTED,
    MAX_TENSORS,
    NEMO_RL,
    described,
    read_shared,
)
from rl_plane.errors import InvalidRequest, PlaneError, Unsupported
from rl_plane.protocol.shared_tensors import GpuCopies, GpuMemory, NamedMemory
from rl_plane.protocol.update_requests import Part
from rl_plane.weights.pickle_reader import MAX_MARKS, MAX_OPCODES, MAX_PICKLE_BYTES, MAX_STACK
from tests.support.hostile_pickles import SYSTEM, Reduced, forbidden_to_run, mutated
from tests.support.pickled_tensors import (
    bucket,
    cpu_tensor,
    cuda_tensor,
    instance,
    listed,
    named,
    of_ranks,
    pickled,
    shape,
)

MUTANTS = 10_000
SEED = 20261127


UNSORTABLE = b"}(\x8c\x05torch\x8c\x07float32\x93K\x01\x8c\x01aK\x02u"
"""A map whose keys are a dtype and a text."""
LOCAL = (
    b"\x8c\x40sglang.srt.model_executor.model_runner_components.weight_updater\x8c\x15LocalSerializedTensor\x93"
)


def refusal(data: bytes, load_format: str | None = None) -> PlaneError:
    with forbidden_to_run(), pytest.raises(PlaneError) as caught:
        read_shared([data], load_format)
    assert caught.value.facts["field"].startswith("serialized_named_tensors")
    assert caught.value.facts["fix"]
    return caught.value


def test_the_guard_of_these_tests_sees_what_an_unpickler_does() -> None:
    with pytest.raises(AssertionError), forbidden_to_run():
        pickle.loads(pickle.dumps(os.getcwd))  # noqa: S301 - the test's own


def test_a_list_of_tensors_gives_the_memory_of_each() -> None:
    data = listed(
        [("a.weight", cpu_tensor((2, 3), "bfloat16", 12)), ("b", cpu_tensor((), "float32", 4, number=2))]
    )
    found = read_shared([data, data], None)
    (name, first), (_, scalar) = found.tensors
    assert (name, first.spec.dtype, first.spec.shape) == ("a.weight", "BF16", (2, 3))
    assert first.memory == NamedMemory(name="torch_7_11_1", nbytes=12)
    assert (first.start, first.strides, scalar.spec.shape) == (0, None, ())
    assert len(found.shared) == 4, "torch has counted each element's own use"
    part = Part.model_validate(described(found))
    assert (part.names, part.dtypes, part.shapes) == (["a.weight", "b"], ["BF16", "F32"], [[2, 3], []])
    assert [one.memory for one in part.places or () if one is not None] == [0, 1]


def test_gaps_and_offsets_are_described() -> None:
    transposed = cpu_tensor((3, 2), "float32", 32, strides=(1, 3), offset=2)
    empty = cpu_tensor((0, 4), "float32", 0)
    one_row = cpu_tensor((1, 4), "float32", 16, strides=(99, 1))
    ((_, first), (_, second), (_, third)) = read_shared(
        [listed([("t", transposed), ("e", empty), ("r", one_row)])], "direct"
    ).tensors
    assert (first.start, first.strides) == (8, (1, 3))
    assert (second.memory, second.spec.nbytes) == (None, 0)
    assert third.strides is None


@pytest.mark.parametrize("module", ["sglang.srt.weight_sync.tensor_bucket", NEMO_RL])
def test_a_flattened_bucket_becomes_places_in_one_memory(module: str) -> None:
    tensors = [("a", "bfloat16", (2, 3), 0, 12), ("b", "float32", (2,), 12, 20), ("c", "int8", (0,), 20, 20)]
    data = bucket(tensors, 20, module)
    (_, first), (_, second), (_, third) = read_shared([data], "flattened_bucket").tensors
    assert (first.start, second.start, third.memory) == (0, 12, None)
    assert first.memory == second.memory == NamedMemory(name="torch_7_11_1", nbytes=20)


def test_tensors_of_several_ranks_must_agree() -> None:
    data = of_ranks([("a", [cpu_tensor((2,), "float32", 8), cpu_tensor((2,), "float32", 8, number=2)])])
    ((_, tensor),) = read_shared([data], None).tensors
    assert tensor.memory == NamedMemory(name="torch_7_11_1", nbytes=8)
    differing = of_ranks([("a", [cpu_tensor((2,), "float32", 8), cpu_tensor((1,), "float32", 8)])])
    assert "ranks have different tensors" in refusal(differing).message
    nested = of_ranks([("a", [shape((2,))])])
    assert "something else than a tensor" in refusal(nested).message


@pytest.mark.parametrize("patched", [None, "sglang.srt.utils.patch_torch", NEMO_RL])
def test_a_cuda_tensor_becomes_a_copy_for_each_gpu(patched: str | None) -> None:
    data = listed([("a", cuda_tensor((2, 2), "float16", "GPU-0a1b-22", patched=patched))])
    found = read_shared([data, listed([("a", cuda_tensor((2, 2), "float16", "GPU-0a1b-23", counted=5))])], None)
    ((_, tensor),) = found.tensors
    assert isinstance(tensor.memory, GpuMemory)
    assert (tensor.memory.gpu, tensor.memory.counter, tensor.memory.counter_offset) == (
        "GPU-0a1b-22",
        "/torch_7_11_1",
        3,
    )
    part = Part.model_validate(described(found))
    (copies,) = part.memories
    assert isinstance(copies, GpuCopies)
    assert [one.gpu for one in copies.copies] == ["GPU-0a1b-22", "GPU-0a1b-23"], "each worker reads its own GPU's"
    assert (part.unused, found.gpus) == ([], 2)
    same = listed([("a", cuda_tensor((2, 2), "float16", "GPU-0a1b-22", counted=6))])
    found = read_shared([data, same], None)
    part = Part.model_validate(described(found))
    assert [(one.gpu, one.counter_offset) for one in part.unused] == [("GPU-0a1b-22", 6)], "it is released unread"
    assert (found.gpus, read_shared([listed([("a", GOOD)])], None).gpus) == (1, 0)
    by_number = refusal(listed([("a", cuda_tensor((2, 2), "float16", 0))]))
    assert "monkey_patch_torch_reductions" in by_number.facts["fix"]


def test_elements_must_agree() -> None:
    first = listed([("a", cpu_tensor((2,), "float32", 8))])
    for other in (
        listed([("b", cpu_tensor((2,), "float32", 8))]),
        listed([("a", cpu_tensor((1,), "float32", 8))]),
        listed([("a", cpu_tensor((2,), "int32", 8))]),
        listed([("a", cpu_tensor((2,), "float32", 8)), ("b", cpu_tensor((2,), "float32", 8))]),
    ):
        with pytest.raises(InvalidRequest, match="element 1 has"):
            read_shared([first, other], None)
    with pytest.raises(InvalidRequest, match=f"at most {MAX_ELEMENTS}"):
        read_shared([first] * (MAX_ELEMENTS + 1), None)


def test_file_descriptors_are_refused_with_the_setting() -> None:
    storage = named("torch.multiprocessing.reductions", "rebuild_storage_fd")
    error = refusal(pickled(storage))
    assert isinstance(error, Unsupported)
    assert 'set_sharing_strategy("file_system")' in error.facts["fix"]


GOOD = cpu_tensor((2,), "float32", 8)

WRONG: dict[str, tuple[bytes, str]] = {
    "beyond its memory": (cpu_tensor((3,), "float32", 8), "within its memory"),
    "an offset beyond its memory": (cpu_tensor((2,), "float32", 8, offset=1), "within its memory"),
    "strides beyond its memory": (cpu_tensor((2,), "float32", 8, strides=(2,)), "within its memory"),
    "a negative stride": (cpu_tensor((2,), "float32", 8, strides=(-1,)), "stride"),
    "fewer strides": (cpu_tensor((2, 1), "float32", 8, strides=(1,)), "strides do not fit"),
    "a negative side": (cpu_tensor((-2,), "float32", 8), "shape"),
    "an endless side": (cpu_tensor((1 << 50,), "float32", 8, strides=(0,)), "shape"),
    "17 axes": (cpu_tensor((1,) * 17, "float32", 8), "shape"),
    "an unknown dtype": (cpu_tensor((2,), "complex64", 16), "'complex64'"),
    "a path as a name": (cpu_tensor((2,), "float32", 8, handle=b"/../../etc/passwd"), "without a name of torch's"),
    "another's memory": (cpu_tensor((2,), "float32", 8, handle=b"/psm_0123abcd"), "without a name of torch's"),
    "no name": (cpu_tensor((2,), "float32", 8, handle=b""), "without a name of torch's"),
    "a name that is not ASCII": (
        cpu_tensor((2,), "float32", 8, handle=b"/torch_\xff"),
        "without a name of torch's",
    ),
    "a name with a new line": (
        cpu_tensor((2,), "float32", 8, handle=b"/torch_1_2_3\n"),
        "without a name of torch's",
    ),
    "a negative size": (cpu_tensor((2,), "float32", -8), "without a name of torch's"),
    "a subclass": (cpu_tensor((2,), "float32", 8, of=("torch", "Size")), "a tensor of the class"),
    "its name alone": (named("torch", "Tensor"), "as a tensor"),
    "a number": (pickled(b"K\x05", bare=True), "as a tensor"),
}


@pytest.mark.parametrize("what", WRONG)
def test_an_impossible_tensor_is_refused(what: str) -> None:
    tensor, words = WRONG[what]
    assert words in refusal(listed([("a", tensor)])).message


@pytest.mark.parametrize(
    ("data", "load_format", "words"),
    [
        (listed([("a", GOOD), ("a", GOOD)]), None, "twice"),
        (listed([("a b", GOOD)]), None, "name"),
        (listed([("x" * 600, GOOD)]), None, "name"),
        (bucket([("a", "float32", (2,), 0, 8)], 8), None, "as a tensor"),
        (listed([("a", GOOD)]), "flattened_bucket", "no flattened bucket"),
        (bucket([("a", "float32", (2,), 4, 12)], 8), "flattened_bucket", "not where it says"),
        (bucket([("a", "float32", (2,), 0, 4)], 8), "flattened_bucket", "not where it says"),
        (bucket([("a", "float32", (2,), -4, 4)], 8), "flattened_bucket", "not where it says"),
        (b"", None, "protocol 4 or 5"),
        (b"\x80\x02]q\x00.", None, "protocol 4 or 5"),
        (b"\x80\x04.", None, "ends with 0 values"),
        (listed([("a", GOOD)])[:-1], None, "ends too early"),
        (listed([("a", GOOD)]) + b"x", None, "after the end"),
        (b"\x80\x04" + b"]" * (MAX_STACK + 1) + b".", None, "on its stack"),
        (b"\x80\x04" + b"(" * (MAX_MARKS + 1) + b".", None, "open marks"),
        (b"\x80\x04" + b"]" * MAX_PICKLE_BYTES, None, "bytes; at most"),
        (b"\x80\x04X\xff\xff\xff\xff", None, "a text of"),
        (b"\x80\x04B\xff\xff\xff\xff", None, "in one piece"),
        (b"\x80\x04\x8a\xff", None, "an integer of"),
        (b"\x80\x04\x95" + b"\xff" * 8, None, "frame"),
        (b"\x80\x04h\x07.", None, "memo"),
        (b"\x80\x04a.", None, "empty stack"),
        (b"\x80\x04t.", None, "closes a mark"),
        (b"\x80\x04}K\x01K\x01s.", None, "as a key"),
        (b"\x80\x04\x8c\x01\xff.", None, "UTF-8"),
        (b"\x80\x04" + UNSORTABLE + b".", "flattened_bucket", "no flattened bucket"),
        (b"\x80\x04" + LOCAL + b")\x81" + UNSORTABLE + b"b.", None, "other attributes"),
    ],
)
def test_a_malformed_pickle_is_refused_with_the_reason(data: bytes, load_format: str | None, words: str) -> None:
    assert words in refusal(data, load_format).message


def test_too_many_tensors_or_nested_pickles_are_refused() -> None:
    many = [(f"t{number}", GOOD) for number in range(MAX_TENSORS + 1)]
    assert len(read_shared([listed(many[1:])], None).tensors) == MAX_TENSORS
    assert f"more than {MAX_TENSORS} tensors" in refusal(listed(many)).message
    assert f"more than {MAX_NESTED} pickles" in refusal(of_ranks([("a", [GOOD] * (MAX_NESTED + 1))])).message


# ---- attacks ----


def _extended() -> bytes:
    add_extension("os", "getcwd", 240)
    try:
        return pickle.dumps([os.getcwd], 4)
    finally:
        remove_extension("os", "getcwd", 240)
        assert ("os", "getcwd") not in _extension_registry


def _persistent() -> bytes:
    class Persistent(pickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            return "rm -rf" if isinstance(value, Reduced) else None

    out = io.BytesIO()
    Persistent(out, 4).dump([Reduced()])
    return out.getvalue()


ATTACKS: dict[str, bytes] = {
    "REDUCE of os.system": pickle.dumps(Reduced(os.system, ("touch /tmp/owned",)), 4),
    "REDUCE, protocol 0": pickle.dumps(Reduced(os.system, ("touch /tmp/owned",)), 0),
    "GLOBAL": b"\x80\x04cos\nsystem\n\x8c\x02id\x85R.",
    "STACK_GLOBAL": b"\x80\x04" + SYSTEM + b"\x8c\x02id\x85R.",
    "STACK_GLOBAL of a method": b"\x80\x04\x8c\x05torch\x8c\x0fTensor.__class__\x93.",
    "a callable of torch": b"\x80\x04\x8c\x05torch\x8c\x04load\x93\x8c\x01x\x85R.",
    "torch.hub": b"\x80\x04\x8c\x09torch.hub\x8c\x04load\x93\x8c\x01x\x85R.",
    "a gadget of sglang": b"\x80\x04\x8c\x17sglang.srt.utils.common\x8c\x0edynamic_import\x93\x8c\x01x\x85R.",
    "functools.partial": b"\x80\x04\x8c\x09functools\x8c\x07partial\x93)R.",
    "builtins": pickle.dumps(Reduced(eval, ("__import__('os').system('id')",)), 4),
    "INST": b"\x80\x04(\x8c\x02idios\nsystem\n.",
    "OBJ": b"\x80\x04(" + SYSTEM + b"\x8c\x02ido.",
    "NEWOBJ": b"\x80\x04" + SYSTEM + b")\x81.",
    "NEWOBJ of a class that has none": b"\x80\x04\x8c\x05torch\x8c\x06Tensor\x93)\x81.",
    "NEWOBJ_EX": b"\x80\x04" + SYSTEM + b")}\x92.",
    "BUILD of a class": b"\x80\x04\x8c\x05torch\x8c\x06Tensor\x93}\x8c\x01a\x8c\x01bsb.",
    "BUILD of a list": b"\x80\x04]}b.",
    "BUILD of other attributes": instance(
        "sglang.srt.weight_sync.tensor_bucket", "FlattenedTensorMetadata", {"__class__": b"K\x01"}
    ),
    "EXT1": _extended(),
    "EXT2": b"\x80\x04\x83\x01\x02.",
    "EXT4": b"\x80\x04\x84\x01\x02\x03\x04.",
    "PERSID": b"\x80\x04Pid\n.",
    "BINPERSID": _persistent(),
    "REDUCE of a text": b"\x80\x04\x8c\x02os)R.",
    "REDUCE of a class": b"\x80\x04\x8c\x05torch\x8c\x06Tensor\x93)R.",
    "REDUCE with a list": b"\x80\x04\x8c\x05torch\x8c\x04Size\x93]R.",
    "a set": pickle.dumps({1, 2}, 4),
    "a float": pickle.dumps([1.5], 4),
    "a buffer": b"\x80\x05\x97.",
    "a bytearray": pickle.dumps(bytearray(b"x"), 5),
    "a text of 8 bytes of length": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 60),
    "a pickle of a pickle": pickle.dumps([("a", pickle.dumps(Reduced(os.system, ("id",))))], 4),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_known_attack_runs_nothing(attack: str) -> None:
    for load_format in serialized_tensors.FORMATS:
        refusal(ATTACKS[attack], load_format)
    refusal(of_ranks([("a", [ATTACKS[attack]])]))


def test_an_attack_after_good_tensors_is_refused() -> None:
    """The refusal comes at the opcode, so nothing of the tensors before it is used."""
    good = listed([("a", GOOD)])
    for attack in ATTACKS.values():
        refusal(good[:-1] + attack[2:])


def _doubled(layer: bytes) -> bytes:
    """Each layer refers twice to the one before: 2**200 leaves, in a few hundred bytes."""
    layers = b"".join(layer.replace(b"#", bytes([number])) for number in range(200))
    return b"\x80\x04K\x01\x94" + layers + b"."


@pytest.mark.parametrize("layer", [b"h#h#\x86\x94", b"]h#ah#a\x94"])
def test_a_memo_bomb_is_refused(layer: bytes) -> None:
    refusal(_doubled(layer))
    refusal(listed([("a", _doubled(layer)[2:-1])]))
    key = b"\x80\x04}" + _doubled(layer)[2:-1] + b"K\x01s."
    refusal(key)  # hashing it would take forever


def test_a_list_that_contains_itself_is_refused() -> None:
    refusal(b"\x80\x04]\x94h\x00a.")
    refusal(b"\x80\x04]\x94(h\x00h\x00\x86h\x00h\x00\x86e.")


# ---- fuzz ----


def _good() -> list[tuple[bytes, str | None]]:
    return [
        (listed([(f"layer.{number}.weight", cpu_tensor((2, 3), "bfloat16", 12)) for number in range(3)]), None),
        (listed([("a", cuda_tensor((2, 2), "float16", "GPU-0a1b-22", patched=NEMO_RL))]), "direct"),
        (bucket([("a", "bfloat16", (2, 3), 0, 12), ("b", "float32", (2,), 12, 20)], 20), "flattened_bucket"),
        (of_ranks([("a", [GOOD, GOOD])]), None),
        *((attack, None) for attack in ATTACKS.values()),
    ]


def test_mutated_pickles_run_nothing_and_end() -> None:
    chance, good = random.Random(SEED), _good()
    for data, load_format in good[:4]:
        assert read_shared([data], load_format).tensors
    refused = 0
    with forbidden_to_run():
        for _ in range(MUTANTS):
            data, load_format = chance.choice(good)
            mutant = mutated(data, chance)
            try:
                found = read_shared([mutant], chance.choice([load_format, *serialized_tensors.FORMATS]))
            except PlaneError:
                refused += 1
            else:
                Part.model_validate(described(found))
    assert MUTANTS // 2 < refused < MUTANTS, "some mutants are refused, and some are tensors all the same"


def test_the_work_of_a_hostile_pickle_is_bounded() -> None:
    """The opcodes bound the time, each of which does a bounded step."""
    good = listed([(f"t{number}", GOOD) for number in range(MAX_OPCODES // 1500)])
    assert read_shared([good] * 4, None).tensors
    with pytest.raises(InvalidRequest, match=f"{MAX_OPCODES} opcodes in the pickles of one call"):
        read_shared([good] * 64, None)
    endless = b"\x80\x04]\x94" + b"h\x00a" * (MAX_OPCODES // 2) + b"."
    assert f"{MAX_OPCODES} opcodes" in refusal(endless).message
