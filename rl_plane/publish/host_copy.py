"""The publisher's own copy of the version that it published last, with which the next version is compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field

from rl_plane.protocol.versions import (
    DEFAULT_ALGORITHM,
    DTYPE_BYTES,
    DigestAlgorithm,
    HostTensor,
    TensorSpec,
    tensor_digest,
    tensors_digest,
)
from rl_plane.publish.sources.base import Taken
from rl_plane.transports.packing import Tensor, copy_digested, in_order, raw_bytes
from rl_plane.weights import delta_codec
from rl_plane.weights.read_ahead import host_memory

TRIES = 3
"""After so many versions in a row that were compared and sent in full all the same, `auto` stops comparing."""
AGAIN = 32
"""After so many further versions it compares one again."""

Named = Iterator[tuple[str, HostTensor]]


@dataclass(frozen=True, slots=True)
class Change:
    """The difference between the version that the copy held before and the version that it holds now."""

    digest: str
    base: str | None = None
    """The digest of the version before; None if the copy held none."""
    deltas: Mapping[str, bytes] | None = None
    """Tensor name to delta, for tensors that have changed. None: together the deltas are too large to pay."""
    before: Mapping[str, str] = field(default_factory=dict)
    """The digests of the tensors in `base`."""
    sizes: Mapping[str, int] | None = None
    """The length of each delta. If several ranks have copies: of the deltas of all ranks. None: see `deltas`."""


class HostCopy:
    """A copy of one version in host memory, as large as the weights. For one thread at a time."""

    def __init__(self, algorithm: DigestAlgorithm = DEFAULT_ALGORITHM) -> None:
        """`algorithm`: that of the digests."""
        self.digest: str | None = None
        """The digest of the version that the copy holds; None if it holds none."""
        self.chain_bytes = 0
        """The size of the deltas since the last full version, in bytes."""
        self.in_vain = 0
        """The number of versions in a row that were compared and sent in full; beyond TRIES it counts versions not
        compared."""
        self.specs: dict[str, TensorSpec] = {}
        self._algorithm: DigestAlgorithm = algorithm
        self._places: dict[str, memoryview] = {}
        self._digests: dict[str, str] = {}
        self._adapter_config: bytes | None = None
        self._half_changed = False
        """An error, such as Ctrl-C, came while a tensor was being changed."""

    def read(self, taken: Taken) -> Change:
        """Copies a version in, and returns how it differs from the one before.

        After an error the copy holds the version before, or none.
        """
        self.make_room(taken)
        specs = self.specs
        base, self.digest, self._half_changed = self.digest, None, False
        before = dict(self._digests)
        deltas: dict[str, bytes] | None = None if base is None else {}
        room = self.nbytes // 2
        threads = ThreadPoolExecutor(delta_codec.THREADS, "rl-plane-delta")
        try:
            for name, tensor in in_order(taken.specs, taken.tensors):
                if deltas is None:
                    self._digests[name] = copy_digested(self._places[name], tensor, self._algorithm)
                else:
                    blob = self._change(name, tensor, threads)
                    if blob is None:
                        continue  # the tensor has not changed
                    deltas[name] = blob
                    self._digests[name] = tensor_digest(self._places[name], self._algorithm)
                    room -= len(blob)
                    if room < 0:
                        deltas = None  # changes made so far stay, but can't be taken back
        except BaseException:
            if deltas is not None and not self._half_changed:
                self._take_back(deltas)
                self.digest, self._digests = base, before
            raise
        finally:
            threads.shutdown()
        self._adapter_config = taken.adapter_config
        lines = [(name, spec, self._digests[name]) for name, spec in specs.items()]
        self.digest = tensors_digest(lines, taken.adapter_config)
        if deltas is None:
            return Change(self.digest, base)
        if not deltas:  # a version must have at least one tensor
            name, spec = taken.specs[0]
            deltas[name] = delta_codec.nothing(spec.nbytes, DTYPE_BYTES[spec.dtype])
        return Change(self.digest, base, deltas, before, {name: len(blob) for name, blob in deltas.items()})

    def make_room(self, taken: Taken) -> None:
        """Makes room for a version of these tensors. Raises MemoryError or OSError if there is none."""
        specs = dict(taken.specs)
        if specs != self.specs:
            self.drop()  # first, since there is room for one copy
            self._places = {name: host_memory(spec.nbytes) for name, spec in specs.items()}
            self.specs = specs

    def _change(self, name: str, tensor: Tensor, threads: Executor) -> bytes | None:
        place, width = self._places[name], DTYPE_BYTES[self.specs[name].dtype]
        blob = delta_codec.encode(place, raw_bytes(tensor), width, threads)
        if blob is not None:
            self._half_changed = True
            delta_codec.apply(blob, place, width, name)
            self._half_changed = False
        return blob

    def is_tried(self) -> bool:
        """True if this version should be compared. Call it once for each version, because it counts the versions that
        are skipped."""
        if self.in_vain >= TRIES:
            self.in_vain += 1
        if self.in_vain > TRIES + AGAIN:
            self.in_vain = TRIES - 1
        return self.in_vain < TRIES

    @property
    def tensor_digests(self) -> Mapping[str, str]:
        """The digest of each tensor that the copy holds."""
        return {name: self._digests[name] for name in self.specs}

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.specs.values())

    def forget(self) -> None:
        """Makes the next version go in full: it is compared with none."""
        self.digest = None

    def drop(self) -> None:
        """Forgets the version, and frees its memory."""
        self.forget()
        self.specs = {}
        self._places = {}

    def take_back(self, change: Change) -> None:
        """Undoes `read`, because the version was not committed."""
        self.digest = None
        if change.deltas is not None:
            self._take_back(change.deltas)
            self.digest, self._digests = change.base, dict(change.before)

    def _take_back(self, deltas: Mapping[str, bytes]) -> None:
        for name, blob in deltas.items():
            delta_codec.apply(blob, self._places[name], DTYPE_BYTES[self.specs[name].dtype], name)

    def whole(self) -> Taken:
        """The version that the copy holds, for sending in full."""
        tensors = {name: HostTensor(spec, self._places[name]) for name, spec in self.specs.items()}
        return Taken(list(self.specs.items()), iter(tensors.items()), self._adapter_config, held=tensors)


def as_tensors(deltas: Mapping[str, bytes]) -> Taken:
    """Deltas as tensors of bytes, which is how they are sent."""
    return as_taken(
        {name: HostTensor(TensorSpec("U8", (len(blob),)), memoryview(blob)) for name, blob in deltas.items()}
    )


def as_taken(tensors: Mapping[str, HostTensor]) -> Taken:
    """Tensors in host memory, for sending."""
    return Taken([(name, tensor.spec) for name, tensor in tensors.items()], iter(tensors.items()))
