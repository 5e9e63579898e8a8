"""Weights from safetensors files beneath configured roots.

`{backend: filesystem, path: P}`. P, an absolute path, is one *.safetensors file, or a directory that holds
`model.safetensors`, or shards with `model.safetensors.index.json`. A publisher may add `rl_plane_manifest.json`
(see `write_manifest`): then a receiver also checks that the bytes are the ones that were published.

All files are opened, and everything but their bytes is checked, in `open`. They are held until `close`, so that a
checkpoint replaced meanwhile by renaming is read as it was, and one that is written to is refused.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from blake3 import blake3

from rl_plane.errors import InvalidRequest, InvalidWeights, PlaneError
from rl_plane.versions import DIGEST_PREFIX, HostTensor, TensorSpec, tensors_digest
from worker.safetensors_file import (
    READ_BYTES,
    SafetensorsFile,
    StoredTensor,
    load_json_object,
    unreadable,
    write_atomically,
)

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
MANIFEST_NAME = "rl_plane_manifest.json"

MAX_PATH_CHARS = 4096
"""PATH_MAX of Linux."""

MAX_FILES = 512
"""Each is an open descriptor; the largest public checkpoints have under 200 shards."""

MAX_JSON_BYTES = 64 << 20
"""An index or a manifest of some 250,000 tensors."""

MAX_LISTED = 10_000
"""Directory entries looked at to say what is there instead of weights."""

SHOWN = 5
"""Names, roots and files that a message lists before it only counts."""

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")

_HEX = re.compile(r"[0-9a-f]{64}")
_FIELDS = frozenset({"backend", "path"})
_MANIFEST_KEYS = frozenset({"v", "digest", "tensors", "files"})
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENXIO)
_DENIED = (errno.EACCES, errno.EPERM)
_NO_PICKLES = (
    "pickled checkpoints are never loaded, because loading one runs code from it: "
    "save safetensors (in transformers: save_pretrained(..., safe_serialization=True))"
)


class Checkpoint:
    """The open files of a checkpoint: every tensor, in the order in which they are best read."""

    def __init__(self, files: list[SafetensorsFile]) -> None:
        self.files = files
        self.places: dict[str, tuple[SafetensorsFile, StoredTensor]] = {
            name: (file, stored) for file in files for name, stored in file.tensors.items()
        }
        self.specs: dict[str, TensorSpec] = {name: stored.spec for name, (_, stored) in self.places.items()}

    def tensors(self) -> Iterator[tuple[str, HostTensor]]:
        """One buffer, as large as the largest tensor, is used for all."""
        # Not mmap: a mapped file that is cut short kills the process with SIGBUS.
        buffer = memoryview(bytearray(max((spec.nbytes for spec in self.specs.values()), default=0)))
        for name, (file, stored) in self.places.items():
            data = buffer[: stored.spec.nbytes]
            file.read_into(stored.offset, data)
            file.check_unchanged()
            yield name, HostTensor(stored.spec, data)
        self.check_unchanged()

    def tensor_digests(self) -> dict[str, str]:
        """Per tensor, blake3 hex, in memory bounded whatever the tensors' size."""
        buffer = memoryview(bytearray(READ_BYTES))
        digests = {}
        for name, (file, stored) in self.places.items():
            hasher = blake3()
            for chunk in file.chunks(stored, buffer):
                hasher.update(chunk)
            digests[name] = hasher.hexdigest()
        self.check_unchanged()
        return digests

    def digest(self) -> str:
        return self.digest_of(self.tensor_digests())

    def digest_of(self, tensor_digests: Mapping[str, str]) -> str:
        return tensors_digest((name, self.specs[name], value) for name, value in tensor_digests.items())

    def check_unchanged(self) -> None:
        for file in self.files:
            file.check_unchanged()

    def close(self) -> None:
        for file in self.files:
            file.close()


