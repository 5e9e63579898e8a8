"""The URLs that the operator allows a worker to fetch.

A worker must not be made to read what only its own machine reaches, such as a cloud's metadata service. So each URL,
also one to which a redirect leads, must be below a prefix that the operator has given.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import SplitResult, unquote, urlsplit

from rl_plane.errors import InvalidRequest
from rl_plane.weights.rooted_files import listed

MAX_URL_CHARS = 8192
"""The longest URL. Signed URLs have up to 2,000 characters."""
DECODINGS = 3
"""A path is looked at as it is, and after each of so many decodings: a server may decode more than once."""

PORTS = {"http": 80, "https": 443}

Origin = tuple[str, str, int]
"""Scheme, host and port: where a header of the request may go."""


@dataclass(frozen=True, slots=True)
class UrlPrefix:
    """A prefix that the operator allows: URLs of one scheme, host and port, at or below one path."""

    origin: Origin
    path: str

    @classmethod
    def parse(cls, text: str) -> UrlPrefix:
        """Raises ValueError if the text is no prefix."""
        parts = split_url(text)
        if parts.query:
            raise ValueError("has a query")
        return cls(origin_of(parts), unquote(parts.path).rstrip("/"))

    def covers(self, parts: SplitResult) -> bool:
        path = unquote(parts.path)
        return origin_of(parts) == self.origin and (path == self.path or path.startswith(f"{self.path}/"))


@dataclass(frozen=True, slots=True)
class Allowed:
    """All URLs that the operator allows."""

    prefixes: tuple[UrlPrefix, ...]
    texts: tuple[str, ...]

    @classmethod
    def of(cls, texts: Iterable[str]) -> Allowed:
        """Raises InvalidRequest if a text is no prefix."""
        prefixes = {}
        for text in texts:
            try:
                prefixes[text] = UrlPrefix.parse(text)
            except ValueError as error:
                raise InvalidRequest(
                    f"the prefix {shown(text)[:200]!r} {error}",
                    field="weight_url",
                    fix="give a scheme, a host and perhaps a path: https://bucket.example/weights",
                ) from None
        return cls(tuple(prefixes.values()), tuple(prefixes))

    def check(self, url: str, at: str) -> SplitResult:
        """Returns the parts of an allowed URL. `at`: the field of the request that has it, or has led to it."""
        try:
            parts = split_url(url)
        except ValueError as error:
            raise InvalidRequest(
                f"{at} {error}", field=at, fix="give an https:// or http:// URL of a file, or of a folder of files"
            ) from None
        if any(prefix.covers(parts) for prefix in self.prefixes):
            return parts
        allowed = listed(self.texts) if self.texts else "none is given"
        raise InvalidRequest(
            f"this worker may not fetch {shown(url)!r}: the operator allows {allowed}",
            field=at,
            fix="start the workers with --weight-url PREFIX for the place of the weights (RL_PLANE_WEIGHT_URLS)",
        )


def split_url(text: str) -> SplitResult:
    """Splits a URL. Raises ValueError for a URL that could mean two things. The message continues "the URL …"."""
    if len(text) > MAX_URL_CHARS:
        raise ValueError(f"has {len(text)} characters, more than {MAX_URL_CHARS}")
    if not text.isascii() or not text.isprintable() or " " in text or "\\" in text:
        raise ValueError("has a space, a backslash or a character that must be percent-encoded")
    parts = urlsplit(text)
    if parts.scheme not in PORTS:
        raise ValueError("is no http:// or https:// URL")
    if "@" in parts.netloc:
        raise ValueError("has a user or a password in it: use a header")
    if not parts.hostname or parts.port == 0:  # .port raises ValueError beyond 65535
        raise ValueError("names no host")
    if parts.fragment:
        raise ValueError("has a fragment (#)")
    path = parts.path
    for _ in range(1 + DECODINGS):
        if any(segment in (".", "..") for segment in path.replace("\\", "/").split("/")):
            raise ValueError("has . or .. in its path")
        path = unquote(path)
    return parts


def origin_of(parts: SplitResult) -> Origin:
    return parts.scheme, parts.hostname or "", parts.port or PORTS[parts.scheme]


def shown(url: str) -> str:
    """The URL as messages show it: without the query, which may hold a signature."""
    return url.partition("?")[0]
