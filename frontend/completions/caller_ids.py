"""Requests by the names that their callers gave them: an `X-Request-Id`, vLLM's `request_id`, SGLang's `rid`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class CallerIds:
    """Of the requests that this frontend has under way. A caller's name may be that of several: it means them all."""

    def __init__(self) -> None:
        self._made: dict[str, list[str]] = {}

    @contextmanager
    def under(self, given: Iterable[str], made: str) -> Iterator[None]:
        """While the request that this frontend called `made` is under way."""
        names = {name for name in given if name != made}
        for name in names:
            self._made.setdefault(name, []).append(made)
        try:
            yield
        finally:
            for name in names:
                self._made[name].remove(made)
                if not self._made[name]:
                    del self._made[name]

    def made_of(self, names: Iterable[str]) -> list[str]:
        """As workers know them, a reply's choice (`<name>-<index>`) too; what no caller has named stands for itself."""
        return list(dict.fromkeys(made for name in names for made in self._of(name)))

    def _of(self, name: str) -> list[str]:
        whole, _, index = name.rpartition("-")
        if name not in self._made and whole in self._made and index.isdecimal():
            return [f"{made}-{index}" for made in self._made[whole]]
        return self._made.get(name, [name])