class FilesystemDelivery:
    """A Delivery of files."""

    def __init__(
        self, checkpoint: Checkpoint, digest: str | None = None, tensor_digests: Mapping[str, str] | None = None
    ) -> None:
        self.specs: Mapping[str, TensorSpec] = checkpoint.specs
        self.digest = digest
        self.tensor_digests = tensor_digests
        self.refetchable = True
        self._checkpoint = checkpoint
        self._taken = False

    def tensors(self) -> Iterator[tuple[str, HostTensor]]:
        if self._taken:
            raise RuntimeError("a delivery is read once: open another")
        self._taken = True
        return self._checkpoint.tensors()

    def close(self) -> None:
        self._checkpoint.close()


class FilesystemTransport:
    """The `filesystem` backend. Keeps nothing between two updates."""

    backend = "filesystem"

    def __init__(self, weight_roots: list[Path]) -> None:
        self._roots = [Path(os.path.abspath(root)) for root in weight_roots]

    def init(self, config: Mapping[str, Any]) -> None:
        _check_fields(config, frozenset({"backend"}))

    def destroy(self) -> None:
        pass

    def open(self, request: Mapping[str, Any]) -> FilesystemDelivery:
        _check_fields(request, _FIELDS)
        path = _checked_path(request.get("path"), self._roots)
        checkpoint, manifest = _open(path, self._roots, "transport.path", with_manifest=True)
        if manifest is None:
            return FilesystemDelivery(checkpoint)
        try:
            digest, tensor_digests = _checked_manifest(manifest, checkpoint)
        except BaseException:
            checkpoint.close()
            raise
        return FilesystemDelivery(checkpoint, digest, tensor_digests)


def open_checkpoint(path: Path, roots: list[Path] | None = None, *, field: str = "transport.path") -> Checkpoint:
    """Opens a file or a directory without its manifest. `roots` None: the path is our own operator's."""
    return _open(os.path.abspath(path), roots, field, with_manifest=False)[0]


def write_manifest(directory: Path) -> dict[str, Any]:
    """For publishers: computes the digests of a complete checkpoint directory and writes its manifest, last.

    Returns the manifest; its `digest` is the version's.
    """
    if not os.path.isdir(directory):
        raise InvalidRequest(
            f"{str(directory)!r} is not a directory", field="directory", fix="name a checkpoint directory"
        )
    checkpoint = open_checkpoint(directory, field="directory")
    try:
        digests = checkpoint.tensor_digests()
        manifest = {
            "v": 1,
            "digest": checkpoint.digest_of(digests),
            "tensors": {
                name: {"dtype": spec.dtype, "shape": list(spec.shape), "digest": digests[name]}
                for name, spec in checkpoint.specs.items()
            },
            "files": {file.name: file.nbytes for file in checkpoint.files},
        }
    finally:
        checkpoint.close()
    write_atomically(Path(directory) / MANIFEST_NAME, [json.dumps(manifest).encode()])
    return manifest


def _check_fields(given: Mapping[str, Any], known: frozenset[str]) -> None:
    backend = given.get("backend", "filesystem")
    if backend != "filesystem":
        raise InvalidRequest(
            f"the backend is {str(backend)[:64]!r}, not 'filesystem'",
            field="transport.backend",
            fix="send it to that backend, or say filesystem",
        )
    unknown = [str(key)[:64] for key in given if key not in known]
    if unknown:
        raise InvalidRequest(
            f"the filesystem transport has no field {_listed(unknown)}",
            field=f"transport.{unknown[0]}",
            fix=f"use only {', '.join(sorted(known))}",
        )


def _checked_path(path: Any, roots: list[Path]) -> str:
    fix = f"give an absolute path beneath {_shown_roots(roots)}"

    def refuse(what: str) -> InvalidRequest:
        return InvalidRequest(f"transport.path {what}", field="transport.path", fix=fix)

    if path is None:
        raise refuse("is missing")
    if not isinstance(path, str):
        raise refuse(f"must be a string, not {type(path).__name__}")
    if len(path) > MAX_PATH_CHARS:
        raise refuse(f"has {len(path)} characters, more than {MAX_PATH_CHARS}")
    if "\0" in path:
        raise refuse("has a NUL character")
    try:
        os.fsencode(path)
    except UnicodeError:
        raise refuse("has characters that no file name can have") from None
    if not os.path.isabs(path):
        raise refuse(f"must be absolute, not {path!r}")
    return path


