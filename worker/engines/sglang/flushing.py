"""Flushes SGLang's cache while the engine is paused. It runs on the scheduler's thread, in every rank.

SGLang refuses a flush while a grammar is compiled, and while KV is copied to or from host memory. Only the loop that
makes tokens looks at whether these have ended, so a paused engine would refuse each flush until it is resumed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def flush_at_once(flush: Callable[..., bool], scheduler: Any, *arguments: Any, **named: Any) -> bool:
    """Wraps the scheduler's flush. Requests whose grammar is compiled hold no KV, so they wait beside the flush."""
    if scheduler.enable_hierarchical_cache:
        _end_copies(scheduler.tree_cache)
    manager = scheduler.grammar_manager
    compiled, manager.grammar_queue = manager.grammar_queue, []
    try:
        return flush(scheduler, *arguments, **named)
    finally:
        manager.grammar_queue = compiled


def _end_copies(cache: Any) -> None:
    """Waits for the copies to and from host memory that the GPU has begun. No rank asks another one, since each rank
    may have copies of other KV."""
    cache.writing_check(write_back=True)
    cache.loading_check(finish_count=len(cache.cache_controller.ack_load_queue))


def abort_at_once(abort: Callable[..., None], scheduler: Any, request: Any) -> None:
    """Wraps the scheduler's abort. SGLang ends a request whose grammar is compiled at its next step, which a paused
    engine does not make. A request that merely waits ends at once, so these wait from now on."""
    manager = scheduler.grammar_manager
    ended = [one for one in manager.grammar_queue if request.abort_all or one.rid.startswith(request.rid)]
    for one in ended:
        one.grammar.cancel()
        manager.grammar_queue.remove(one)
        scheduler.waiting_queue.append(one)
    abort(scheduler, request)
