"""The names in /dev/shm of the memory that an engine's processes share.

A process that is killed leaves its names. Here each name is deleted as soon as every process that needs it has mapped
the memory: the memory itself stays until the last of them ends.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable, Set
from pathlib import Path
from typing import Any

SHM = "/dev/shm/"


def shared_names(processes: Iterable[int], begin: str = "") -> set[Path]:
    """Returns the files in /dev/shm that one of these processes has mapped, and whose names begin so."""
    return {one for one in names_of(mapped_files(processes)) if one.name.startswith(begin)}


def mapped_files(processes: Iterable[int]) -> set[int]:
    """Returns the inodes of the files in /dev/shm that one of these processes has mapped. They may have no name. The
    maker of a semaphore maps the file under another name than the name that the semaphore gets."""
    found = set()
    for pid in processes:
        with contextlib.suppress(OSError):  # it has ended
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                if SHM in line:
                    found.add(int(line.split(maxsplit=5)[4]))
    return found


def names_of(files: Set[int]) -> set[Path]:
    """Returns those of these files in /dev/shm that have a name."""
    with os.scandir(SHM) as entries:
        return {Path(one.path) for one in entries if one.inode() in files}


def delete_name_of_ring(wait_until_ready: Any, queue: Any) -> None:
    """Wraps the wait of a message queue of vLLM or SGLang for its readers. A reader reports after it has mapped the
    queue's memory, and no reader comes later. The writer then deletes the names."""
    wait_until_ready(queue)
    if queue._is_writer:
        for memory in (queue.buffer, getattr(queue, "tensor_arena", None)):  # the latter: vLLM only
            if memory is not None and memory.is_creator:
                with contextlib.suppress(FileNotFoundError):  # a cleaner of /dev/shm was sooner
                    memory.shared_memory.unlink()
                memory.is_creator = False  # else it would delete the name again when it ends


def make_no_semaphore() -> None:
    """Gives the progress bars of this process a lock of its threads. By default they make a semaphore with a name, for
    all processes."""
    from tqdm import tqdm

    tqdm.set_lock(threading.RLock())
