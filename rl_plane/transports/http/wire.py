"""The request of the `http` transport.

A request is `{backend: http, url: BASE}` or `{backend: http, urls: {FILE: URL}}`, with `headers` beside either. Query
strings and headers carry secrets, so messages show a URL without its query.
"""

from __future__ import annotations

import calendar
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from typing import Any
from urllib.parse import parse_qs, urlsplit

from rl_plane.errors import InvalidRequest
from rl_plane.weights.allowed_urls import Allowed, shown
from rl_plane.weights.checkpoint import MAX_FILES, SINGLE_NAME

BACKEND = "http"

MAX_HEADERS = 32
MAX_HEADER_CHARS = 8192
MAX_SOURCE_CHARS = 350_000
"""The longest names, URLs and headers of one request together. The decision record has them for the version and for the
version before, and a NATS message carries the record."""
MAX_NAME_CHARS = 255
"""The longest name of a file."""

_FILE_NAME = re.compile(r"[A-Za-z0-9._-]+")
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_OWN_HEADERS = frozenset(
    [
        "accept-encoding",
        "connection",
        "content-length",
        "expect",
        "host",
        "if-range",
        "range",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    ]
)
"""The headers that the transport itself sends, and the headers that change how a message is read."""
_SIGNED_TIME = "%Y%m%dT%H%M%SZ"


@dataclass(frozen=True, slots=True)
class Source:
    """A checked request."""

    field: str
    """`transport.url` or `transport.urls`."""
    base: str | None
    """The URL of a folder, with a query that each file gets. None: `urls` names every file."""
    urls: Mapping[str, str]
    headers: Mapping[str, str] = dataclass_field(repr=False, default_factory=dict)

    def url_of(self, name: str) -> str | None:
        """The URL of a file. None: the request names no such file."""
        if self.base is None:
            return self.urls.get(name)
        path, mark, query = self.base.partition("?")
        return f"{path.rstrip('/')}/{name}{mark}{query}"

    @property
    def shown(self) -> str:
        """The place of the files, for messages."""
        return shown(self.base) if self.base is not None else f"{len(self.urls)} URLs"


def parse_source(request: Mapping[str, Any], allowed: Allowed) -> Source:
    """Checks the fields of a request, and that the operator allows its URLs."""
    url, urls = request.get("url"), request.get("urls")
    if (url is None) == (urls is None):
        raise InvalidRequest(
            "give url or urls" if url is None else "url and urls are both given",
            field="transport.url",
            fix="url: the folder of the files; or urls: a signed URL for each file",
        )
    headers = _headers(request.get("headers"))
    if urls is None:
        if not isinstance(url, str):
            raise InvalidRequest(
                f"transport.url must be a string, not {type(url).__name__}",
                field="transport.url",
                fix="give the URL of the folder that holds the files",
            )
        parts = allowed.check(url, "transport.url")
        if parts.path.endswith(".safetensors"):
            return Source("transport.url", None, {SINGLE_NAME: url}, headers)
        return Source("transport.url", url, {}, headers)
    if not isinstance(urls, Mapping) or not 0 < len(urls) <= MAX_FILES + 4:
        raise InvalidRequest(
            f"transport.urls must be an object of 1 to {MAX_FILES + 4} files",
            field="transport.urls",
            fix='give a URL for each file: {"model.safetensors": "https://…"}',
        )
    for name, one in urls.items():
        if not is_file_name(name) or not isinstance(one, str):
            raise InvalidRequest(
                f"transport.urls has the entry {str(name)[:MAX_NAME_CHARS]!r}, which is no file name with a URL",
                field="transport.urls",
                fix="name files as they are in a checkpoint's directory: letters, digits, . _ -",
            )
        allowed.check(one, "transport.urls")
    size = sum(len(key) + len(value) for fields in (urls, headers) for key, value in fields.items())
    if size > MAX_SOURCE_CHARS:
        raise InvalidRequest(
            f"transport.urls and transport.headers have {size} characters, more than {MAX_SOURCE_CHARS}",
            field="transport.urls",
            fix="give url, the folder of the files, or write fewer and larger files",
        )
    return Source("transport.urls", None, dict(urls), headers)


def is_file_name(name: Any) -> bool:
    return isinstance(name, str) and len(name) <= MAX_NAME_CHARS and _FILE_NAME.fullmatch(name) is not None


def _headers(given: Any) -> dict[str, str]:
    def refuse(what: str) -> InvalidRequest:
        return InvalidRequest(
            f"transport.headers {what}",
            field="transport.headers",
            fix='give names and values as text: {"Authorization": "Bearer …"}',
        )

    if given is None:
        return {}
    if not isinstance(given, Mapping) or len(given) > MAX_HEADERS:
        raise refuse(f"must be an object of at most {MAX_HEADERS} headers")
    for name, value in given.items():
        if not isinstance(name, str) or not _HEADER_NAME.fullmatch(name[:MAX_HEADER_CHARS]):
            raise refuse("has a name that no header can have")
        if name.lower() in _OWN_HEADERS:
            raise refuse(f"has {name[:64]!r}, which the transport sets itself")
        if not isinstance(value, str) or not value.isascii() or not value.isprintable():
            raise refuse(f"has a value of {name[:64]!r} that is not printable ASCII text")
        if len(name) + len(value) > MAX_HEADER_CHARS:
            raise refuse(f"has {name[:64]!r} with more than {MAX_HEADER_CHARS} characters")
    return dict(given)


def signed_until(url: str) -> float | None:
    """The Unix time at which the signature of a URL ends, for S3 and GCS. None: the URL does not say."""
    query = {key.lower(): values[0] for key, values in parse_qs(urlsplit(url).query).items()}
    for vendor in ("x-amz", "x-goog"):
        signed, seconds = query.get(f"{vendor}-date"), query.get(f"{vendor}-expires", "")
        if signed is not None and seconds.isdigit() and len(seconds) < 10:
            try:
                return calendar.timegm(time.strptime(signed, _SIGNED_TIME)) + float(seconds)
            except ValueError:
                return None
    until = query.get("expires", "")
    return float(until) if until.isdigit() and len(until) < 12 else None
