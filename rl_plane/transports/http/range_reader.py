"""Reads files by HTTP range requests: redirects, retries, and the checks that a file stays the same.

A read continues at the byte where a connection broke. It gives up when too few bytes come for `STALL_S`. Each thread
has connections of its own.
"""

from __future__ import annotations

import ipaddress
import logging
import re
import socket
import ssl
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from types import TracebackType
from urllib.parse import SplitResult, urljoin

from rl_plane.errors import EngineFailed, InvalidRequest, InvalidWeights, Unavailable
from rl_plane.transports.http.wire import Source, signed_until
from rl_plane.weights.allowed_urls import Allowed, Origin, origin_of, shown

log = logging.getLogger("rl_plane.transports.http.range_reader")

CONNECT_S = 10.0
"""The longest time in seconds to connect, TLS included."""
SILENCE_S = 10.0
"""The longest time in seconds without a byte on one connection. Then the read continues on a new connection."""
STALL_S = 25.0
"""The longest time in seconds in which fewer than PROGRESS_BYTES come, all tries together. Shorter than the time that
an abort waits for a receive to end (`worker.reconcile.staged_updates.ABORT_WAIT_S`)."""
PROGRESS_BYTES = 1 << 16
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
"""Seconds before a try. The pause doubles with each try that brought nothing."""
HEAD_BYTES = 1 << 16
"""The bytes of the first request: the header of most files."""
PIECE_BYTES = 1 << 18
"""The most bytes of one read from a connection."""
MAX_REDIRECTS = 5

REDIRECTS = frozenset((301, 302, 303, 307, 308))
GONE = frozenset((400, 401, 403, 404, 410))
"""The answers for a file that is not there, or whose signature or key is not valid. S3 answers 403 for both, and GCS
answers 400 for a signature that has ended."""
TEMPORARY = frozenset((408, 425, 429, 500, 502, 503, 504))
_CONTENT_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})")


class Refused(InvalidWeights):
    """The server does not give the file. `status`: its answer."""

    status: int = 0


class Temporary(Exception):
    """One try failed, and the next may succeed."""

    def __init__(self, why: str, wait_s: float = 0.0) -> None:
        """`wait_s`: how long the server asks to wait."""
        super().__init__(why)
        self.wait_s = wait_s


@dataclass
class RemoteFile:
    """A file as its first answer described it."""

    name: str
    url: str
    target: str | None = None
    """The URL to which redirects have led."""
    nbytes: int = 0
    etag: str | None = None
    modified: str | None = None
    head: bytes = field(default=b"", repr=False)
    """The first bytes."""

    @property
    def if_range(self) -> str | None:
        """The validator of a conditional range. A weak ETag can't be one."""
        if self.etag is not None:
            return None if self.etag.startswith("W/") else self.etag
        return self.modified

    def is_same(self, response: HTTPResponse, nbytes: int) -> bool:
        if nbytes != self.nbytes:
            return False
        if self.etag is not None:
            return response.getheader("ETag") == self.etag
        return response.getheader("Last-Modified") == self.modified


