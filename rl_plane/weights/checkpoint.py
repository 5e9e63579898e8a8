"""Reads a checkpoint in safetensors files, or a PEFT adapter.

* A checkpoint is one *.safetensors file, or a directory with `model.safetensors`, or with shards and
  `model.safetensors.index.json`.
* An adapter is a directory with `adapter_config.json` and `adapter_model.safetensors`.
* A publisher may add `rl_plane_manifest.json` (see `write_manifest`). A receiver then also checks that it reads the
  published bytes.

Opening a checkpoint opens all of its files, and checks everything except their bytes. The files stay open until
`close`: if a rename replaces the checkpoint meanwhile, the old one is read; if a file is written to, it is refused.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import stat
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

from rl_plane.errors import InvalidRequest, InvalidWeights
from rl_plane.protocol.canary import CANARY_NAME, MAX_CANARY_BYTES, Canary, parse_canary
from rl_plane.protocol.hashers import new_hasher
from rl_plane.protocol.versions import (
    ADAPTER_CONFIG_NAME,
    DEFAULT_ALGORITHM,
    DIGEST_PATTERN,
    DigestAlgorithm,
    HostTensor,
    TensorSpec,
    tensors_digest,
)
from rl_plane.weights.hashed_copy import PIECE_BYTES
from rl_plane.weights.manifest import MAX_CONFIG_BYTES, are_digests
from rl_plane.weights.read_ahead import END_S, ReadAhead, host_memory
from rl_plane.weights.rooted_files import Directory, check_beneath, kind_of, listed, unopened
from rl_plane.weights.safetensors_file import READ_BYTES, DiskFile, SafetensorsFile, StoredTensor, write_atomically

Kind = Literal["base", "lora"]

Places = Callable[[str, TensorSpec], memoryview | None]
"""`(name, spec)`: returns the writable memory for this tensor, of exactly its bytes. None: there is no place for it."""

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
ADAPTER_NAME = "adapter_model.safetensors"
MANIFEST_NAME = "rl_plane_manifest.json"

MAX_FILES = 512
"""The most files of a checkpoint. Each is an open descriptor; the largest public checkpoints have under 200 shards."""

RUN_BYTES = 64 << 20
"""The bytes that are read at once: enough that the cost of new memory does not count, and little enough that staging
can begin soon."""
READERS = min(4, os.cpu_count() or 1)
"""Threads that read and hash. Four are faster than most disks, and leave cores to the engine."""

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")

_MANIFEST_KEYS = frozenset({"v", "digest", "tensors", "files"})
_NO_PICKLES = (
    "pickled checkpoints are never loaded, because loading one runs code from it: "
    "save safetensors (in transformers: save_pretrained(..., safe_serialization=True))"
)


class Folder(Protocol):
    """A place that holds the files of a checkpoint: a directory, or a prefix of URLs."""

    field: str
    """The field of the request that has chosen the folder."""

    def names(self) -> list[str]: ...

    def has(self, name: str) -> bool: ...

    def open_weights(self, name: str) -> SafetensorsFile: ...

    def read_json(self, name: str, max_bytes: int | None = None) -> tuple[dict[str, Any], bytes, Hashable]:
        """Reads a small JSON file. Returns the object, its bytes and the file's identity."""

    def check_same(self, name: str, identity: Hashable) -> None:
        """Raises InvalidWeights if another file has taken the name since it was opened."""

    def refuse(self, what: str, fix: str) -> InvalidWeights: ...


