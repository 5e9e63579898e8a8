"""Cores of this machine for the ranks of an engine that runs on a CPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def bound_cores(count: int = 2) -> Iterator[pytest.MonkeyPatch]:
    """Binds each rank of an SGLang engine that starts within to a core of its own. Skips the test on a machine with
    fewer cores. Yields the patch, for more changes that end with it."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < count:
        pytest.skip(f"{count} ranks need {count} cores")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("SGLANG_CPU_OMP_THREADS_BIND", "|".join(map(str, cores[:count])))
        yield patched
