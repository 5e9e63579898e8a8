"""Tests the flush of SGLang's cache with stand-ins, also for what needs a GPU.
`tests/engines/test_structured_output.py` tests it with SGLang itself on a CPU."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from worker.engines.sglang.flushing import abort_at_once, flush_at_once


class Cache:
    """Stands in for SGLang's cache with a second tier in host memory, of which copies are under way."""

    def __init__(self) -> None:
        self.writes, self.cache_controller = 2, SimpleNamespace(ack_load_queue=["a", "b", "c"])

    def writing_check(self, write_back: bool) -> None:
        assert write_back, "this is the check that waits"
        self.writes = 0

    def loading_check(self, finish_count: int) -> None:
        del self.cache_controller.ack_load_queue[:finish_count]

    def is_idle(self) -> bool:
        return not self.writes and not self.cache_controller.ack_load_queue


def scheduler_of(*ids: str, cache: Any = None) -> Any:
    """`ids`: the requests whose grammars are compiled."""
    queue = [SimpleNamespace(rid=rid, grammar=Future[Any]()) for rid in ids]
    manager = SimpleNamespace(grammar_queue=queue)
    return SimpleNamespace(
        enable_hierarchical_cache=cache is not None, tree_cache=cache, grammar_manager=manager, waiting_queue=[]
    )


def test_a_flush_passes_over_requests_whose_grammar_is_compiled() -> None:
    scheduler = scheduler_of("a", "b")
    queue = scheduler.grammar_manager.grammar_queue
    assert flush_at_once(lambda one: not one.grammar_manager.grammar_queue, scheduler)
    assert scheduler.grammar_manager.grammar_queue is queue
    assert [one.rid for one in queue] == ["a", "b"]
    with pytest.raises(ZeroDivisionError):
        flush_at_once(lambda one: bool(1 / 0), scheduler)
    assert scheduler.grammar_manager.grammar_queue is queue


def test_a_flush_waits_for_copies_to_and_from_host_memory() -> None:
    assert flush_at_once(lambda one: one.tree_cache.is_idle(), scheduler_of(cache=Cache()))


def test_an_abort_of_requests_whose_grammar_is_compiled_finds_them_waiting() -> None:
    scheduler = scheduler_of("01", "02", "11")
    compiled = scheduler.grammar_manager.grammar_queue[:]
    calls: list[list[str]] = []

    def abort(one: Any, request: Any) -> None:
        calls.append([waiting.rid for waiting in one.waiting_queue])

    abort_at_once(abort, scheduler, SimpleNamespace(rid="02", abort_all=False))
    assert (calls, [one.grammar.cancelled() for one in compiled]) == ([["02"]], [False, True, False])
    assert [one.rid for one in scheduler.grammar_manager.grammar_queue] == ["01", "11"]
    abort_at_once(abort, scheduler, SimpleNamespace(rid="", abort_all=True))
    assert (calls[1], scheduler.grammar_manager.grammar_queue) == (["02", "01", "11"], [])