class RangeReader:
    """Reads the files of one source. Any thread may call any method."""

    def __init__(self, source: Source, allowed: Allowed, stall_s: float) -> None:
        self._source = source
        self.field = source.field
        self._allowed = allowed
        self.stall_s = stall_s
        urls = source.urls.values() if source.base is None else (source.base,)
        self._origins = {origin_of(allowed.check(url, source.field)) for url in urls}
        """The origins to which the headers of the request go. A redirect may lead to others."""
        self._tls: ssl.SSLContext | None = None
        self._own = threading.local()
        self._lock = threading.Lock()
        self._open: dict[HTTPConnection, socket.socket] = {}
        self._closed = threading.Event()

    # ---- files ----

    def locate(self, name: str, url: str) -> RemoteFile:
        """Reads the first bytes of a file. Raises Refused if the server does not give it."""
        file, patience = RemoteFile(name, url), Patience(self, name)
        while True:
            try:
                return self._located(file, patience)
            except Temporary as why:
                patience.failed(why)

    def _located(self, file: RemoteFile, patience: Patience) -> RemoteFile:
        with self._asked(file, {"Range": f"bytes=0-{HEAD_BYTES - 1}"}) as answer:
            response = answer.response
            if response.status == 416:  # an empty file has no range
                return file
            first, last, file.nbytes = self._range_of(file, response)
            if first != 0 or last != min(HEAD_BYTES, file.nbytes) - 1:
                raise self.refuse(file, "comes with another range than was asked for", "use another server")
            file.etag, file.modified = response.getheader("ETag"), response.getheader("Last-Modified")
            if file.etag is None and file.modified is None:
                raise self.refuse(
                    file,
                    "comes without an ETag and without Last-Modified, so a change of the file would go unseen",
                    "use a server that sends one of them",
                )
            head = bytearray()
            while len(head) <= last:
                piece = answer.read(last + 1 - len(head))
                head += piece
                patience.came(len(piece))
            file.head = bytes(head)
        return file

    def stream(self, file: RemoteFile, start: int, end: int) -> RangeStream:
        """Reads the bytes from `start` up to `end`, in order."""
        return RangeStream(self, file, start, end)

    def begin(self, file: RemoteFile, start: int, end: int) -> Answer:
        """Asks for a range of a located file. Raises InvalidWeights if the file has changed."""
        headers = {"Range": f"bytes={start}-{end - 1}"}
        if file.if_range is not None:
            headers["If-Range"] = file.if_range
        answer = self._asked(file, headers)
        try:
            response = answer.response
            if response.status in (200, 412, 416):
                raise self.changed(file)
            first, last, nbytes = self._range_of(file, response)
            if not file.is_same(response, nbytes):
                raise self.changed(file)
            if first != start or not start <= last < end:
                raise self.refuse(file, "comes with another range than was asked for", "use another server")
        except BaseException:
            answer.drop()
            raise
        return answer

    def _range_of(self, file: RemoteFile, response: HTTPResponse) -> tuple[int, int, int]:
        """The first and the last byte of the answer, and the length of the file."""
        coding = response.getheader("Content-Encoding", "identity").strip().lower()
        if coding not in ("identity", ""):
            raise self.refuse(
                file,
                f"comes compressed ({coding[:32]}), so its bytes have no places",
                "switch compression off at the server for these files, or store them without Content-Encoding",
            )
        if response.status == 200:
            raise self.refuse(
                file,
                "comes whole: its server does not answer range requests",
                "use a server that does, such as nginx, S3 or GCS (python -m http.server does not)",
            )
        match = _CONTENT_RANGE.fullmatch(response.getheader("Content-Range", ""))
        if response.status != 206 or match is None:
            raise self.refuse(
                file, f"comes with status {response.status} and no range with a length", "use another server"
            )
        return int(match[1]), int(match[2]), int(match[3])

    # ---- requests ----

    def _asked(self, file: RemoteFile, headers: Mapping[str, str]) -> Answer:
        """Sends one request, and follows redirects. Returns an answer of 200, 206, 412 or 416.

        Raises:
            Temporary: the next try may succeed.
            Refused: the server does not give the file.
        """
        url = file.target or file.url
        for _ in range(MAX_REDIRECTS + 1):
            answer = self._send(url, headers)
            status = answer.response.status
            if status in (200, 206, 412, 416):
                file.target = url if url != file.url else None
                return answer
            answer.drop()
            if status in REDIRECTS:
                url = self._redirected(file, url, answer.response)
            elif status in GONE and file.target is not None:
                # The place to which a redirect led is signed for a short time: ask for it again.
                file.target, url = None, file.url
            elif status in TEMPORARY:
                raise Temporary(f"the server answers {status}", _retry_after(answer.response))
            else:
                raise self._refused(file, url, status)
        raise self.refuse(file, f"is behind more than {MAX_REDIRECTS} redirects", "give the URL at which they end")

    def _send(self, url: str, headers: Mapping[str, str]) -> Answer:
        parts = self._allowed.check(url, self.field)
        connection = self._connection(parts)
        own = self._source.headers if origin_of(parts) in self._origins else {}
        target = f"{parts.path or '/'}{'?' if parts.query else ''}{parts.query}"
        answer = Answer(self, connection)
        # Each byte of a head may come late, so that the time-out of the socket does not bound all of it.
        timer = threading.Timer(self.stall_s, self._cut, [connection])
        timer.daemon = True
        timer.start()
        try:
            connection.request("GET", target, headers={"Accept-Encoding": "identity", **own, **headers})
            answer.response = connection.getresponse()
        except (OSError, HTTPException) as error:
            answer.drop()
            raise self.broken(error) from None
        except BaseException:
            answer.drop()
            raise
        finally:
            timer.cancel()
        return answer

    def _connection(self, parts: SplitResult) -> HTTPConnection:
        """This thread's connection to the URL's host."""
        open_here: dict[Origin, HTTPConnection] = self._own.__dict__.setdefault("connections", {})
        scheme, host, port = origin = origin_of(parts)
        if (connection := open_here.get(origin)) is not None and connection.sock is not None:
            return connection
        if scheme == "https":
            if self._tls is None:
                self._tls = ssl.create_default_context()
            connection = HTTPSConnection(host, port, timeout=CONNECT_S, context=self._tls)
        else:
            connection = HTTPConnection(host, port, timeout=CONNECT_S)
        try:
            connection.connect()
            self._check_peer(connection.sock, host)
            connection.sock.settimeout(SILENCE_S)
        except ssl.SSLCertVerificationError as error:
            connection.close()
            raise InvalidRequest(
                f"the certificate of {host} is not trusted here: {error.verify_message}",
                field=self.field,
                fix="set SSL_CERT_FILE for the worker, and use a name that the certificate has",
            ) from None
        except (OSError, HTTPException) as error:
            connection.close()
            raise self.broken(error) from None
        except BaseException:
            connection.close()
            raise
        open_here[origin] = connection
        with self._lock:
            self._open[connection] = connection.sock
        if self._closed.is_set():  # closed while it connected
            self.drop(connection)
            raise EngineFailed("the read was given up")
        return connection

    def _check_peer(self, connected: socket.socket, host: str) -> None:
        """Refuses a name that leads to this machine or to its link, where metadata services are."""
        address = ipaddress.ip_address(connected.getpeername()[0].partition("%")[0])
        address = getattr(address, "ipv4_mapped", None) or address
        with suppress(ValueError):
            ipaddress.ip_address(host.partition("%")[0])
            return  # the operator has allowed the address itself
        if (address.is_loopback or address.is_link_local or address.is_unspecified) and host != "localhost":
            raise InvalidRequest(
                f"the name {host!r} leads to {address}, an address of this machine or of its link",
                field=self.field,
                fix="use the address itself in the URL and in --weight-url, if it is meant",
            )

    def _redirected(self, file: RemoteFile, url: str, response: HTTPResponse) -> str:
        target = urljoin(url, response.getheader("Location", ""))
        parts = self._allowed.check(target, self.field)
        if url.startswith("https:") and parts.scheme != "https":
            raise self.refuse(file, "is redirected from https to http", "let the server redirect to https")
        return target

    def broken(self, error: Exception) -> Exception:
        if self._closed.is_set():
            return EngineFailed("the read was given up")
        words = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return Temporary(f"the connection failed ({words[:200]})")

    # ---- refusals ----

    def refuse(self, file: RemoteFile, what: str, fix: str) -> InvalidWeights:
        return InvalidWeights(
            f"{file.name!r} at {shown(file.url)} {what}", field=self.field, file=file.name, fix=fix
        )

    def changed(self, file: RemoteFile) -> InvalidWeights:
        return self.refuse(
            file,
            "changed while it was read, or the servers behind its URL hold different files",
            "don't write to a published file: publish another one, and update to that",
        )

    def _refused(self, file: RemoteFile, url: str, status: int) -> Refused:
        until = signed_until(url)
        ended = ""
        if until is not None and until < time.time():
            ended = f"; its signature ended at {time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime(until))} UTC"
        error = Refused(
            f"source_gone: the server answers {status} for {file.name!r} at {shown(url)}{ended}",
            field=self.field,
            file=file.name,
            fix="check the URL and the headers; if signed URLs have expired, sign them again, and update with the new "
            "URLs",
        )
        error.status = status
        return error

    # ---- the end ----

    def drop(self, connection: HTTPConnection) -> None:
        """Closes a connection that is broken, or in the middle of an answer."""
        with self._lock:
            self._open.pop(connection, None)
        connection.close()

    def _cut(self, connection: HTTPConnection) -> None:
        """Ends what another thread does with a connection."""
        with self._lock:
            held = self._open.get(connection)
            if held is not None:
                _shut(held)

    def wait(self, seconds: float) -> None:
        """Sleeps. Raises EngineFailed if the reader is closed meanwhile."""
        if self._closed.wait(seconds):
            raise EngineFailed("the read was given up")

    def interrupt(self) -> None:
        """Ends every read under way, on any thread. Later reads fail."""
        self._closed.set()
        with self._lock:
            for held in self._open.values():
                _shut(held)

    def close(self) -> None:
        """Closes the connections. No thread reads any more. May be called twice."""
        self.interrupt()
        with self._lock:
            connections, self._open = list(self._open), {}
        for connection in connections:
            connection.close()


