"""The sending half of `filesystem`: a directory for each version, beneath a root that trainer and workers share.

The directory holds a checkpoint (`model.safetensors`) or a PEFT adapter (`adapter_model.safetensors`,
`adapter_config.json`), and a manifest. If several ranks of the trainer own tensors, each writes a file of its own, and
rank 0 the index. A rename makes the directory appear whole. These versions stay:

* the newest `keep` versions of this publisher
* versions that the fleet's record names, because a worker that joins or heals reads them
* versions of other publishers
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path
from typing import Any

from rl_plane.errors import InvalidRequest, PlaneError, Unavailable
from rl_plane.protocol.versions import ADAPTER_CONFIG_NAME, DTYPE_BYTES
from rl_plane.transports.base import SenderContext, SharingSender
from rl_plane.weights.checkpoint import ADAPTER_NAME, INDEX_NAME, MANIFEST_NAME, SINGLE_NAME, manifest_of
from rl_plane.weights.manifest import Manifest
from rl_plane.weights.safetensors_file import encode_header

DEFAULT_KEEP = 2
"""The newest version, and the one before, which a worker may still read."""
BUFFERS = 2
"""One buffer is packed while the other is written."""
WRITE_BYTES = 16 << 20
"""The most bytes of one write."""

PREFIX = "v"
_NAME = re.compile(rf"{PREFIX}(\d{{8}})-([0-9a-f]{{8}})-[0-9a-f]{{8}}")
"""A version's directory: its number, its publisher's mark, and a random part."""
_UNFINISHED = re.compile(rf"\.{PREFIX}\d{{8}}-([0-9a-f]{{8}})-[0-9a-f]{{8}}\.writing")


class FilesystemSender(SharingSender):
    """Writes each version to a directory of its own."""

    backend = "filesystem"
    receivers_from = "finish"
    bucket_bytes = 64 << 20
    """Two buckets are in memory. Larger ones are not written faster."""

    def __init__(
        self,
        root: Path | str,
        *,
        keep: int = DEFAULT_KEEP,
        publisher: str = "",
        sources: Callable[[], Iterable[Mapping[str, Any]] | None] = tuple,
    ) -> None:
        """Makes the sender.

        Args:
            root: the shared directory. It is created if it is missing.
            keep: how many versions of this publisher stay.
            publisher: the publisher's name, the same after a restart.
            sources: returns the `transport` objects of versions that must stay; None if they are unknown.
        """
        self._root = Path(os.path.abspath(os.path.expanduser(root)))
        self._keep = keep
        self._mark = blake2b(publisher.encode(), digest_size=4).hexdigest()
        self._sources = sources
        self._version: _VersionDirectory | None = None
        """The directory that this process has made."""
        self._writing: _FileWriter | None = None
        self._shared = False

    def open(self, manifest: Manifest) -> dict[str, Any]:
        self._shared = False
        name = SINGLE_NAME if manifest.adapter_config is None else ADAPTER_NAME
        version = self._begin({name: manifest})
        self._writing = self._file(version.directory, name, manifest)
        return {"backend": self.backend, "path": str(version.final)}

    def plan_shares(self, manifests: Mapping[int, Manifest]) -> dict[str, Any]:
        self._shared = True
        names = {
            rank: f"model-{number:05d}-of-{len(manifests):05d}.safetensors"
            for number, rank in enumerate(manifests, 1)
        }
        version = self._begin({names[rank]: manifest for rank, manifest in manifests.items()})
        return {"directory": str(version.directory), "names": {str(rank): name for rank, name in names.items()}}

    def open_share(self, rank: int, manifest: Manifest, plan: Mapping[str, Any]) -> dict[str, Any]:
        if self._writing is not None:
            self._writing.close()
        self._writing = self._file(Path(plan["directory"]), plan["names"][str(rank)], manifest)
        return {}

    def joined(self, parts: Mapping[int, dict[str, Any]]) -> dict[str, Any]:
        assert self._version is not None, "plan_shares comes first"
        return {"backend": self.backend, "path": str(self._version.final)}

    def _begin(self, files: Mapping[str, Manifest]) -> _VersionDirectory:
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            _remove_unfinished(self._root, self._mark)
            self._remove_old()
            self._version = _VersionDirectory(self._root, self._mark, files)
        except OSError as error:
            raise _unwritable(self._root, error) from error
        return self._version

    @staticmethod
    def _file(directory: Path, name: str, manifest: Manifest) -> _FileWriter:
        try:
            return _FileWriter(directory, name, manifest)
        except OSError as error:
            raise _unwritable(directory, error) from error

    def buffer(self, number: int) -> memoryview:
        return self._open().buffer(number)

    def send(self, number: int) -> None:
        self._open().send(number)

    def finish(self, digests: Mapping[str, str] | None) -> None:
        self._open().finish()
        if not self._shared and self._version is not None:
            self._version.seal(digests)

    def seal(self, digests: Mapping[str, str]) -> None:
        if self._version is None:
            raise Unavailable("the update was given up")
        self._version.seal(digests)

    def close(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.close()
        version, self._version = self._version, None
        if version is not None:
            version.close()

    def _open(self) -> _FileWriter:
        if self._writing is None:
            raise Unavailable("the update was given up")
        return self._writing

    def _remove_old(self) -> None:
        """Removes this publisher's versions but for the newest `keep` - 1, since one more is about to come."""
        found = [match for name in os.listdir(self._root) if (match := _NAME.fullmatch(name))]
        ours = sorted(match[0] for match in found if match[2] == self._mark)
        old = ours[: max(0, len(ours) - (self._keep - 1))]
        if not old:
            return
        sources = self._sources()
        if sources is None:
            return  # the fleet does not know what it needs (its store may be lost), so every version stays
        named = {Path(str(source.get("path"))).name for source in sources}
        for name in old:
            if name not in named:
                shutil.rmtree(self._root / name)


