"""Which workers have computed the beginning of a prompt before: a bounded table of hashes.

A prompt is hashed at lengths that grow by a third or a half, so one of any length has a few entries, and of two
prompts that begin alike at least two thirds of what is alike is found. What is wrong here costs time, never a token.
"""

from __future__ import annotations

import itertools
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import msgpack

from rl_plane.protocol.generation import CHARS_PER_TOKEN, GenerateRequest

FIRST_TOKENS = 64
"""A few of an engine's cache blocks: to compute less again is cheaper than to look for who has it."""
MAX_TOKENS = 32_768
"""Of a prompt that are looked at: whose first 32,768 tokens are alike mostly are the same conversation."""
MIN_SHARE = 1 / 3
"""Of a prompt that a worker must have computed before, which is half of it by the lengths that are looked at: a system
prompt that all share draws nobody to one worker."""
MAX_ENTRIES = 65_536
"""At some 15 for a prompt the latest four thousand; 10 MB."""
MAX_HOLDERS = 4
"""Workers that an entry names, the latest ones."""


def _lengths() -> tuple[int, ...]:
    found, length = [], FIRST_TOKENS
    while length <= MAX_TOKENS:
        found += [length, length + length // 2]
        length *= 2
    return tuple(length for length in found if length <= MAX_TOKENS)


LENGTHS = _lengths()


@dataclass(frozen=True, slots=True)
class Beginnings:
    """Of one prompt: `hashes[i]` of its first `LENGTHS[i]` tokens."""

    hashes: tuple[int, ...]
    size: int
    """Tokens of the prompt, MAX_TOKENS at most."""


def beginnings_of(request: GenerateRequest) -> Beginnings | None:
    """None for a prompt that is too short. Only requests of one adapter and one salt share a cache."""
    salt = (request.adapter, request.cache_salt)
    if request.prompt_token_ids is not None:
        keep = request.truncate_prompt_tokens
        return beginnings(request.prompt_token_ids if keep is None else request.prompt_token_ids[-keep:], salt)
    if request.prompt is not None:
        text = request.prompt[: MAX_TOKENS * CHARS_PER_TOKEN].encode("utf-8", "surrogatepass")
    else:
        text = b"".join(
            msgpack.packb(message, unicode_errors="surrogatepass") for message in request.messages or ()
        )
    return _hashed(text, CHARS_PER_TOKEN, len(text) // CHARS_PER_TOKEN, (*salt, request.messages is None))


def beginnings(token_ids: Sequence[int], salt: tuple[str | None, str | None]) -> Beginnings | None:
    if len(token_ids) < FIRST_TOKENS:
        return None
    packed = array("i", token_ids[:MAX_TOKENS]).tobytes()
    return _hashed(packed, array("i").itemsize, len(token_ids), salt)


def _hashed(data: bytes, per_token: int, size: int, salt: object) -> Beginnings | None:
    found, key, start = [], hash((salt, per_token)), 0
    for length in LENGTHS:
        if length > size:
            break
        key = hash((key, data[start * per_token : length * per_token]))
        found.append(key)
        start = length
    return Beginnings(tuple(found), min(size, MAX_TOKENS)) if found else None


class PrefixTable:
    """The hashes are Python's own, of 64 bits: they mean something in this process only."""

    def __init__(self) -> None:
        self._holders: OrderedDict[int, tuple[tuple[str, int], ...]] = OrderedDict()
        """Hash → (instance id, life of its cache), the latest first."""
        self._lives: dict[str, int] = {}
        self._numbers = itertools.count()

    def note(self, beginnings: Beginnings, instance_id: str) -> None:
        life = self._lives.get(instance_id)
        if life is None:
            life = self._lives[instance_id] = next(self._numbers)
        mine = (instance_id, life)
        for key in beginnings.hashes:
            others = (one for one in self._holders.get(key, ()) if one[0] != instance_id)
            self._holders[key] = (mine, *itertools.islice(others, MAX_HOLDERS - 1))
            self._holders.move_to_end(key)
        while len(self._holders) > MAX_ENTRIES:
            self._holders.popitem(last=False)

    def holders(self, beginnings: Beginnings) -> tuple[int, list[str]]:
        """How many tokens are known, and to whom: those that have the longest of its beginnings."""
        for at in range(len(beginnings.hashes) - 1, -1, -1):
            if LENGTHS[at] < MIN_SHARE * beginnings.size:
                break
            found = [key for key, life in self._holders.get(beginnings.hashes[at], ()) if self._is_warm(key, life)]
            if found:
                return LENGTHS[at], found
        return 0, []

    def forget(self, instance_id: str) -> None:
        """Its cache is empty."""
        self._lives.pop(instance_id, None)

    def _is_warm(self, instance_id: str, life: int) -> bool:
        return self._lives.get(instance_id) == life

    def __len__(self) -> int:
        return len(self._holders)