def _shown_roots(roots: list[Path]) -> str:
    if not roots:
        return "a weight root (none is configured: set RL_PLANE_WEIGHT_ROOTS)"
    return f"a weight root of this worker: {_listed([str(root) for root in roots])}"


def _listed(names: Iterable[str]) -> str:
    """The first few names, then a count."""
    names = list(names)
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(repr(name) for name in names[:SHOWN]) + more


def _check_beneath(real: str, name: str, roots: list[Path] | None, field: str) -> None:
    """InvalidRequest unless the resolved path `real` is beneath a root, which may itself be a symlink."""
    if roots is not None and not any(Path(real).is_relative_to(os.path.realpath(root)) for root in roots):
        raise InvalidRequest(
            f"{name!r} leads outside the weight roots", field=field, fix=f"put it beneath {_shown_roots(roots)}"
        )


class _Directory:
    """An open directory, whose files are opened by name: a rename of it between two files mixes nothing."""

    def __init__(self, path: str, roots: list[Path] | None, field: str) -> None:
        """`path`: resolved."""
        self._path = path
        self._roots = roots
        self._field = field
        self._check_beneath(path, path)
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise _unopened(path, error, field) from error
        try:
            self._check_descriptor(self._descriptor, path)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        os.close(self._descriptor)

    def names(self) -> list[str]:
        with os.scandir(self._descriptor) as entries:
            return sorted(entry.name for entry, _ in zip(entries, range(MAX_LISTED), strict=False))

    def has(self, name: str) -> bool:
        """Is there such a name, whatever is behind it?"""
        try:
            os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise _unopened(name, error, self._field) from error
        return True

    def open(self, name: str) -> int:
        """A descriptor of a regular file beneath the roots, its symlinks followed."""
        real = os.path.realpath(os.path.join(self._path, name))
        self._check_beneath(real, name)
        try:
            # Looked at before it is opened: opening a device can have effects.
            self._check_regular(os.stat(real), name)
            # NONBLOCK: opening a fifo that took the file's place since would wait for a writer.
            descriptor = os.open(
                name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, dir_fd=self._descriptor
            )
        except OSError as error:
            raise _unopened(name, error, self._field) from error
        try:
            self._check_regular(os.fstat(descriptor), name)
            self._check_descriptor(descriptor, name)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def open_weights(self, name: str) -> SafetensorsFile:
        return SafetensorsFile(self.open(name), name, field=self._field)

    def read_json(self, name: str) -> tuple[dict[str, Any], tuple[int, int]]:
        """(the object in a small file, the file's identity)."""
        descriptor = self.open(name)
        try:
            with os.fdopen(descriptor, "rb") as file:
                status = os.fstat(descriptor)
                raw = file.read(MAX_JSON_BYTES + 1)
        except OSError as error:
            raise unreadable(name, error) from error
        if len(raw) > MAX_JSON_BYTES:
            raise self.refuse(f"{name!r} has more than {MAX_JSON_BYTES} bytes", "check that it is the right file")
        try:
            return load_json_object(raw), (status.st_dev, status.st_ino)
        except ValueError as error:
            raise self.refuse(f"{name!r} can't be read: {str(error)[:200]}", "write it again") from error

    def check_same(self, name: str, identity: tuple[int, int]) -> None:
        """InvalidWeights if `name` now leads to another file than the one that we opened."""
        try:
            status = os.stat(name, dir_fd=self._descriptor)
        except OSError:
            status = None
        if status is None or (status.st_dev, status.st_ino) != identity:
            raise self.refuse(
                f"{name!r} was replaced while the checkpoint was opened",
                "publish each checkpoint in a directory of its own, complete before it is named",
            )

    def refuse(self, what: str, fix: str) -> InvalidWeights:
        return InvalidWeights(what, field=self._field, fix=fix)

    def _check_beneath(self, real: str, name: str) -> None:
        _check_beneath(real, name, self._roots, self._field)

    def _check_descriptor(self, descriptor: int, name: str) -> None:
        """Again by what was opened: a symlink may have changed since its path was looked at."""
        try:
            where = os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:
            return  # not Linux: the check of the path has to do
        self._check_beneath(where, name)

    def _check_regular(self, status: os.stat_result, name: str) -> None:
        if not stat.S_ISREG(status.st_mode):
            raise self.refuse(f"{name!r} is {_kind(status)}, not a regular file", "publish regular files")