class Answer:
    """One answer of a server, whose body is read in pieces."""

    response: HTTPResponse

    def __init__(self, reader: RangeReader, connection: HTTPConnection) -> None:
        self._reader = reader
        self._connection = connection

    def read(self, most: int) -> bytes:
        """Reads some bytes, at least one. Raises Temporary if the connection breaks."""
        try:
            piece = self.response.read1(min(most, PIECE_BYTES))
        except (OSError, HTTPException) as error:
            raise self._reader.broken(error) from None
        if not piece:
            raise Temporary("the connection ended too early")
        return piece

    def done(self) -> None:
        """Keeps the connection for the next request if the whole answer was read."""
        if self.response.length == 0 and not self.response.will_close:
            self.response.close()
        else:
            self.drop()

    def drop(self) -> None:
        if hasattr(self, "response"):
            self.response.close()
        self._reader.drop(self._connection)

    def __enter__(self) -> Answer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, where: TracebackType | None) -> None:
        if kind is None:
            self.done()
        else:
            self.drop()


class RangeStream:
    """Reads one range of a file in order, over as many connections as it takes."""

    def __init__(self, reader: RangeReader, file: RemoteFile, start: int, end: int) -> None:
        self.at = start
        """The place of the next byte."""
        self.end = end
        self._reader = reader
        self._file = file
        self._patience = Patience(reader, file.name)
        self._answer: Answer | None = None

    def read_into(self, view: memoryview) -> int:
        """Reads some bytes into the beginning of `view`. Returns how many."""
        while True:
            try:
                if self._answer is None:
                    self._answer = self._reader.begin(self._file, self.at, self.end)
                piece = self._answer.read(min(len(view), self.end - self.at))
                break
            except Temporary as why:
                self.close()
                log.info("%s: %s at byte %d", self._file.name, why, self.at)
                self._patience.failed(why)
        view[: len(piece)] = piece
        self.at += len(piece)
        if self.at == self.end and self._answer is not None:
            self._answer.done()
            self._answer = None
        self._patience.came(len(piece))
        return len(piece)

    def close(self) -> None:
        answer, self._answer = self._answer, None
        if answer is not None:
            answer.drop()