class Checkpoint:
    """The open files of a checkpoint or an adapter, with their tensors in the order in which they are best read."""

    def __init__(self, files: list[SafetensorsFile], config: bytes | None = None) -> None:
        """`config`: the bytes of the adapter's `adapter_config.json`, if this is an adapter."""
        self.files = files
        self.config = config
        self.canary: Canary | InvalidRequest | None = None
        """The content of `canary.json` beside the files, or what is wrong with it. None: there is no such file."""
        self.places: dict[str, tuple[SafetensorsFile, StoredTensor]] = {
            name: (file, stored) for file in files for name, stored in file.tensors.items()
        }
        self.specs: dict[str, TensorSpec] = {name: stored.spec for name, (_, stored) in self.places.items()}
        self.readers = READERS
        self.run_bytes = RUN_BYTES
        self._lanes: list[ReadAhead[list[tuple[str, HostTensor]]]] = []

    def tensors(
        self, algorithm: DigestAlgorithm | None = None, places: Places | None = None
    ) -> Iterator[tuple[str, HostTensor]]:
        """Yields each tensor, which is `owned`. Threads read the next tensors meanwhile. `algorithm`: that of the
        tensors' digests; None makes none. `places`: the memory into which the tensors are read; None: new memory."""
        runs = list(self._runs())
        if len(runs) == 1:
            yield from self._read(*runs[0], algorithm, places)
        else:
            for lane in range(min(self.readers, len(runs))):
                self._lanes.append(
                    ReadAhead(self._read(*run, algorithm, places) for run in runs[lane :: self.readers])
                )
            turns = itertools.cycle([iter(lane) for lane in self._lanes])
            for lane_in_turn in itertools.islice(turns, len(runs)):
                yield from next(lane_in_turn)
        self.check_unchanged()

    def _runs(self) -> Iterator[tuple[SafetensorsFile, list[str]]]:
        """Groups neighbours in a file that are read at once: up to `run_bytes`, or one larger tensor."""
        for file in self.files:
            names: list[str] = []
            size = 0
            for name, stored in file.tensors.items():
                if names and size + stored.spec.nbytes > self.run_bytes:
                    yield file, names
                    names, size = [], 0
                names.append(name)
                size += stored.spec.nbytes
            if names:
                yield file, names

    def _read(
        self,
        file: SafetensorsFile,
        names: list[str],
        algorithm: DigestAlgorithm | None,
        places: Places | None,
    ) -> list[tuple[str, HostTensor]]:
        stored = [file.tensors[name] for name in names]
        found = [
            None if places is None else places(name, one.spec) for name, one in zip(names, stored, strict=True)
        ]
        start = stored[0].offset
        nbytes = stored[-1].offset + stored[-1].spec.nbytes - start
        file.will_read(start, nbytes)
        if None in found:
            # The file is not mapped: if a mapped file is truncated, SIGBUS kills the process.
            data = host_memory(nbytes)
            found = [data[one.offset - start :][: one.spec.nbytes] for one in stored]
        made = []
        for name, one, place in zip(names, stored, found, strict=True):
            assert place is not None
            pieces = (place[at : at + PIECE_BYTES] for at in range(0, len(place), PIECE_BYTES))
            if algorithm is None:
                file.read_into(one.offset, place)
                digest = None
            else:
                digest = _read_hashed(file, one.offset, pieces, algorithm)
            made.append((name, HostTensor(one.spec, place, owned=True, digest=digest)))
        file.check_unchanged()
        return made

    def tensor_digests(self, algorithm: DigestAlgorithm = DEFAULT_ALGORITHM) -> dict[str, str]:
        """The hex digest of each tensor. The memory that this takes is bounded."""
        buffer = memoryview(bytearray(READ_BYTES))
        digests = {}
        for name, (file, stored) in self.places.items():
            nbytes = stored.spec.nbytes
            pieces = (buffer[: nbytes - at] for at in range(0, nbytes, len(buffer)))
            digests[name] = _read_hashed(file, stored.offset, pieces, algorithm)
        self.check_unchanged()
        return digests

    def digest(self, algorithm: DigestAlgorithm = DEFAULT_ALGORITHM) -> str:
        """The version's digest, computed from the files' bytes."""
        return self.digest_of(self.tensor_digests(algorithm))

    def digest_of(self, tensor_digests: Mapping[str, str]) -> str:
        """The version's digest, from the digests of its tensors."""
        lines = [(name, self.specs[name], value) for name, value in tensor_digests.items()]
        return tensors_digest(lines, self.config)

    def check_unchanged(self) -> None:
        """Raises InvalidWeights if a file was written to since it was opened."""
        for file in self.files:
            file.check_unchanged()

    def close(self) -> None:
        for file in self.files:
            file.close()
        give_up = time.monotonic() + END_S
        for lane in self._lanes:
            lane.close(max(0.0, give_up - time.monotonic()))


def _read_hashed(
    file: SafetensorsFile, offset: int, pieces: Iterable[memoryview], algorithm: DigestAlgorithm
) -> str:
    """Fills the pieces, one after another, from `offset` on. Returns the hex digest of what was read."""
    hasher = new_hasher(algorithm)
    for piece in pieces:
        file.read_into(offset, piece)
        hasher.update(piece)
        offset += len(piece)
    return hasher.hexdigest()


def open_checkpoint(path: Path, *, field: str = "transport.path", kind: Kind = "base") -> Checkpoint:
    """Opens a file or a directory that the operator has chosen, and ignores its manifest."""
    return _open(os.path.abspath(path), None, field, kind, with_manifest=False)[0]


