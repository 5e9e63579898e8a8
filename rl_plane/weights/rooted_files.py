"""Opens files beneath the configured roots by descriptor, so symlinks and renames cannot escape the roots."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Hashable, Iterable
from pathlib import Path
from typing import Any

from rl_plane.errors import InvalidRequest, InvalidWeights, PlaneError
from rl_plane.protocol.strict_json import load_json_object
from rl_plane.weights.safetensors_file import DiskFile, SafetensorsFile, unreadable

MAX_JSON_BYTES = 64 << 20
"""The longest index or manifest: about 250,000 tensors."""

MAX_LISTED = 10_000
"""The most directory entries that are read to say what is there instead of weights."""

SHOWN = 5
"""The most names, roots or files that a message lists. It counts the others."""

_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENXIO)
_DENIED = (errno.EACCES, errno.EPERM)


def shown_roots(roots: list[Path]) -> str:
    if not roots:
        return "a weight root (none is configured: set RL_PLANE_WEIGHT_ROOTS)"
    return f"a weight root of this worker: {listed([str(root) for root in roots])}"


def listed(names: Iterable[str]) -> str:
    """The first few names, then a count."""
    names = list(names)
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(repr(name) for name in names[:SHOWN]) + more


def check_beneath(real: str, name: str, roots: list[Path] | None, field: str) -> None:
    """Raises InvalidRequest unless the resolved path `real` is beneath a root, which may itself be a symlink."""
    if roots is not None and not any(Path(real).is_relative_to(os.path.realpath(root)) for root in roots):
        raise InvalidRequest(
            f"{name!r} leads outside the weight roots", field=field, fix=f"put it beneath {shown_roots(roots)}"
        )


class Directory:
    """An open directory, whose files are opened by name. A rename of the directory in between can't mix two
    versions."""

    def __init__(self, path: str, roots: list[Path] | None, field: str) -> None:
        """`path`: a resolved path. `field`: the field of the request that has chosen it."""
        self._path = path
        self._roots = roots
        self.field = field
        self._check_beneath(path, path)
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise unopened(path, error, field) from error
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
        """True if the directory has such a name, whatever it is."""
        try:
            os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise unopened(name, error, self.field) from error
        return True

    def open(self, name: str) -> int:
        """Opens a regular file beneath the roots, through symlinks. Returns its descriptor."""
        real = os.path.realpath(os.path.join(self._path, name))
        self._check_beneath(real, name)
        try:
            # Look at the file before opening it: opening a device can have effects.
            self._check_regular(os.stat(real), name)
            # NONBLOCK: if a fifo has replaced the file since, opening it would wait for a writer.
            descriptor = os.open(
                name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, dir_fd=self._descriptor
            )
        except OSError as error:
            raise unopened(name, error, self.field) from error
        try:
            self._check_regular(os.fstat(descriptor), name)
            self._check_descriptor(descriptor, name)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def open_weights(self, name: str) -> SafetensorsFile:
        return DiskFile(self.open(name), name, field=self.field)

    def read_json(self, name: str, max_bytes: int | None = None) -> tuple[dict[str, Any], bytes, Hashable]:
        """Reads a small JSON file. Returns the object, its bytes and the file's identity."""
        limit = MAX_JSON_BYTES if max_bytes is None else max_bytes
        descriptor = self.open(name)
        try:
            with os.fdopen(descriptor, "rb") as file:
                status = os.fstat(descriptor)
                raw = file.read(limit + 1)
        except OSError as error:
            raise unreadable(name, error) from error
        if len(raw) > limit:
            raise self.refuse(f"{name!r} has more than {limit} bytes", "check that it is the right file")
        try:
            return load_json_object(raw), raw, (status.st_dev, status.st_ino)
        except ValueError as error:
            raise self.refuse(f"{name!r} can't be read: {str(error)[:200]}", "write it again") from error

    def check_same(self, name: str, identity: Hashable) -> None:
        """Raises InvalidWeights if `name` now leads to another file than the opened file."""
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
        return InvalidWeights(what, field=self.field, fix=fix)

    def _check_beneath(self, real: str, name: str) -> None:
        check_beneath(real, name, self._roots, self.field)

    def _check_descriptor(self, descriptor: int, name: str) -> None:
        """Checks what was opened, too: a symlink may have changed since its path was checked."""
        try:
            where = os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:
            return  # not Linux: only the path can be checked
        self._check_beneath(where, name)

    def _check_regular(self, status: os.stat_result, name: str) -> None:
        if not stat.S_ISREG(status.st_mode):
            raise self.refuse(f"{name!r} is {kind_of(status)}, not a regular file", "publish regular files")


def kind_of(status: os.stat_result) -> str:
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


def unopened(name: str, error: OSError, field: str) -> PlaneError:
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
