"""Calls of torch that the process groups of this project share: those of the transports and of a publisher's ranks."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from rl_plane.errors import Unsupported

LOOK_S = 0.05
"""Seconds between two looks at `cancelled`, in a wait for a bucket."""
TORCH_LIBRARY = "libtorch_cpu.so"
"""It has 430 MB of the 470 MB that an import of torch loads."""


def import_torch() -> Any:
    """Returns torch. Raises Unsupported in a process that has none."""
    if "torch" not in sys.modules:
        _load_torch_library()
    try:
        # The order matters. A thread that imports `torch.distributed` first waits for the import lock of `torch`, while
        # a thread that imports `torch` waits for the lock of `torch.distributed`. Python breaks such a deadlock by
        # giving a thread the half-made module, and then torch ends the process.
        import torch
        import torch.distributed
    except ImportError as error:
        raise Unsupported(
            "there is no torch in this process", field="transport.backend", fix="use filesystem"
        ) from error
    return torch


def _load_torch_library() -> None:
    """Loads torch's largest library, so that the import finds it loaded.

    The import loads it while it holds the interpreter's lock. On a busy machine or from a slow disk that takes so many
    seconds that the fleet would take the worker for hung: its NATS loop could not answer. Python gives the lock back
    while it calls a C function, and `dlopen` is one. What fails here fails again in the import, which says why.
    """
    spec = importlib.util.find_spec("torch")
    dlopen = ctypes.CDLL(None).dlopen
    dlopen.argtypes, dlopen.restype = [ctypes.c_char_p, ctypes.c_int], ctypes.c_void_p
    for package in spec.submodule_search_locations or () if spec is not None else ():
        dlopen(os.fsencode(Path(package, "lib", TORCH_LIBRARY)), os.RTLD_NOW)


def gloo_options(host: str, timeout: timedelta) -> Any:
    """Options by which gloo listens at the address `host`. torch itself takes the address of this machine's name, which
    is often a loopback address that other machines can't reach."""
    gloo = import_torch().distributed.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timeout
    options._devices = [gloo.create_device(hostname=host)]
    return options


def has_ended(work: Any, *, on_gpu: bool) -> bool:
    """True if the operation has ended; waits up to LOOK_S for it."""
    if not on_gpu:
        with contextlib.suppress(RuntimeError):  # the operation's own error, or the time-out
            work.wait(timedelta(seconds=LOOK_S))
    elif not work.is_completed():
        time.sleep(LOOK_S / 50)
    return bool(work.is_completed())


def first_line(error: Exception) -> str:
    """The first line of torch's message. The lines after it are a stack."""
    return str(error).split("\n")[0][:300]
