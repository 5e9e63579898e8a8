"""Reads one untrusted safetensors file without a framework, and writes one.

Layout: 8 bytes little-endian header length, a JSON object `name → {dtype, shape, data_offsets}`, the data. Every
claim of the header is checked against the file before a byte of data is read. The reader keeps the file open, so
replacing its path changes nothing. If the bytes of the open file change, the reader refuses the file.
"""

from __future__ import annotations

import json
import os
import secrets
import stat
import struct
import threading
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_plane.errors import EngineFailed, InvalidWeights, PlaneError, Unavailable
from rl_plane.protocol.strict_json import load_json_object
from rl_plane.protocol.versions import DTYPE_BYTES, MAX_NAME_CHARS, MAX_RANK, TensorSpec, checked_name

MAX_HEADER_BYTES = 32 << 20
"""The longest header: about 250,000 tensors. In the largest public checkpoints a file's header is under 1 MiB."""

READ_BYTES = 16 << 20
"""The bytes of one read: enough to stream, and few enough that `close` never waits long for a read."""

REWRITE = "write the file again (to another name, then rename it), and publish that"
"""The fix for an incomplete file."""

_LENGTH = struct.Struct("<Q")
_ENTRY_KEYS = frozenset({"dtype", "shape", "data_offsets"})


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The place of a tensor in a file."""

    spec: TensorSpec
    offset: int  # of its first byte, from the start of the file


def parse_header(raw: bytes, data_bytes: int, *, file: str, field: str) -> dict[str, StoredTensor]:
    """Parses the header `raw` of a file with `data_bytes` after it. Returns the tensors in the order of their bytes."""

    def refuse(what: str, fix: str = REWRITE) -> InvalidWeights:
        return InvalidWeights(f"{file!r} is not a valid safetensors file: {what}", field=field, file=file, fix=fix)

    if raw[:1] != b"{":
        raise refuse("its header does not begin with '{'")
    try:
        header = load_json_object(raw)
    except ValueError as error:
        raise refuse(f"its header can't be read: {str(error)[:200]}") from error

    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise refuse("__metadata__ must be an object of strings", "write metadata as strings")

    placed: list[tuple[int, int, str, TensorSpec]] = []
    for name, entry in header.items():
        if not checked_name(name):
            raise refuse(
                f"{name[:MAX_NAME_CHARS]!r} can't be the name of a tensor",
                f"use 1 to {MAX_NAME_CHARS} printable characters without white space",
            )
        if not isinstance(entry, dict) or entry.keys() != _ENTRY_KEYS:
            raise refuse(f"the entry of {name!r} must have exactly dtype, shape and data_offsets")
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
            raise refuse(
                f"the dtype of {name!r} is {str(dtype)[:32]!r}", f"use one of {', '.join(sorted(DTYPE_BYTES))}"
            )
        if not _are_sizes(shape) or len(shape) > MAX_RANK:
            raise refuse(f"the shape of {name!r} must be at most {MAX_RANK} non-negative integers")
        if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
            raise refuse(f"data_offsets of {name!r} must be [begin, end] with 0 <= begin <= end")
        spec = TensorSpec(dtype, tuple(shape))
        if spec.nbytes != offsets[1] - offsets[0]:
            raise refuse(
                f"{name!r} is {dtype} {_shown_shape(shape)}, so {_shown_int(spec.nbytes)} bytes, "
                f"but its data_offsets span {_shown_int(offsets[1] - offsets[0])}"
            )
        placed.append((offsets[0], offsets[1], name, spec))

    placed.sort(key=lambda place: place[:2])
    end, tensors, before = 0, {}, ""
    for begin, until, name, spec in placed:
        if begin < end:
            raise refuse(f"{name!r} overlaps {before!r}")
        if begin > end:
            hole = f"bytes before {name!r} belong to no tensor" if before else f"{name!r} does not begin at 0"
            raise refuse(f"{hole} (at {_shown_int(end)}, the tensor at {_shown_int(begin)})")
        tensors[name] = StoredTensor(spec, _LENGTH.size + len(raw) + begin)
        end, before = until, name
    if end > data_bytes:
        raise refuse(f"it is truncated: its tensors have {_shown_int(end)} bytes, but it has {data_bytes}")
    if end < data_bytes:
        raise refuse(f"it has {data_bytes - end} trailing bytes that belong to no tensor")
    return tensors


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(side) is int and side >= 0 for side in value)


def _shown_int(value: int) -> str:
    return str(value) if value < 1 << 64 else "2^64 or more"


def _shown_shape(shape: list[int]) -> str:
    return f"[{', '.join(map(_shown_int, shape))}]"


class SafetensorsFile(ABC):
    """A checked file, open for reading from any thread. A subclass says where its bytes come from."""

    tensors: dict[str, StoredTensor]

    def __init__(self, name: str, nbytes: int, identity: Hashable, field: str) -> None:
        """Reads and checks the header.

        Args:
            name: the file's name in messages.
            nbytes: the file's length.
            identity: changes when another file takes the name.
            field: the field of the request that has chosen the file.
        """
        self.name = name
        self.nbytes = nbytes
        self.identity = identity
        self.field = field
        self.tensors = self._read_header()

    def _read_header(self) -> dict[str, StoredTensor]:
        if self.nbytes < _LENGTH.size:
            raise self._refusal(f"is truncated: it has {self.nbytes} bytes, less than a header's length", REWRITE)
        prefix = bytearray(_LENGTH.size)
        self.read_into(0, memoryview(prefix))
        (length,) = _LENGTH.unpack(prefix)
        if length > MAX_HEADER_BYTES:
            raise self._refusal(
                f"announces a header of {length} bytes, more than {MAX_HEADER_BYTES}",
                "check that it is a safetensors file; split a checkpoint with so many tensors into shards",
            )
        if length > self.nbytes - _LENGTH.size:
            raise self._refusal(
                f"is truncated: its header alone has {length} bytes, it has {self.nbytes}", REWRITE
            )
        raw = bytearray(length)
        self.read_into(_LENGTH.size, memoryview(raw))
        self.check_unchanged()
        data_bytes = self.nbytes - _LENGTH.size - length
        return parse_header(bytes(raw), data_bytes, file=self.name, field=self.field)

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fills `view` from `offset`. Raises InvalidWeights if the file ends early."""
        done = 0
        while done < len(view):
            count = self._read_some(offset + done, view[done : done + READ_BYTES])
            if count == 0:
                raise self._refusal("changed while read: it was cut short", REWRITE)
            done += count

    def will_read(self, offset: int, nbytes: int) -> None:  # noqa: B027  (a disk needs no announcement)
        """Announces that this thread reads these bytes next, in order."""

    @abstractmethod
    def _read_some(self, offset: int, view: memoryview) -> int:
        """Reads bytes from `offset` on. Returns how many; 0 at the end of the file."""

    @abstractmethod
    def check_unchanged(self) -> None:
        """Raises InvalidWeights if the file was written to since it was opened."""

    @abstractmethod
    def close(self) -> None:
        """Closes the file, from any thread, perhaps twice."""

    def _refusal(self, what: str, fix: str) -> InvalidWeights:
        return InvalidWeights(f"{self.name!r} {what}", field=self.field, file=self.name, fix=fix)