class Patience:
    """Decides how long a read waits for its next bytes, and how long it pauses between two tries."""

    def __init__(self, reader: RangeReader, name: str) -> None:
        self._reader = reader
        self._name = name
        self._begin()

    def _begin(self) -> None:
        self._since = time.monotonic()
        self._came = 0
        self._pause = FIRST_PAUSE_S

    def came(self, nbytes: int) -> None:
        """Notes that bytes came. Raises Unavailable if they are too few for the time."""
        self._came += nbytes
        if self._came >= PROGRESS_BYTES:
            self._begin()
        elif time.monotonic() > self._since + self._reader.stall_s:
            raise self._stalled("the server is too slow")

    def failed(self, why: Temporary) -> None:
        """Waits before the next try. Raises Unavailable if there is no time for one."""
        pause = max(self._pause, why.wait_s)
        if time.monotonic() + pause > self._since + self._reader.stall_s:
            raise self._stalled(str(why), why.wait_s or None)
        self._reader.wait(pause)
        self._pause = min(2 * self._pause, LONGEST_PAUSE_S)

    def _stalled(self, why: str, retry_after_s: float | None = None) -> Unavailable:
        return Unavailable(
            f"{self._came} bytes of {self._name!r} came in {self._reader.stall_s:g} s: {why}",
            field=self._reader.field,
            fix="check the server and the network, then update again",
            retry_after_s=retry_after_s,
        )


def _shut(held: socket.socket) -> None:
    with suppress(OSError):  # it is closed, or was never connected
        # The method of the class: that of a TLS socket takes the TLS state away from the thread that reads.
        socket.socket.shutdown(held, socket.SHUT_RDWR)


def _retry_after(response: HTTPResponse) -> float:
    """The seconds that the server asks to wait; 0 without such a header."""
    text = response.getheader("Retry-After", "").strip()
    if text.isdigit() and len(text) < 10:
        return float(text)
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except (TypeError, ValueError, OverflowError):
        return 0.0
