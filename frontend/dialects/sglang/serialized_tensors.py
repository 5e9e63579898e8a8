"""Reads what SGLang's `MultiprocessingSerializer` makes of tensors: where each tensor lies, as plain values.

A trainer sends one element for each tensor-parallel rank of an engine. Each is the pickle of one of these:

| `load_format` | pickled |
|---|---|
| null, `direct` | a list of (name, tensor) or (name, LocalSerializedTensor); of an adapter also `{name: tensor}` |
| `flattened_bucket` | `{"flattened_tensor": tensor, "metadata": [FlattenedTensorMetadata, …]}` |

A LocalSerializedTensor has the pickle of one tensor for each rank.

A pickled tensor contains no bytes of the weights. It names memory that its process shares. `pickle_reader` says why
reading it runs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from pydantic import ValidationError

from frontend.dialects.common.shared_tensor import (
    DEVICE,
    GPU_ARGUMENTS,
    REDUCTIONS,
    STORAGE,
    STORAGES,
    TENSORS,
    SharedTensor,
    check_class,
    gpu_tensor,
    tensor_in,
)
from rl_plane.errors import InvalidRequest, Unsupported
from rl_plane.protocol.shared_tensors import GpuCopies, GpuMemory, NamedMemory
from rl_plane.protocol.versions import DTYPE_BYTES, TensorSpec, checked_name
from rl_plane.weights.pickle_reader import (
    Budget,
    ForbiddenPickle,
    Name,
    Record,
    UnreadablePickle,
    kind_of,
    read_pickle,
)
from rl_plane.weights.pickled_torch import DTYPES, SIZE, Dtype, Size, checked

FIELD = "serialized_named_tensors"
LISTED = (None, "direct")
FLATTENED = "flattened_bucket"
FORMATS = (*LISTED, FLATTENED)

NEMO_RL = "nemo_rl.models.generation.sglang.utils.train_utils"
"""The module of NeMo-RL's own copies of SGLang's classes and functions."""

MAX_TENSORS = 8192
"""Tensors in one call, twice what one message to a worker describes."""
MAX_ELEMENTS = 64
"""Elements of one call: the ranks of one engine."""
MAX_NESTED = MAX_TENSORS
"""Pickles within one pickle: the values of all its LocalSerializedTensors."""

SHARING_FIX = 'call torch.multiprocessing.set_sharing_strategy("file_system") in the trainer, or send CUDA tensors'
ANOTHER_WAY = 'send tensors as SGLang\'s trainers do, or a safetensors file (load_format "safetensors")'


@dataclass(frozen=True, slots=True)
class SharedTensors:
    """The tensors of one call, and the memory that its trainer has shared for it."""

    tensors: tuple[tuple[str, SharedTensor], ...]
    """The tensors of the first element, in their order."""
    shared: tuple[NamedMemory | GpuMemory, ...]
    """Each time that the trainer has shared memory in this call, for all elements. Torch counts each time."""
    others: tuple[tuple[tuple[str, SharedTensor], ...], ...] = ()
    """The tensors of the other elements, which are like those of the first."""

    @property
    def gpus(self) -> int:
        """The number of GPUs that have a copy of every tensor. 0: the tensors are not on GPUs."""
        counts = {
            len(one.copies) if isinstance(one, GpuCopies) else 1
            for one in _memories(self).values()
            if not isinstance(one, NamedMemory)
        }
        return min(counts, default=0)


def read_shared(payloads: Sequence[bytes | bytearray | memoryview], load_format: str | None) -> SharedTensors:
    """Reads the elements of one call. The trainers that are known send the same whole tensors to each rank of an
    engine, so the first element is used. The others must agree with it.

    Raises:
        InvalidRequest: an element is anything else than a pickle of these shapes, or the elements differ.
        Unsupported: the tensors are of a kind that can't be opened here.
    """
    if len(payloads) > MAX_ELEMENTS:
        _refuse(
            f"{len(payloads)} elements; at most {MAX_ELEMENTS} are read", "send one for each rank of one engine"
        )
    shared: list[NamedMemory | GpuMemory] = []
    found: list[tuple[tuple[str, SharedTensor], ...]] = []
    budget = Budget()
    for number, payload in enumerate(payloads):
        try:
            found.append(tuple(_Element(shared, budget).read(payload, load_format)))
        except ForbiddenPickle as refusal:
            raise Unsupported(str(refusal), field=f"{FIELD}.{number}", fix=refusal.fix) from None
        except UnreadablePickle as refused:
            raise InvalidRequest(
                f"it has {refused}. Only pickles of shared tensors are read, and nothing in them is run",
                field=f"{FIELD}.{number}",
                fix=ANOTHER_WAY,
            ) from None
    for number, one in enumerate(found[1:], 1):
        for (name, first), (other, tensor) in zip(found[0], one, strict=False):
            if name != other or first.spec != tensor.spec:
                _refuse(
                    f"element {number} has {other} as {_spec_text(tensor.spec)}, and the first has {name} as "
                    f"{_spec_text(first.spec)}",
                    "send the whole tensors to each rank: shards of a rank are not read",
                )
        if len(one) != len(found[0]):
            _refuse(
                f"element {number} has {len(one)} tensors, and the first has {len(found[0])}",
                "send the same tensors to each rank",
            )
    return SharedTensors(found[0], tuple(shared), tuple(found[1:]))


def described(found: SharedTensors) -> dict[str, Any]:
    """The fields of a part of an update (`rl_plane.protocol.update_requests.Part`) that bring these tensors."""
    tensors = [one for _, one in found.tensors]
    memories = _memories(found)
    numbers = {memory: number for number, memory in enumerate(memories)}
    places = [
        None
        if one.memory is None
        else {"memory": numbers[one.memory], "start": one.start, "strides": one.strides and list(one.strides)}
        for one in tensors
    ]
    read = {copy for one in memories.values() if isinstance(one, GpuCopies) for copy in one.copies} | set(memories)
    return {
        "names": [name for name, _ in found.tensors],
        "dtypes": [one.spec.dtype for one in tensors],
        "shapes": [list(one.spec.shape) for one in tensors],
        "memories": [one.model_dump() for one in memories.values()],
        "places": places,
        "unused": [one.model_dump() for one in found.shared if isinstance(one, GpuMemory) and one not in read],
    }


def _memories(found: SharedTensors) -> dict[NamedMemory | GpuMemory, NamedMemory | GpuMemory | GpuCopies]:
    """Each memory of the first element → that memory, or its copies where each element is on a GPU of its own."""
    ranks: dict[NamedMemory | GpuMemory, tuple[NamedMemory | GpuMemory | None, ...]] = {}
    alike = True
    for number, (_, first) in enumerate(found.tensors):
        if first.memory is None:
            continue
        others = [element[number][1] for element in found.others]
        alike &= all((one.start, one.strides) == (first.start, first.strides) for one in others)
        group = (first.memory, *(one.memory for one in others))
        alike &= ranks.setdefault(first.memory, group) == group
    result: dict[NamedMemory | GpuMemory, NamedMemory | GpuMemory | GpuCopies] = {}
    for memory, group in ranks.items():
        copies = [one for one in group if isinstance(one, GpuMemory)]
        apart = len(copies) == len(group) == len({one.gpu for one in copies})
        result[memory] = GpuCopies(copies=copies) if alike and apart and len(group) > 1 else memory
    return result


def _spec_text(spec: TensorSpec) -> str:
    return f"{spec.dtype} {list(spec.shape)}"


def _refuse(what: str, fix: str) -> NoReturn:
    raise InvalidRequest(what, field=FIELD, fix=fix)


# ---- the values that names stand for ----


@dataclass(frozen=True, slots=True, eq=False)
class _Storage:
    memory: NamedMemory | None


@dataclass(frozen=True, slots=True, eq=False)
class _TypedStorage:
    memory: NamedMemory | None
    dtype: Dtype


class _Element:
    """Reads one element. `shared` collects the memory that its trainer has shared for it."""

    def __init__(self, shared: list[NamedMemory | GpuMemory], budget: Budget) -> None:
        self._shared = shared
        self._budget = budget
        self._nested = 0
        self._names: dict[tuple[str, str], Any] = DTYPES | {
            (one.module, one.name): one
            for one in (
                *_CLASSES,
                Name(REDUCTIONS, "rebuild_storage_filename", self._named_storage),
                Name(REDUCTIONS, "rebuild_cuda_tensor", self._gpu_tensor),
                *(
                    Name(module, "_rebuild_cuda_tensor_modified", self._gpu_tensor)
                    for module in ("sglang.srt.utils.patch_torch", "sglang.srt.patch_torch", NEMO_RL)
                ),
            )
        }

    def read(
        self, payload: bytes | bytearray | memoryview, load_format: str | None
    ) -> Iterator[tuple[str, SharedTensor]]:
        value = self._read(payload)
        found = self._bucket(value) if load_format == FLATTENED else self._list(value)
        names = set[str]()
        for name, tensor in found:
            if type(name) is not str or not checked_name(name):
                raise UnreadablePickle(f"a tensor whose name is {kind_of(name)} that no tensor can have")
            if name in names:
                raise UnreadablePickle(f"the tensor {name} twice")
            if len(names) == MAX_TENSORS:
                raise UnreadablePickle(f"more than {MAX_TENSORS} tensors")
            names.add(name)
            yield name, tensor

    def _read(self, payload: bytes | bytearray | memoryview) -> Any:
        return read_pickle(memoryview(payload), self._names, _FORBIDDEN, self._budget)

    # ---- the shapes of an element ----

    def _list(self, value: Any) -> Iterator[tuple[Any, SharedTensor]]:
        if type(value) is dict:
            value = list(value.items())
        if type(value) is not list:
            raise UnreadablePickle(
                f"{kind_of(value)} where load_format null or direct has a list of (name, tensor)"
            )
        for pair in value:
            if type(pair) not in (tuple, list) or len(pair) != 2:
                raise UnreadablePickle(f"{kind_of(pair)} where a list has (name, tensor)")
            name, tensor = pair
            if type(tensor) is Record and tensor.of is _LOCAL:
                tensor = self._local(tensor)
            if type(tensor) is not SharedTensor:
                raise UnreadablePickle(f"{kind_of(tensor)} as a tensor")
            yield name, tensor

    def _local(self, record: Record) -> SharedTensor:
        """The tensor of the first rank. Those of the other ranks must be like it."""
        values = record.fields.get("values")
        if type(values) is not list or not values or any(type(one) is not bytes for one in values):
            raise UnreadablePickle("a LocalSerializedTensor without a list of bytes")
        self._nested += len(values)
        if self._nested > MAX_NESTED:
            raise UnreadablePickle(f"more than {MAX_NESTED} pickles in a pickle")
        tensors = [self._read(one) for one in values]
        if any(type(one) is not SharedTensor for one in tensors):  # so no pickle is nested deeper
            raise UnreadablePickle("a LocalSerializedTensor of something else than a tensor")
        first: SharedTensor = tensors[0]
        if any(one.spec != first.spec for one in tensors):
            raise UnreadablePickle("a LocalSerializedTensor whose ranks have different tensors")
        return first

    def _bucket(self, value: Any) -> Iterator[tuple[Any, SharedTensor]]:
        if type(value) is not dict or value.keys() != {"flattened_tensor", "metadata"}:
            raise UnreadablePickle(f"{kind_of(value)} that is no flattened bucket")
        whole, metadata = value["flattened_tensor"], value["metadata"]
        if type(whole) is not SharedTensor or len(whole.spec.shape) != 1 or whole.strides is not None:
            raise UnreadablePickle("a flattened_tensor that is not one contiguous tensor with one axis")
        if type(metadata) is not list:
            raise UnreadablePickle(f"{kind_of(metadata)} as metadata")
        for one in metadata:
            if type(one) is not Record or one.of not in _METADATA:
                raise UnreadablePickle(f"{kind_of(one)} as metadata of a tensor")
            yield one.fields.get("name"), _of_bucket(whole, one)

    # ---- calls ----

    def _named_storage(self, arguments: tuple[Any, ...]) -> _Storage:
        """`rebuild_storage_filename(cls, manager, handle, size)`"""
        of, manager, handle, size = checked("a shared storage", arguments, Name, bytes, bytes, int)
        if of is not STORAGE or not manager:
            raise UnreadablePickle(f"a storage of {of}")
        try:
            memory = NamedMemory(name=handle.decode("ascii").removeprefix("/"), nbytes=size)
        except (UnicodeDecodeError, ValidationError):
            raise UnreadablePickle(
                "shared memory without a name of torch's, such as /torch_1_2_3, and a size"
            ) from None
        self._shared.append(memory)
        return _Storage(memory)

    def _gpu_tensor(self, arguments: tuple[Any, ...]) -> SharedTensor:
        """`rebuild_cuda_tensor(…)` with its 15 arguments"""
        if len(arguments) == GPU_ARGUMENTS and type(arguments[DEVICE]) is int:
            raise ForbiddenPickle(
                "a CUDA tensor names its GPU by a number, which may mean another GPU here",
                "call sglang.srt.utils.patch_torch.monkey_patch_torch_reductions() in the trainer first",
            )
        tensor = gpu_tensor(arguments, None)
        if tensor.memory is not None:
            self._shared.append(tensor.memory)
        return tensor


def _empty_storage(arguments: tuple[Any, ...]) -> _Storage:
    (of,) = checked("an empty storage", arguments, Name)
    if of is not STORAGE:
        raise UnreadablePickle(f"a storage of {of}")
    return _Storage(None)


def _typed_storage(arguments: tuple[Any, ...]) -> _TypedStorage:
    storage, dtype = checked("a typed storage", arguments, _Storage, Dtype)
    return _TypedStorage(storage.memory, dtype)


def _cpu_tensor(arguments: tuple[Any, ...]) -> SharedTensor:
    """`rebuild_tensor(cls, storage, (offset, size, strides, requires_grad))`"""
    of, storage, metadata = checked("a tensor", arguments, Name, _TypedStorage, tuple)
    check_class(of)
    offset, size, strides, _ = checked("a tensor's shape", metadata, int, Size, tuple, bool)
    return tensor_in(storage.dtype, size, strides, offset, storage.memory)


def _of_bucket(whole: SharedTensor, one: Record) -> SharedTensor:
    """A tensor of a flattened bucket. `start_idx` and `end_idx` count elements of the bucket."""
    fields = one.fields
    size, dtype, first, end = (fields.get(name) for name in ("shape", "dtype", "start_idx", "end_idx"))
    if type(size) is not Size or type(dtype) is not Dtype or type(first) is not int or type(end) is not int:
        raise UnreadablePickle("metadata of a tensor with values of another kind")
    spec, width = TensorSpec(dtype.name, size.sides), DTYPE_BYTES[whole.spec.dtype]
    if not 0 <= first <= end <= whole.spec.shape[0] or (end - first) * width != spec.nbytes:
        raise UnreadablePickle("metadata of a tensor that is not where it says in its bucket")
    if spec.nbytes == 0:
        return SharedTensor(spec, None, 0, None)
    return SharedTensor(spec, whole.memory, whole.start + first * width, None)


_METADATA_FIELDS = ("name", "shape", "dtype", "start_idx", "end_idx", "numel")
_METADATA = tuple(
    Name(module, "FlattenedTensorMetadata", fields=_METADATA_FIELDS)
    for module in ("sglang.srt.weight_sync.tensor_bucket", NEMO_RL)
)
_LOCAL = Name(
    "sglang.srt.model_executor.model_runner_components.weight_updater",
    "LocalSerializedTensor",
    fields=("values",),
)
_CLASSES = (
    *STORAGES,
    *TENSORS,
    *_METADATA,
    _LOCAL,
    SIZE,
    Name(REDUCTIONS, "rebuild_storage_empty", _empty_storage),
    Name(REDUCTIONS, "rebuild_typed_storage", _typed_storage),
    Name(REDUCTIONS, "rebuild_tensor", _cpu_tensor),
)

_FORBIDDEN = {
    (REDUCTIONS, "rebuild_storage_fd"): ForbiddenPickle(
        "the tensors are shared by file descriptors, which only a child of the trainer can get", SHARING_FIX
    ),
}