def _kind(status: os.stat_result) -> str:
    for test, kind in (
        (stat.S_ISDIR, "a directory"),
        (stat.S_ISFIFO, "a fifo"),
        (stat.S_ISSOCK, "a socket"),
        (stat.S_ISCHR, "a device"),
        (stat.S_ISBLK, "a device"),
    ):
        if test(status.st_mode):
            return kind
    return "something else"


def _unopened(name: str, error: OSError, field: str) -> PlaneError:
    if error.errno in _ABSENT:
        return InvalidRequest(
            f"{name!r} is not there ({error.strerror})",
            field=field,
            fix="check the path, and that this worker sees the same file system as the publisher",
        )
    if error.errno in _DENIED:
        return InvalidRequest(
            f"this worker may not read {name!r} ({error.strerror})",
            field=field,
            fix="make it readable to the worker",
        )
    return unreadable(name, error)


def _open(
    path: str, roots: list[Path] | None, field: str, *, with_manifest: bool
) -> tuple[Checkpoint, dict[str, Any] | None]:
    """The checkpoint at an absolute path; and its manifest as it was read, of a directory only."""
    real = os.path.realpath(path)
    # Before anything is looked at: nobody learns from the answer what exists outside.
    _check_beneath(real, path, roots, field)
    try:
        status = os.stat(real)
    except OSError as error:
        raise _unopened(path, error, field) from error

    if stat.S_ISDIR(status.st_mode):
        directory = _Directory(real, roots, field)
        try:
            return _open_directory(directory, path, with_manifest)
        finally:
            directory.close()
    if not stat.S_ISREG(status.st_mode):
        raise InvalidRequest(
            f"{path!r} is {_kind(status)}, not a directory or a regular file",
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
    directory = _Directory(os.path.dirname(real), roots, field)
    try:
        descriptor = directory.open(os.path.basename(real))
    finally:
        directory.close()
    name = os.path.basename(path).encode("utf-8", "replace").decode()  # it may go into an error, and onto the wire
    return Checkpoint([SafetensorsFile(descriptor, name, field=field)]), None


def _open_directory(
    directory: _Directory, path: str, with_manifest: bool
) -> tuple[Checkpoint, dict[str, Any] | None]:
    single, index = directory.has(SINGLE_NAME), directory.has(INDEX_NAME)
    if not single and not index:
        raise _nothing_there(directory, path)
    identities: dict[str, tuple[int, int]] = {}
    weight_map: dict[str, str] | None = None
    if index:
        content, identities[INDEX_NAME] = directory.read_json(INDEX_NAME)
        weight_map = _checked_map(directory, content)
        if single and set(weight_map.values()) != {SINGLE_NAME}:
            raise directory.refuse(
                f"{path!r} holds {SINGLE_NAME} and an index of other files: two checkpoints", "remove one of them"
            )
    stated: dict[str, Any] | None = None
    if with_manifest and directory.has(MANIFEST_NAME):
        stated, identities[MANIFEST_NAME] = directory.read_json(MANIFEST_NAME)

    files: list[SafetensorsFile] = []
    try:
        for name in sorted(set(weight_map.values())) if weight_map is not None else [SINGLE_NAME]:
            if not directory.has(name):
                raise directory.refuse(
                    f"{INDEX_NAME} names {name!r}, which is not in {path!r}", "publish all shards, then the index"
                )
            files.append(directory.open_weights(name))
            identities[name] = files[-1].identity
        if weight_map is not None:
            _check_shards(directory, weight_map, files)
        for name, identity in identities.items():
            directory.check_same(name, identity)
        return Checkpoint(files), stated
    except BaseException:
        for file in files:
            file.close()
        raise


def _nothing_there(directory: _Directory, path: str) -> InvalidWeights:
    names = directory.names()
    others = [name for name in names if name.endswith(".safetensors")]
    pickles = [name for name in names if name.endswith(PICKLE_SUFFIXES)]
    what = f"{path!r} holds neither {SINGLE_NAME} nor {INDEX_NAME}"
    if others:
        return directory.refuse(
            f"{what}, but {_listed(others)}", f"name the file itself, or call it {SINGLE_NAME}, or add the index"
        )
    if pickles:
        return directory.refuse(f"{what}, but {_listed(pickles)}", _NO_PICKLES)
    return directory.refuse(what, "name a directory that holds safetensors files")


def _checked_map(directory: _Directory, content: dict[str, Any]) -> dict[str, str]:
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


def _check_shards(directory: _Directory, weight_map: dict[str, str], files: list[SafetensorsFile]) -> None:
    """Each tensor is in the one shard that the index says, and nothing else is in any."""
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
            f"{found[strays[0]]!r} holds {_listed(strays)}, not in {INDEX_NAME}", "write the index again"
        )
    wrong = [tensor for tensor, name in weight_map.items() if found.get(tensor) != name]
    if wrong:
        raise directory.refuse(
            f"{INDEX_NAME} puts {_listed(name[:255] for name in wrong)} into a shard that doesn't hold it",
            "write the index again",
        )


