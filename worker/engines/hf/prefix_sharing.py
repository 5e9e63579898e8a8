"""Keeps the shared prefixes of adapters and `cache_salt`s apart in transformers' continuous batching.

The library names a block by a hash of its tokens and of the block before it. Here the chain of hashes of an adapter's
request begins with a key of that adapter. So only its own requests find its blocks, and none does once the adapter has
another key. A salt makes another key of a key.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

from transformers.generation.continuous_batching.cache_allocators.cache_allocator import compute_block_hash


def salted(key: int | None, salt: str) -> int:
    """The key of requests with this salt, among the requests of `key`."""
    own = hashlib.blake2b(f"{key} {salt}".encode("utf-8", "surrogatepass"), digest_size=8)
    return int.from_bytes(own.digest(), "little")


class PrefixKeys:
    """Replaces the library's search for shared blocks."""

    def __init__(self, cache: Any, key_now: Callable[[str], int | None], is_whole: Callable[[str], bool]) -> None:
        """`key_now`: the key of a request's adapter and salt; None for the base model without a salt. `is_whole`:
        whether the request must compute its whole prompt."""
        self._keys: dict[str, int] = {}  # request → its key when its KV was begun
        self._first: int | None = None  # the key of the running call
        search, mark = cache.search_prefix_match, cache.mark_complete_blocks

        def search_prefix_match(request_id: str, prompt_ids: list[int]) -> int:
            self._first = key_now(request_id)
            if self._first is not None:
                self._keys[request_id] = self._first
            found: int = 0 if is_whole(request_id) else search(request_id, prompt_ids)
            return found

        def mark_complete_blocks(state: Any, complete_blocks: Any) -> None:
            self._first = self._keys.get(state.request_id)
            mark(state, complete_blocks)

        cache.search_prefix_match = search_prefix_match
        cache.mark_complete_blocks = mark_complete_blocks
        for allocator in cache.cache_allocators.values():
            self._take(allocator)

    def keep_only(self, request_ids: Iterable[str]) -> None:
        """Forgets all other requests."""
        if self._keys:
            self._keys = {name: self._keys[name] for name in request_ids if name in self._keys}

    def _take(self, allocator: Any) -> None:
        """Replaces two methods of the library by the same ones with another begin of the chain."""
        ledger, page = allocator.ledger, allocator.tokens_per_page

        def match_prefix_blocks(prompt_ids: list[int]) -> list[int]:
            matched: list[int] = []
            parent = self._first
            for start in range(0, (len(prompt_ids) - 1) // page * page, page):
                parent = compute_block_hash(parent, prompt_ids[start : start + page])
                block = ledger.hash_to_block.get(parent)
                if block is None:
                    break
                matched.append(block)
            return matched

        def mark_complete_blocks(request_id: str, token_ids: list[int], new_blocks: int) -> None:
            table, parent = allocator.block_table[request_id], self._first
            for place, block in enumerate(table):
                known = ledger.block_to_hash.get(block)
                if known is None:
                    tokens = token_ids[place * page : (place + 1) * page]
                    if new_blocks == 0 or len(tokens) < page:
                        break
                    known = compute_block_hash(parent, tokens)
                    new_blocks -= 1
                    same = ledger.register_new_hash(block, known)
                    if same is not None:
                        ledger.acquire(same)
                        table[place] = same
                        if ledger.release(block):
                            allocator.pool.free_blocks(allocator.index, [block])
                parent = known

        allocator.match_prefix_blocks = match_prefix_blocks
        allocator.mark_complete_blocks = mark_complete_blocks
