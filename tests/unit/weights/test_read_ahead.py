"""Memory for weights, and reading ahead."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from rl_plane.protocol.versions import HostTensor, TensorSpec
from rl_plane.weights.read_ahead import HUGE_BYTES, ReadAhead, host_memory

BOUND_S = 30.0


@pytest.mark.parametrize("nbytes", [0, 1, HUGE_BYTES - 1, HUGE_BYTES, 3 * HUGE_BYTES + 5])
def test_memory_has_the_requested_length_and_one_owner(nbytes: int) -> None:
    one, other = host_memory(nbytes), host_memory(nbytes)
    one[:], other[:] = b"x" * nbytes, b"y" * nbytes
    assert (bytes(one), bytes(other)) == (b"x" * nbytes, b"y" * nbytes)


def address(memory: memoryview) -> int:
    return int(np.frombuffer(memory, np.uint8).ctypes.data)


def test_memory_is_taken_again_once_nothing_is_left_in_it() -> None:
    nbytes = HUGE_BYTES + 3 * 4096  # no other test leaves memory of this length
    memory = host_memory(nbytes)
    where, piece = address(memory), np.frombuffer(memory[5:6], np.uint8)
    del memory
    other = host_memory(nbytes)
    assert address(other) != where, "a piece of it is in use"
    del piece
    assert address(host_memory(nbytes)) == where


MOST = 6 * 16 * HUGE_BYTES
"""The memory that SIZES has in use at once."""
SIZES = """
import re
from rl_plane.weights.read_ahead import HUGE_BYTES, host_memory

def size():
    with open("/proc/self/status") as file:
        return 1024 * int(re.search(r"VmSize:\\s+(\\d+) kB", file.read())[1])

before, unit = size(), 16 * HUGE_BYTES
for nbytes in (unit, 2 * unit, 3 * unit, 5 * unit + 1, unit + 1):
    used = [host_memory(nbytes) for _ in range(6 * unit // nbytes)]
    print(size() - before)
    del used
    print(size() - before)
"""
"""Prints by how many bytes its process has grown, with memory in use and without, in turn."""


def test_no_more_memory_stays_than_was_used_at_once() -> None:
    done = subprocess.run([sys.executable, "-c", SIZES], capture_output=True, text=True, timeout=60)
    assert not done.stderr
    sizes = list(map(int, done.stdout.split()))
    assert len(sizes) == 10
    # The interpreter has less than HUGE_BYTES for its own objects.
    assert sizes[0] > MOST * 0.9
    assert max(sizes) < MOST + HUGE_BYTES


def locked_bytes() -> int:
    found = re.search(r"VmLck:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def test_memory_that_is_locked_goes_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    before = locked_bytes()
    memory = host_memory(HUGE_BYTES)
    if ctypes.CDLL(None, use_errno=True).mlock(ctypes.c_void_p(address(memory)), ctypes.c_size_t(HUGE_BYTES)):
        pytest.skip("this user may lock no memory")
    assert locked_bytes() == before + HUGE_BYTES
    del memory
    assert locked_bytes() == before
    assert not capfd.readouterr().err


def test_threads_that_take_memory_and_give_it_back_share_none() -> None:
    def take(mark: int) -> bool:
        alone = True
        for _ in range(200):
            memory = np.frombuffer(host_memory(HUGE_BYTES), np.uint8)
            memory[::4096] = mark
            alone = alone and bool((memory[::4096] == mark).all())
        return alone

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(take, range(8)))


def test_a_version_is_staged_in_the_memory_of_the_one_before() -> None:
    from worker.engines.common.torch_weights import host_copies

    spec = TensorSpec("U8", (HUGE_BYTES + 5 * 4096,))  # no other test leaves memory of this length
    lent = [("a", HostTensor(spec, memoryview(bytes(spec.nbytes))))]

    def staged() -> int:
        ((_, tensor),) = host_copies(lent, {"a": spec}, frozenset(), lambda: False)
        return int(tensor.data_ptr())

    assert staged() == staged()


def threads() -> int:
    return sum(thread.name == "rl-plane-ahead" for thread in threading.enumerate())


def test_items_come_in_order_and_one_is_made_while_one_is_used() -> None:
    made: list[int] = []
    second = threading.Event()

    def items() -> Iterator[int]:
        for number in range(100):
            made.append(number)
            if number == 1:
                second.set()
            yield number

    taken = []
    for number in ReadAhead(items()):
        if number == 0:
            assert second.wait(BOUND_S), "it reads ahead"
        taken.append(number)
        assert len(made) <= number + 2
    assert taken == list(range(100))
    assert not threads()


def test_an_error_of_the_reading_thread_is_raised_to_the_caller() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise ValueError("no more")

    ahead = iter(ReadAhead(items()))
    assert next(ahead) == 1
    with pytest.raises(ValueError, match="no more"):
        next(ahead)
    assert not threads()


def test_a_reader_that_stops_early_leaves_no_thread() -> None:
    ended = threading.Event()

    def items() -> Iterator[int]:
        try:
            while True:
                yield 1
        finally:
            ended.set()

    for close_first in (False, True):
        ahead = ReadAhead(items())
        taking = iter(ahead)
        next(taking)
        if close_first:
            ahead.close()
            assert not threads()
        del taking, ahead
        assert ended.wait(BOUND_S)
        ended.clear()
        assert not threads()
    ReadAhead(items()).close()  # never begun


def test_staged_weights_keep_what_they_own_and_copy_what_is_lent_or_askew() -> None:
    import torch

    from worker.engines.common.torch_weights import host_copies

    spec, place = TensorSpec("F32", (2,)), host_memory(16)
    for start, owned, kept in ((4, True, True), (4, False, False), (1, True, False)):
        place[:] = bytes(16)
        tensor = HostTensor(spec, place[start : start + 8], owned)
        ((_, staged),) = host_copies([("a", tensor)], {"a": spec}, frozenset(), lambda: False)
        place[:] = b"\x00\x00\x80\x3f" * 4
        assert torch.equal(staged, torch.ones(2)) == kept
