"""Gives back the uses that torch has counted for the receivers of one call.

When torch shares memory by its strategy `file_system`, it counts one more use for the process that will receive the
pickle. Torch's own receiver takes it back. The workers here only read the memory, and one call goes to many of them, so
the frontend takes it back once for the call. Otherwise the memory would stay until the trainer's process ends.

The count is the first integer of the memory. Other processes change it at any time, so it needs an atomic step, which
Python lacks: `sem_trywait` of the C library takes one from such a count, if it is above zero. The last use is the
trainer's own and stays.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
from collections.abc import Iterable
from functools import cache
from typing import Any

from rl_plane.errors import InvalidRequest
from rl_plane.protocol.shared_tensors import GpuMemory, NamedMemory
from rl_plane.transports.trainer_memory import HEADER_BYTES, opened_memory

log = logging.getLogger("frontend.dialects.sglang.shared_counts")

OWN_USE = 1
"""The use that is the trainer's own."""


def give_back(shared: Iterable[NamedMemory | GpuMemory]) -> None:
    """Takes back one use for each time that memory was shared. Memory on a GPU is counted by the worker that opens it.

    Memory that is not on this machine stays as it is, and the log says so once."""
    for memory in shared:
        if isinstance(memory, NamedMemory):
            try:
                with opened_memory(memory, writable=True) as descriptor:
                    _take_one(descriptor)
            except InvalidRequest as error:
                _report(error.message.partition(memory.name)[2])


def _take_one(descriptor: int) -> None:
    with mmap.mmap(descriptor, HEADER_BYTES) as header:
        count = ctypes.c_int.from_buffer(header)
        try:
            if count.value > OWN_USE:
                _library().sem_trywait(ctypes.byref(count))
        finally:
            del count  # the map can't be closed while something refers to it


@cache
def _library() -> Any:
    return ctypes.CDLL(None)


@cache
def _report(why: str) -> None:
    log.warning("a trainer's shared memory can't be given back%s. It stays until the trainer's process ends", why)