class _VersionDirectory:
    """The directory of one version: hidden until `seal`."""

    def __init__(self, root: Path, mark: str, files: Mapping[str, Manifest]) -> None:
        """`files`: the tensors of each file of weights that it will have."""
        numbers = [int(match[1]) for name in os.listdir(root) if (match := _NAME.fullmatch(name))]
        name = f"{PREFIX}{max(numbers, default=0) + 1:08d}-{mark}-{secrets.token_hex(4)}"
        self.final = root / name
        self.directory = root / f".{name}.writing"
        self._files = files
        self.directory.mkdir()
        self._lock = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # in use while this process lives
        except BaseException:
            self.close()
            raise

    def seal(self, digests: Mapping[str, str] | None) -> None:
        """Writes what describes the files of weights, and makes the version appear."""
        manifest = Manifest(tuple(bucket for one in self._files.values() for bucket in one.buckets))
        try:
            lengths = {name: os.stat(self.directory / name).st_size for name in self._files}
            for one in self._files.values():
                if one.adapter_config is not None:
                    manifest = one
                    lengths[ADAPTER_CONFIG_NAME] = len(one.adapter_config)
                    self._write(ADAPTER_CONFIG_NAME, one.adapter_config)
            if self._files.keys().isdisjoint({SINGLE_NAME, ADAPTER_NAME}):
                weight_map = {tensor: name for name, one in self._files.items() for tensor in one.specs}
                index = {"metadata": {"total_size": manifest.nbytes}, "weight_map": weight_map}
                self._write(INDEX_NAME, json.dumps(index).encode())
            if digests is not None:
                digested = manifest.digested(digests)
                assert digested.digest is not None
                self._write(
                    MANIFEST_NAME,
                    json.dumps(manifest_of(digested.specs, digests, digested.digest, lengths)).encode(),
                )
            os.fsync(self._lock)
            os.rename(self.directory, self.final)
            _sync_directory(self.final.parent)
        except OSError as error:
            raise _unwritable(self.directory, error) from error

    def _write(self, name: str, data: bytes) -> None:
        with open(self.directory / name, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    def close(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)  # it is still there only if the update was given up
        os.close(self._lock)


class _FileWriter:
    """Writes one file of weights, on a thread of its own."""

    def __init__(self, directory: Path, name: str, manifest: Manifest) -> None:
        self._directory = directory
        self._manifest = manifest
        self._threads = ThreadPoolExecutor(1, "rl-plane-write")
        self._file = os.open(directory / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            # Wide dtypes come first, so that each tensor is aligned for readers that map the file.
            specs = dict(sorted(manifest.specs.items(), key=lambda item: -DTYPE_BYTES[item[1].dtype]))
            header, self._places = encode_header(specs, {"format": "pt"})
            _write_at(self._file, memoryview(header), 0)
        except BaseException:
            self.close()
            raise
        largest = max(bucket.nbytes for bucket in manifest.buckets)
        self._buffers = [memoryview(bytearray(largest)) for _ in range(min(BUFFERS, len(manifest.buckets)))]
        self._written: list[Future[None]] = []

    def buffer(self, number: int) -> memoryview:
        before = number - len(self._buffers)
        if before >= 0:
            self._wait(self._written[before])
        return self._buffers[number % len(self._buffers)][: self._manifest.buckets[number].nbytes]

    def send(self, number: int) -> None:
        try:
            self._written.append(self._threads.submit(self._write, number))
        except RuntimeError as error:
            raise Unavailable("the update was given up") from error

    def _write(self, number: int) -> None:
        data = self._buffers[number % len(self._buffers)]
        for placed in self._manifest.buckets[number].tensors:
            tensor = data[placed.offset : placed.offset + placed.spec.nbytes]
            _write_at(self._file, tensor, self._places[placed.name].offset)

    def _wait(self, written: Future[None]) -> None:
        try:
            written.result()
        except OSError as error:
            raise _unwritable(self._directory, error) from error

    def finish(self) -> None:
        for written in self._written:
            self._wait(written)
        try:
            os.fsync(self._file)
        except OSError as error:
            raise _unwritable(self._directory, error) from error

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        if self._file >= 0:
            os.close(self._file)
        self._file = -1


def _write_at(file: int, data: memoryview, offset: int) -> None:
    while data.nbytes:
        count = os.pwrite(file, data[:WRITE_BYTES], offset)
        data, offset = data[count:], offset + count


def _remove_unfinished(root: Path, mark: str) -> None:
    """Removes what this publisher left when it was killed. A publisher that lives holds the lock of its directory."""
    for name in os.listdir(root):
        match = _UNFINISHED.fullmatch(name)
        if match is None or match[1] != mark:
            continue
        try:
            descriptor = os.open(root / name, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(root / name, ignore_errors=True)
        except BlockingIOError:
            pass
        finally:
            os.close(descriptor)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _unwritable(path: Path, error: OSError) -> PlaneError:
    return Unavailable(
        f"{str(path)!r} can't be written: {error.strerror or error}",
        field="root",
        fix="name a directory that trainer and workers share, with room for the weights",
    )


def build(context: SenderContext) -> FilesystemSender:
    """Makes the sender. Options: `keep` (versions), `publisher` (see `SenderContext.publisher`)."""
    if context.root is None:
        raise InvalidRequest(
            "the filesystem transport needs a root",
            field="root",
            fix="root=DIR (--root DIR), beneath a weight root of the workers",
        )
    context.check_options("filesystem", "keep", "publisher")
    keep = context.keep_option(DEFAULT_KEEP, least=1)
    return FilesystemSender(context.root, keep=keep, publisher=context.publisher(), sources=context.sources)
