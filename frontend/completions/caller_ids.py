"""Finds requests by the names that their callers chose: an `X-Request-Id`, vLLM's `request_id`, SGLang's `rid`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class CallerIds:
    """The callers' names of the requests under way here. A name that several requests share means all of them."""

    def __init__(self) -> None:
        self._made: dict[str, list[str]] = {}
        self._given: dict[str, list[str]] = {}

    @contextmanager
    def under(self, given: Iterable[str], made: str) -> Iterator[None]:
        """Registers the names while the request is under way that workers know as `made`."""
        names = {name for name in given if name != made}
        self._given[made] = sorted(names)
        for name in names:
            self._made.setdefault(name, []).append(made)
        try:
            yield
        finally:
            del self._given[made]
            for name in names:
                self._made[name].remove(made)
                if not self._made[name]:
                    del self._made[name]

    def given_to(self, made: str) -> list[str]:
        """The callers' names of the request that workers know as `made`."""
        return self._given.get(made, [])

    def made_of(self, names: Iterable[str]) -> dict[str, list[str]]:
        """Each known name of a request, or of a choice (`<name>-<index>`) → the ids by which workers know it."""
        return {name: made for name in names if (made := self._of(name))}

    def _of(self, name: str) -> list[str]:
        whole, _, index = name.rpartition("-")
        if name not in self._made and whole in self._made and index.isdecimal():
            return [f"{made}-{index}" for made in self._made[whole]]
        return list(self._made.get(name, ()))
