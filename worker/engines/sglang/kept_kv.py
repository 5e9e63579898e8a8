"""Requests that keep their KV while the weights change, and prefixes that no other weights may use. The module
runs on the scheduler's thread, in every rank.

SGLang finds a cached prefix by its tokens and by a salt. A swap that keeps KV leaves KV of older weights in the cache.
So it sets a new salt, and requests that begin later find only KV that was computed after the swap.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

OWN_SALT = "rl_plane_own_salt"
"""Attribute of a request: the salt that its caller gave."""


class KeptKv:
    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._salt: str | None = None
        add = scheduler._add_request_to_queue

        def add_salted(request: Any, *more: Any, **named: Any) -> Any:
            if not request.kv.holds_kv:
                self._salt_request(request)
            return add(request, *more, **named)

        scheduler._add_request_to_queue = add_salted

    @property
    def possible(self) -> bool:
        """Reports whether no step is under way in the paused scheduler, so that its requests can stay as they are. That
        is not so while a prompt is computed in pieces, in a pipeline, and where SGLang prepares a step during
        another one."""
        from sglang.srt.runtime_context import get_parallel

        scheduler = self._scheduler
        return bool(
            scheduler._engine_paused
            and not scheduler.enable_overlap
            and get_parallel().pp_size == 1
            and scheduler.chunked_req is None
            and not any(request.kv.holds_kv for request in scheduler.waiting_queue)
        )

    def keep(self, salt: str) -> list[str] | None:
        """Returns the ids of the requests that keep their KV. All others compute theirs later. None: they can't keep
        it."""
        scheduler = self._scheduler
        if not self.possible:
            return None
        self._salt = salt
        for request in scheduler.waiting_queue:
            self._salt_request(request)
        return sorted(request.rid for request in scheduler.collect_inflight_reqs() if not request.finished())

    def room_for(self, sequences: Sequence[list[int]]) -> int:
        """The number of tokens that can be scored at once beside the requests. 0: a sequence does not fit."""
        from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
        from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator

        scheduler = self._scheduler
        pool = scheduler.token_to_kv_pool_allocator
        if not self.possible or type(pool) not in (TokenToKVPoolAllocator, PagedTokenToKVPoolAllocator):
            return 0
        free = pool.available_size() + scheduler.tree_cache.evictable_size() - len(sequences) * pool.page_size
        fits = free >= max(map(len, sequences)) and scheduler.req_to_token_pool.available_size() >= 1
        return int(free) if fits else 0

    def _salt_request(self, request: Any) -> None:
        """Replaces the salt of a request that holds no KV."""
        if self._salt is None:
            return
        own = getattr(request, OWN_SALT, request.cache_salt)
        setattr(request, OWN_SALT, own)
        request.cache_salt = f"{self._salt} {own or ''}"