def open_published(
    path: str, roots: list[Path], kind: Kind
) -> tuple[Checkpoint, str | None, dict[str, str] | None]:
    """Opens what is at an absolute path. Returns it with the version's digest and the tensors' digests of its manifest,
    or None for both without one."""
    return _with_digests(*_open(path, roots, "transport.path", kind, with_manifest=True), "transport.path")


def open_folder(folder: Folder, shown: str, kind: Kind) -> tuple[Checkpoint, str | None, dict[str, str] | None]:
    """Opens what a folder holds, as `open_published` does. `shown`: the folder's name in messages."""
    return _with_digests(*_open_directory(folder, shown, kind, with_manifest=True), folder.field)


def _with_digests(
    checkpoint: Checkpoint, manifest: dict[str, Any] | None, field: str
) -> tuple[Checkpoint, str | None, dict[str, str] | None]:
    if manifest is None:
        return checkpoint, None, None
    try:
        return checkpoint, *_checked_manifest(manifest, checkpoint, field)
    except BaseException:
        checkpoint.close()
        raise


def write_manifest(directory: Path, algorithm: DigestAlgorithm = DEFAULT_ALGORITHM) -> dict[str, Any]:
    """Computes the digests of a complete checkpoint or adapter directory, and writes its manifest.

    Returns the manifest, whose `digest` is the version's.
    """
    if not os.path.isdir(directory):
        raise InvalidRequest(
            f"{str(directory)!r} is not a directory", field="directory", fix="name a checkpoint directory"
        )
    kind: Kind = "lora" if is_adapter(directory) else "base"
    checkpoint = open_checkpoint(directory, field="directory", kind=kind)
    try:
        digests = checkpoint.tensor_digests(algorithm)
        manifest = manifest_of(checkpoint.specs, digests, checkpoint.digest_of(digests), _sizes(checkpoint))
    finally:
        checkpoint.close()
    write_atomically(Path(directory) / MANIFEST_NAME, [json.dumps(manifest).encode()])
    return manifest


def manifest_of(
    specs: Mapping[str, TensorSpec], digests: Mapping[str, str], digest: str, files: Mapping[str, int]
) -> dict[str, Any]:
    """The content of a manifest. `digests`: those of the tensors. `files`: the length of each file."""
    tensors = {
        name: {"dtype": spec.dtype, "shape": list(spec.shape), "digest": digests[name]}
        for name, spec in specs.items()
    }
    return {"v": 1, "digest": digest, "tensors": tensors, "files": dict(files)}


def is_adapter(directory: Path | str) -> bool:
    """True if the directory holds a PEFT adapter and no checkpoint."""
    try:
        held = set(os.listdir(directory))
    except OSError:
        return False
    return ADAPTER_CONFIG_NAME in held and held.isdisjoint({SINGLE_NAME, INDEX_NAME})


def _open(
    path: str, roots: list[Path] | None, field: str, kind: Kind, *, with_manifest: bool
) -> tuple[Checkpoint, dict[str, Any] | None]:
    """Opens what is at an absolute path. Returns it with the unchecked manifest, which only a directory can have."""
    real = os.path.realpath(path)
    # Check this first, so that the answer does not tell what exists outside the roots.
    check_beneath(real, path, roots, field)
    try:
        status = os.stat(real)
    except OSError as error:
        raise unopened(path, error, field) from error

    if stat.S_ISDIR(status.st_mode):
        directory = Directory(real, roots, field)
        try:
            return _open_directory(directory, path, kind, with_manifest)
        finally:
            directory.close()
    if not stat.S_ISREG(status.st_mode):
        raise InvalidRequest(
            f"{path!r} is {kind_of(status)}, not a directory or a regular file",
            field=field,
            fix="name a checkpoint directory or a *.safetensors file",
        )
    if not path.endswith(".safetensors"):
        pickled = path.endswith(PICKLE_SUFFIXES)
        raise InvalidRequest(
            f"{path!r} is {'a pickled checkpoint' if pickled else 'not a *.safetensors file'}",
            field=field,
            fix=_NO_PICKLES if pickled else "name a checkpoint directory or a *.safetensors file",
        )
    if kind == "lora":
        raise InvalidWeights(
            f"{path!r} is a file, but an adapter is a directory",
            field=field,
            fix=f"name the directory that holds {ADAPTER_CONFIG_NAME} and {ADAPTER_NAME}",
        )
    directory = Directory(os.path.dirname(real), roots, field)
    try:
        descriptor = directory.open(os.path.basename(real))
    finally:
        directory.close()
    name = os.path.basename(path).encode("utf-8", "replace").decode()  # it may appear in an error and on the wire
    return Checkpoint([DiskFile(descriptor, name, field=field)]), None