class DiskFile(SafetensorsFile):
    """A file that is open by its descriptor. It owns the descriptor, even if the constructor fails."""

    def __init__(self, descriptor: int, name: str, *, field: str) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self._reads = 0
        """The number of reads under way."""
        self._closed = False
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                what = f"{name!r} is not a regular file"
                raise InvalidWeights(what, field=field, file=name, fix="publish a regular file")
            # Without ctime, which a rename of another file over this path changes. Such a rename does no harm.
            self._stamp = (status.st_size, status.st_mtime_ns)
            super().__init__(name, status.st_size, (status.st_dev, status.st_ino), field)
        except BaseException:
            self.close()
            raise

    def _read_some(self, offset: int, view: memoryview) -> int:
        with self._lock:
            if self._closed:
                raise EngineFailed(f"{self.name!r} was closed while it was read")
            self._reads += 1
        try:
            return os.preadv(self._descriptor, [view], offset)
        except OSError as error:
            raise unreadable(self.name, error) from error
        finally:
            with self._lock:
                self._reads -= 1
                if self._closed and not self._reads:
                    os.close(self._descriptor)

    def check_unchanged(self) -> None:
        with self._lock:
            if self._closed:
                raise EngineFailed(f"{self.name!r} was closed while it was read")
            status = os.fstat(self._descriptor)
        if (status.st_size, status.st_mtime_ns) != self._stamp:
            raise self._refusal("changed while read", "don't write to a published file: publish another one")

    def close(self) -> None:
        """Closes the file, from any thread, perhaps twice. Reads under way end first, so that the descriptor is not
        reused."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if not self._reads:
                os.close(self._descriptor)


def unreadable(name: str, error: OSError) -> PlaneError:
    """The error for a failure of the disk or of the process's limits, for which the request is not to blame."""
    return Unavailable(f"{name!r} can't be read: {error.strerror or error}", file=name)


def write_safetensors(
    path: Path, tensors: Mapping[str, tuple[TensorSpec, bytes]], metadata: Mapping[str, str] | None = None
) -> None:
    """Writes a file atomically, in the order given: a reader of `path` sees the old file or the complete new one."""
    for name, (spec, data) in tensors.items():
        if not checked_name(name) or name == "__metadata__":
            raise ValueError(f"{name[:MAX_NAME_CHARS]!r} can't be the name of a tensor")
        if len(data) != spec.nbytes:
            raise ValueError(f"{name!r} needs {spec.nbytes} bytes, not {len(data)}")
    header, _ = encode_header({name: spec for name, (spec, _) in tensors.items()}, metadata)
    write_atomically(path, [header, *(data for _, data in tensors.values())])


def encode_header(
    specs: Mapping[str, TensorSpec], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, dict[str, StoredTensor]]:
    """Returns what precedes the data of a file, and the place of each tensor, in the order given."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, spec in specs.items():
        offsets = [end, end + spec.nbytes]
        header[name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": offsets}
        end += spec.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # readers that map the file need aligned data
    raw = _LENGTH.pack(len(text)) + text
    begins = {name: len(raw) + header[name]["data_offsets"][0] for name in specs}
    return raw, {name: StoredTensor(spec, begins[name]) for name, spec in specs.items()}


def write_atomically(path: Path, pieces: Iterable[bytes]) -> None:
    """Writes a file beside `path`, then renames it. After a failure nothing is left."""
    temporary = path.with_name(f".{path.name[:64]}.{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb") as file:
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())  # otherwise a crash could leave the new name without bytes
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
