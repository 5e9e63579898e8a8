"""Files of a checkpoint that another process replaces while a worker opens them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest

from rl_plane.weights import rooted_files
from rl_plane.weights.safetensors_file import DiskFile


@contextlib.contextmanager
def replaced_while_opened(replace: Callable[[str], object]) -> Iterator[None]:
    """Calls `replace` with the name of each file of weights, right after a worker has opened it."""

    class Replacing(DiskFile):
        def __init__(self, descriptor: int, name: str, *, field: str = "") -> None:
            super().__init__(descriptor, name, field=field)
            replace(name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rooted_files, "DiskFile", Replacing)
        yield