def _open_directory(
    directory: Folder, path: str, kind: Kind, with_manifest: bool
) -> tuple[Checkpoint, dict[str, Any] | None]:
    identities: dict[str, Hashable] = {}
    weight_map: dict[str, str] | None = None
    config: bytes | None = None
    if kind == "lora":
        if not directory.has(ADAPTER_CONFIG_NAME) or not directory.has(ADAPTER_NAME):
            raise _no_adapter(directory, path)
        _, config, identities[ADAPTER_CONFIG_NAME] = directory.read_json(ADAPTER_CONFIG_NAME, MAX_CONFIG_BYTES)
    else:
        weight_map = _index(directory, path, identities)
    stated: dict[str, Any] | None = None
    if with_manifest and directory.has(MANIFEST_NAME):
        stated, _, identities[MANIFEST_NAME] = directory.read_json(MANIFEST_NAME)

    files: list[SafetensorsFile] = []
    try:
        names = [ADAPTER_NAME if config is not None else SINGLE_NAME]
        for name in names if weight_map is None else sorted(set(weight_map.values())):
            if not directory.has(name):
                raise directory.refuse(
                    f"{INDEX_NAME} names {name!r}, which is not in {path!r}", "publish all shards, then the index"
                )
            files.append(directory.open_weights(name))
            identities[name] = files[-1].identity
        if weight_map is not None:
            _check_shards(directory, weight_map, files)
        if config is not None and ADAPTER_CONFIG_NAME in files[0].tensors:
            raise directory.refuse(
                f"{ADAPTER_NAME} has a tensor {ADAPTER_CONFIG_NAME!r}, the config's name", "rename it"
            )
        canary: Canary | InvalidRequest | None = None
        if with_manifest and config is None and directory.has(CANARY_NAME):
            try:
                values, _, identities[CANARY_NAME] = directory.read_json(CANARY_NAME, MAX_CANARY_BYTES)
                canary = parse_canary(values, CANARY_NAME)
            except InvalidRequest as error:
                canary = error
        for name, identity in identities.items():
            directory.check_same(name, identity)
        checkpoint = Checkpoint(files, config)
        checkpoint.canary = canary
        return checkpoint, stated
    except BaseException:
        for file in files:
            file.close()
        raise


def _index(directory: Folder, path: str, identities: dict[str, Hashable]) -> dict[str, str] | None:
    """The shard of each tensor; None if one file holds all."""
    single, index = directory.has(SINGLE_NAME), directory.has(INDEX_NAME)
    if not single and not index:
        raise _nothing_there(directory, path)
    weight_map: dict[str, str] | None = None
    if index:
        content, _, identities[INDEX_NAME] = directory.read_json(INDEX_NAME)
        weight_map = _checked_map(directory, content)
        if single and set(weight_map.values()) != {SINGLE_NAME}:
            raise directory.refuse(
                f"{path!r} holds {SINGLE_NAME} and an index of other files: two checkpoints", "remove one of them"
            )
    return weight_map


def _nothing_there(directory: Folder, path: str) -> InvalidWeights:
    names = directory.names()
    others = [name for name in names if name.endswith(".safetensors")]
    pickles = [name for name in names if name.endswith(PICKLE_SUFFIXES)]
    what = f"{path!r} holds neither {SINGLE_NAME} nor {INDEX_NAME}"
    if ADAPTER_CONFIG_NAME in names:
        return directory.refuse(
            f"{what}, but a LoRA adapter", "load it with target: {kind: lora, op: load, name: …}"
        )
    if others:
        return directory.refuse(
            f"{what}, but {listed(others)}", f"name the file itself, or call it {SINGLE_NAME}, or add the index"
        )
    if pickles:
        return directory.refuse(f"{what}, but {listed(pickles)}", _NO_PICKLES)
    return directory.refuse(what, "name a directory that holds safetensors files")


def _no_adapter(directory: Folder, path: str) -> InvalidWeights:
    names = directory.names()
    pickles = [name for name in names if name.endswith(PICKLE_SUFFIXES)]
    if ADAPTER_CONFIG_NAME not in names:
        what = f"{path!r} holds no {ADAPTER_CONFIG_NAME}"
        if SINGLE_NAME in names or INDEX_NAME in names:
            return directory.refuse(f"{what}, but a full checkpoint", "publish it with target: {kind: base}")
    else:
        what = f"{path!r} holds no {ADAPTER_NAME}"
        if pickles:
            return directory.refuse(f"{what}, but {listed(pickles)}", _NO_PICKLES)
    return directory.refuse(what, "name a directory that PEFT's save_pretrained wrote")