def _checked_manifest(manifest: dict[str, Any], checkpoint: Checkpoint) -> tuple[str, dict[str, str]]:
    """(digest, tensor digests) of a manifest that agrees with itself and with the files."""

    def refuse(what: str) -> InvalidWeights:
        return InvalidWeights(
            f"{MANIFEST_NAME} {what}",
            field="transport.path",
            file=MANIFEST_NAME,
            fix="write the manifest again (worker.transports.filesystem.write_manifest), after the weights",
        )

    if manifest.get("v") != 1 or type(manifest["v"]) is not int:
        raise refuse(f"has version {str(manifest.get('v'))[:32]!r}, not 1")
    if manifest.keys() != _MANIFEST_KEYS:
        raise refuse(f"must have exactly the keys {', '.join(sorted(_MANIFEST_KEYS))}")
    tensors, files, digest = manifest["tensors"], manifest["files"], manifest["digest"]
    if not isinstance(tensors, dict) or not isinstance(files, dict):
        raise refuse("must have objects as tensors and files")
    if not isinstance(digest, str) or not digest.startswith(DIGEST_PREFIX):
        raise refuse(f"must have a digest '{DIGEST_PREFIX}<hex>'")

    if files != {file.name: file.nbytes for file in checkpoint.files}:
        raise refuse("names other files, or other lengths, than there are")
    differing = [name[:255] for name in tensors.keys() ^ checkpoint.specs.keys()]
    if differing:
        raise refuse(f"and the files do not hold the same tensors: {_listed(sorted(differing))}")
    tensor_digests = {}
    for name, entry in tensors.items():
        spec = checkpoint.specs[name]
        if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "digest"}:
            raise refuse(f"must have exactly dtype, shape and digest for {name!r}")
        if entry["dtype"] != spec.dtype or entry["shape"] != list(spec.shape):
            raise refuse(f"and the files differ in the dtype or shape of {name!r}")
        if not isinstance(entry["digest"], str) or not _HEX.fullmatch(entry["digest"]):
            raise refuse(f"must have 64 hex digits as the digest of {name!r}")
        tensor_digests[name] = entry["digest"]
    computed = checkpoint.digest_of(tensor_digests)
    if computed != digest:
        raise refuse(f"says digest {digest[:80]!r}, but its tensors' digests make {computed}")
    return digest, tensor_digests
