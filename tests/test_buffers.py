"""Memory for weights, and reading ahead."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from rl_plane.buffers import HUGE_BYTES, Ahead, fresh
from rl_plane.versions import HostTensor, TensorSpec

BOUND_S = 30.0


@pytest.mark.parametrize("nbytes", [0, 1, HUGE_BYTES - 1, HUGE_BYTES, 3 * HUGE_BYTES + 5])
def test_fresh_memory_is_as_long_as_asked_and_nobody_elses(nbytes: int) -> None:
    one, other = fresh(nbytes), fresh(nbytes)
    one[:] = b"x" * nbytes
    assert (one.nbytes, bytes(other)) == (nbytes, bytes(nbytes))


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
    for number in Ahead(items()):
        if number == 0:
            assert second.wait(BOUND_S), "it reads ahead"
        taken.append(number)
        assert len(made) <= number + 2
    assert taken == list(range(100))
    assert not threads()


def test_what_is_raised_there_is_raised_here() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise ValueError("no more")

    ahead = iter(Ahead(items()))
    assert next(ahead) == 1
    with pytest.raises(ValueError, match="no more"):
        next(ahead)
    assert not threads()


def test_who_stops_early_leaves_no_thread() -> None:
    ended = threading.Event()

    def items() -> Iterator[int]:
        try:
            while True:
                yield 1
        finally:
            ended.set()

    for close_first in (False, True):
        ahead = Ahead(items())
        taking = iter(ahead)
        next(taking)
        if close_first:
            ahead.close()
            assert not threads()
        del taking, ahead
        assert ended.wait(BOUND_S)
        ended.clear()
        assert not threads()
    Ahead(items()).close()  # never begun


def test_staged_weights_keep_what_they_own_and_copy_what_is_lent_or_askew() -> None:
    torch = pytest.importorskip("torch")
    from worker.engines.hf_weights import host_copies

    spec, place = TensorSpec("F32", (2,)), fresh(16)
    for start, owned, kept in ((4, True, True), (4, False, False), (1, True, False)):
        place[:] = bytes(16)
        tensor = HostTensor(spec, place[start : start + 8], owned)
        ((_, staged),) = host_copies([("a", tensor)], {"a": spec}, frozenset(), False, lambda: False)
        place[:] = b"\x00\x00\x80\x3f" * 4
        assert torch.equal(staged, torch.ones(2)) == kept