def _checked_map(directory: Folder, content: dict[str, Any]) -> dict[str, str]:
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise directory.refuse(f"{INDEX_NAME} has no weight_map", "write the index again")
    for tensor, name in weight_map.items():
        if (
            not isinstance(name, str)
            or not name.endswith(".safetensors")
            or "/" in name
            or not name.isprintable()
            or len(name) > 255
        ):
            raise directory.refuse(
                f"{INDEX_NAME} puts {tensor[:255]!r} into {str(name)[:255]!r}, "
                "which is not the name of a *.safetensors file in its directory",
                "name shards by plain file names, beside the index",
            )
    if len(set(weight_map.values())) > MAX_FILES:
        raise directory.refuse(
            f"{INDEX_NAME} names {len(set(weight_map.values()))} files, more than {MAX_FILES}", "use larger shards"
        )
    return weight_map


def _check_shards(directory: Folder, weight_map: dict[str, str], files: list[SafetensorsFile]) -> None:
    """Refuses shards unless each tensor of the index is in its shard only, and no shard holds any other tensor."""
    found: dict[str, str] = {}
    for file in files:
        for tensor in file.tensors:
            if tensor in found:
                raise directory.refuse(
                    f"{tensor!r} is in {found[tensor]!r} and in {file.name!r}", "write each tensor to one shard"
                )
            found[tensor] = file.name
    strays = [tensor for tensor in found if tensor not in weight_map]
    if strays:
        raise directory.refuse(
            f"{found[strays[0]]!r} holds {listed(strays)}, not in {INDEX_NAME}", "write the index again"
        )
    wrong = [tensor for tensor, name in weight_map.items() if found.get(tensor) != name]
    if wrong:
        raise directory.refuse(
            f"{INDEX_NAME} puts {listed(name[:255] for name in wrong)} into a shard that doesn't hold it",
            "write the index again",
        )


def _sizes(checkpoint: Checkpoint) -> dict[str, int]:
    sizes = {file.name: file.nbytes for file in checkpoint.files}
    if checkpoint.config is not None:
        sizes[ADAPTER_CONFIG_NAME] = len(checkpoint.config)
    return sizes


def _checked_manifest(manifest: dict[str, Any], checkpoint: Checkpoint, field: str) -> tuple[str, dict[str, str]]:
    """The digest and the tensors' digests of a manifest. Refuses it if it contradicts itself or the files."""

    def refuse(what: str) -> InvalidWeights:
        return InvalidWeights(
            f"{MANIFEST_NAME} {what}",
            field=field,
            file=MANIFEST_NAME,
            fix="write the manifest again (rl_plane.weights.checkpoint.write_manifest), after the weights",
        )

    if manifest.get("v") != 1 or type(manifest["v"]) is not int:
        raise refuse(f"has version {str(manifest.get('v'))[:32]!r}, not 1")
    if manifest.keys() != _MANIFEST_KEYS:
        raise refuse(f"must have exactly the keys {', '.join(sorted(_MANIFEST_KEYS))}")
    tensors, files, digest = manifest["tensors"], manifest["files"], manifest["digest"]
    if not isinstance(tensors, dict) or not isinstance(files, dict):
        raise refuse("must have objects as tensors and files")
    if not isinstance(digest, str) or not re.fullmatch(DIGEST_PATTERN, digest):
        raise refuse("must have a digest 'xxh3:<32 hex digits>' or 'blake3:<64 hex digits>'")

    if files != _sizes(checkpoint):
        raise refuse("names other files, or other lengths, than there are")
    differing = [name[:255] for name in tensors.keys() ^ checkpoint.specs.keys()]
    if differing:
        raise refuse(f"and the files do not hold the same tensors: {listed(sorted(differing))}")
    tensor_digests = {}
    for name, entry in tensors.items():
        spec = checkpoint.specs[name]
        if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "digest"}:
            raise refuse(f"must have exactly dtype, shape and digest for {name!r}")
        if entry["dtype"] != spec.dtype or entry["shape"] != list(spec.shape):
            raise refuse(f"and the files differ in the dtype or shape of {name!r}")
        if not are_digests([entry["digest"], digest.rpartition(":")[2]]):
            raise refuse(f"must have {len(digest.rpartition(':')[2])} hex digits as the digest of {name!r}")
        tensor_digests[name] = entry["digest"]
    computed = checkpoint.digest_of(tensor_digests)
    if computed != digest:
        raise refuse(f"says digest {digest[:80]!r}, but its tensors' digests make {computed}")
    return digest, tensor_digests
