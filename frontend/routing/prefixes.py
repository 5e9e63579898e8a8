"""A bounded table of the workers that have computed the beginning of a prompt before.

A prompt is hashed at lengths that grow by a third or a half. So a prompt of any length has few entries, and at least
two thirds of the common beginning of two prompts is found. A wrong entry costs time, never a token."""

from __future__ import annotations

import itertools
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import msgpack

from rl_plane.protocol.generation import CHARS_PER_TOKEN, GenerateRequest

FIRST_TOKENS = 64
"""A few of an engine's cache blocks. Computing a shorter beginning again costs less than a search."""
MAX_TOKENS = 32_768
"""The number of tokens that are hashed. Prompts with the same first 32,768 tokens mostly are one conversation."""
MIN_SHARE = 1 / 3
"""The share of a prompt that a worker must have computed before; by the hashed lengths, that is half of it. So a system
prompt that all requests share draws no request to one worker."""
MAX_ENTRIES = 65_536
"""The latest four thousand prompts, with about 15 entries each: 10 MB."""
MAX_HOLDERS = 4
"""The number of workers that an entry names, the latest ones."""


LENGTHS = tuple(
    length
    for doubled in range((MAX_TOKENS // FIRST_TOKENS).bit_length())
    for length in (FIRST_TOKENS << doubled, FIRST_TOKENS * 3 // 2 << doubled)
    if length <= MAX_TOKENS
)
"""The numbers of tokens at which a prompt is hashed."""


@dataclass(frozen=True, slots=True)
class Beginnings:
    """The hashes of one prompt: `hashes[i]` is that of its first `LENGTHS[i]` tokens."""

    hashes: tuple[int, ...]
    size: int
    """The number of tokens of the prompt, at most MAX_TOKENS."""


def beginnings_of(request: GenerateRequest) -> Beginnings | None:
    """The hashes of a request's prompt. None: it is too short. Only requests of one adapter and one salt share a
    cache."""
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
    """Hash → workers. The hashes are Python's own, of 64 bits, and are valid in this process alone."""

    def __init__(self, max_entries: int = MAX_ENTRIES) -> None:
        self._max_entries = max_entries
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
        while len(self._holders) > self._max_entries:
            self._holders.popitem(last=False)

    def holders(self, beginnings: Beginnings) -> tuple[int, list[str]]:
        """The longest known beginning in tokens, and the workers that have it."""
        for at in range(len(beginnings.hashes) - 1, -1, -1):
            if LENGTHS[at] < MIN_SHARE * beginnings.size:
                break
            found = [
                key for key, life in self._holders.get(beginnings.hashes[at], ()) if self._lives.get(key) == life
            ]
            if found:
                return LENGTHS[at], found
        return 0, []

    def forget(self, instance_id: str) -> None:
        """The worker's cache is empty now."""
        self._lives.pop(instance_id, None)

    def __len__(self) -> int:
        return len(self._holders)
