"""The trainer's own copy of the version that it published last: what the next one is compared with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field

from rl_plane.protocol.versions import (
    DTYPE_BYTES,
    HostTensor,
    TensorSpec,
    config_line,
    tensor_digest,
    tensors_digest,
)
from rl_plane.publish.sources.base import Taken
from rl_plane.transports.packing import Tensor, copy_into, in_order, raw_bytes
from rl_plane.weights import delta_codec
from rl_plane.weights.read_ahead import host_memory

TRIES = 3
"""After so many versions in a row that were compared and went whole all the same, `auto` leaves it, """
AGAIN = 32
"""and looks again after so many more."""

Named = Iterator[tuple[str, HostTensor]]


@dataclass(frozen=True, slots=True)
class Change:
    """From the version that the copy held to the one that it holds."""

    digest: str
    base: str | None = None
    """None: there was nothing to compare with."""
    deltas: Mapping[str, bytes] | None = None
    """By tensor, of those that have changed. None: they don't pay."""
    before: Mapping[str, str] = field(default_factory=dict)
    """The tensors' digests in `base`."""


class HostCopy:
    """As much memory as the weights take. For one thread at a time."""

    def __init__(self) -> None:
        self.digest: str | None = None
        """Of the version that it holds; None: of none."""
        self.chain_bytes = 0
        """Of the deltas since the last version that went whole."""
        self.in_vain = 0
        """So many versions in a row went whole though they were compared, or, after TRIES, without."""
        self.specs: dict[str, TensorSpec] = {}
        self._places: dict[str, memoryview] = {}
        self._digests: dict[str, str] = {}
        self._adapter_config: bytes | None = None
        self._half_changed = False
        """Ctrl-C, say, came while a tensor was changed."""

    def read(self, taken: Taken) -> Change:
        """Brings a version in, and says what is other than before. When this raises, the copy is as it was, or of no
        version."""
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
                    copy_into(self._places[name], tensor)
                else:
                    blob = self._compared(name, tensor, threads)
                    if blob is None:
                        continue  # its digest is known
                    deltas[name] = blob
                    room -= len(blob)
                    if room < 0:
                        deltas = None  # what was applied so far stays: only the way back is gone
                self._digests[name] = tensor_digest(self._places[name])
        except BaseException:
            if deltas is not None and not self._half_changed:
                self._take_back(deltas)
                self.digest, self._digests = base, before
            raise
        finally:
            threads.shutdown()
        self._adapter_config = taken.adapter_config
        lines = [(name, spec, self._digests[name]) for name, spec in specs.items()]
        if taken.adapter_config is not None:
            lines.append(config_line(taken.adapter_config))
        self.digest = tensors_digest(lines)
        if deltas is None:
            return Change(self.digest, base)
        if not deltas:  # a version is never of no tensors
            name, spec = taken.specs[0]
            deltas[name] = delta_codec.nothing(spec.nbytes, DTYPE_BYTES[spec.dtype])
        return Change(self.digest, base, deltas, before)

    def make_room(self, taken: Taken) -> None:
        """For a version of these tensors. MemoryError or OSError: there is none."""
        specs = dict(taken.specs)
        if specs != self.specs:
            self.drop()  # before the new ones: there is room for one
            self._places = {name: host_memory(spec.nbytes) for name, spec in specs.items()}
            self.specs = specs

    def _compared(self, name: str, tensor: Tensor, threads: Executor) -> bytes | None:
        place, width = self._places[name], DTYPE_BYTES[self.specs[name].dtype]
        blob = delta_codec.encode(place, raw_bytes(tensor), width, threads)
        if blob is not None:
            self._half_changed = True
            delta_codec.apply(blob, place, width, name)
            self._half_changed = False
        return blob

    def is_tried(self) -> bool:
        """Asked for each version: is it to be compared?"""
        if self.in_vain >= TRIES:
            self.in_vain += 1
        if self.in_vain > TRIES + AGAIN:
            self.in_vain = TRIES - 1
        return self.in_vain < TRIES

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.specs.values())

    def forget(self) -> None:
        """The next version is compared with none, and so goes whole."""
        self.digest = None

    def drop(self) -> None:
        """Frees the memory, too."""
        self.forget()
        self.specs = {}
        self._places = {}

    def take_back(self, change: Change) -> None:
        """It was not committed."""
        self.digest = None
        if change.deltas is not None:
            self._take_back(change.deltas)
            self.digest, self._digests = change.base, dict(change.before)

    def _take_back(self, deltas: Mapping[str, bytes]) -> None:
        for name, blob in deltas.items():
            delta_codec.apply(blob, self._places[name], DTYPE_BYTES[self.specs[name].dtype], name)

    def whole(self) -> Taken:
        """The version that it holds."""
        tensors = {name: HostTensor(spec, self._places[name]) for name, spec in self.specs.items()}
        return Taken(list(self.specs.items()), iter(tensors.items()), self._adapter_config, held=tensors)


def as_tensors(deltas: Mapping[str, bytes]) -> Taken:
    """Deltas, as they travel."""
    tensors = {name: HostTensor(TensorSpec("U8", (len(blob),)), memoryview(blob)) for name, blob in deltas.items()}
    return Taken([(name, tensor.spec) for name, tensor in tensors.items()], iter(tensors.items()))
