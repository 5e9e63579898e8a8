"""Connections by which the processes of a group notice that one of them ends.

gloo does not always report a death. So each rank holds a connection to the trainer. A process that gives up sends its
reason there, and the kernel closes the connection when a process ends. A rank proves that it knows the group's secret,
which comes in the body of `init_transport`. A trainer that has formed its group itself, with
torch (`form: torch`), has no such connections: there each rank holds one to the trainer's store, and sends nothing on
it.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import selectors
import socket
import time
from collections.abc import Callable
from typing import Any

from rl_plane._util.forks import not_for_children
from rl_plane._util.listening import listen_at
from rl_plane.errors import InvalidRequest, Unavailable
from rl_plane.transports.group.rank_layout import FORM_AGAIN, MAX_WORLD_SIZE, Place

CONNECT_TIMEOUT_S = 5.0
"""The time to connect to the trainer in seconds. The trainer listens before any worker is asked to come. torch's own
connections to the store have the group's time-out: each asks a name server, which may be slow."""
CONNECT_AGAIN_S = 0.1
"""Seconds between two tries to reach a trainer that does not listen yet."""
WATCH_S = 1.0
"""`watch` ends at most so many seconds after its condition."""
STORE_SILENT = "the trainer's store does not answer"
MAX_REASON_BYTES = 4096
MAX_RANK_CHARS = len(str(MAX_WORLD_SIZE))
HELLO_S = 5.0
"""The time in seconds in which a new connection must say which rank it is. A rank says so at once."""
STRANGERS = 64
"""The most open connections that have not said which rank they are. Each may be silent for HELLO_S."""
ACCEPT_AGAIN_S = 0.2
"""Seconds to wait after a failed accept: without descriptors the next one fails at once."""
SECRET_BYTES = 16
"""The length of a group's secret. 128 random bits can't be guessed."""
BACKLOG = 4096
"""Connections that may wait for an accept, since all ranks come at once. Linux allows so many by default."""


class PeerLiveness:
    """Connections between the trainer and each rank of the fleet.

    A rank says who it is, and proves it. After that either side sends at most its reason for giving up. The trainer
    closes a connection that is of no rank of the group, or of a rank that is connected already. So it never has more
    connections than ranks and STRANGERS. Once every rank is connected, the trainer does not listen any more.
    """

    secret: str = ""
    """The trainer's secret for this group."""

    def __init__(
        self,
        listener: socket.socket | None,
        *lines: socket.socket,
        hello_s: float = HELLO_S,
        strangers: int = STRANGERS,
    ) -> None:
        self._listener = listener
        self._hello_s = hello_s
        self._most_strangers = strangers
        self._lines = list(lines)
        self._says = True
        self._strangers: dict[socket.socket, float] = {}
        """Connections that have not said who they are, each with the time at which it is closed."""
        self._ranks: set[str] = set()
        """The ranks that have said who they are."""
        self._selector = selectors.DefaultSelector()
        for one in (listener, *lines):
            if one is not None:
                not_for_children.add(one)
                self._selector.register(one, selectors.EVENT_READ, "its trainer" if one in lines else None)

    @classmethod
    def of_trainer(cls, host: str, *, hello_s: float = HELLO_S, strangers: int = STRANGERS) -> PeerLiveness:
        """Listens in the trainer, at any free port, with a new secret."""
        listener = listen_at(host, backlog=BACKLOG)
        listener.setblocking(False)
        lines = cls(listener, hello_s=hello_s, strangers=strangers)
        lines.secret = secrets.token_hex(SECRET_BYTES)
        return lines

    @classmethod
    def of_rank(cls, place: Place, timeout_s: float = CONNECT_TIMEOUT_S) -> PeerLiveness | None:
        """Connects a rank to its trainer. `timeout_s`: how long a trainer of form torch may take until it listens."""
        if place.form == "torch":
            lines = cls(None, _connected_within((place.master_address, place.master_port), timeout_s))
            lines._says = False  # the trainer's store would take a text for a request
            return lines
        if place.lifeline_port is None:
            return None
        address = (place.master_address, place.lifeline_port)
        line = connected(address, "lifeline_port", "the trainer's lifelines do not answer")
        try:
            line.sendall(hello(place.secret, place.group, place.rank))
        except OSError as error:
            line.close()
            raise Unavailable(f"the trainer's lifeline broke: {error}", fix=FORM_AGAIN) from error
        return cls(None, line)

    @property
    def port(self) -> int:
        assert self._listener is not None, "only the trainer listens"
        return int(self._listener.getsockname()[1])

    def watch(
        self,
        group: str,
        ended: Callable[[], object],
        look_s: float = WATCH_S,
        world_size: int = MAX_WORLD_SIZE,
    ) -> str:
        """Blocks until a process of the group has given up or died, and returns the reason.

        Returns "" once `ended()` is true. `world_size` counts the trainer, too.
        """
        while not ended():
            for key, _ in self._selector.select(look_s):
                line: Any = key.fileobj
                if self._listener is not None and line is self._listener:
                    self._accept(self._listener)
                elif line.fileno() >= 0 and (why := self._heard(line, key.data, group, world_size)):
                    return why
            self._close_strangers()
        return ""

    def _accept(self, listener: socket.socket) -> None:
        try:
            line = listener.accept()[0]
        except OSError:  # the peer has gone again, or there are no descriptors left
            time.sleep(ACCEPT_AGAIN_S)
            return
        not_for_children.add(line)
        self._lines.append(line)
        self._strangers[line] = time.monotonic() + self._hello_s
        self._selector.register(line, selectors.EVENT_READ)

    def _close_strangers(self) -> None:
        """Closes connections whose time is over, and the oldest beyond STRANGERS."""
        now, over = time.monotonic(), len(self._strangers) - self._most_strangers
        for place, (line, until) in enumerate(list(self._strangers.items())):
            if place < over or until < now:
                self._drop(line)

    def _drop(self, line: socket.socket) -> None:
        self._selector.unregister(line)
        del self._strangers[line]
        self._lines.remove(line)
        line.close()

    def _heard(self, line: socket.socket, who: str | None, group: str, world_size: int) -> str:
        try:
            said = line.recv(MAX_REASON_BYTES).decode(errors="replace")
        except OSError:
            said = ""
        if who is None:
            first, _, said = said.partition("\n")
            rank = first.rpartition(" ")[0].rpartition(" ")[2]
            if rank in self._ranks or not _is_rank(rank, world_size) or not self._proves(first, group, int(rank)):
                self._drop(line)
                return ""
            self._ranks.add(rank)
            del self._strangers[line]
            self._selector.modify(line, selectors.EVENT_READ, who := f"rank {rank}")
            if len(self._ranks) == world_size - 1:
                self._stop_listening()
            return said
        return said or f"{who} is gone"

    def _proves(self, first: str, group: str, rank: int) -> bool:
        wanted = hello(self.secret, group, rank).rstrip(b"\n")
        return hmac.compare_digest(first.encode(), wanted)

    def _stop_listening(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            self._selector.unregister(listener)
            listener.close()
        for line in list(self._strangers):
            self._drop(line)

    def end(self, why: str) -> None:
        """Sends the reason to the other side, and ends `watch`."""
        for line in list(self._lines):
            with contextlib.suppress(OSError):
                if self._says:
                    line.send(why.encode()[:MAX_REASON_BYTES])
                line.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for one in (self._listener, *self._lines):
            if one is not None:
                one.close()
        self._selector.close()


def hello(secret: str, group: str, rank: int) -> bytes:
    """The first line that a rank sends: `GROUP RANK PROOF`. The proof is an HMAC-SHA256 of the words before it."""
    who = f"{group} {rank}"
    proof = hmac.new(secret.encode(), who.encode(), "sha256").hexdigest()
    return f"{who} {proof}\n".encode()


def _is_rank(said: str, world_size: int) -> bool:
    """True for the number of a rank of the fleet, written without leading zeros or signs."""
    return (
        len(said) <= MAX_RANK_CHARS and said.isdecimal() and str(int(said)) == said and 0 < int(said) < world_size
    )


def connected(address: tuple[str, int], field: str, what: str) -> socket.socket:
    """Connects, or raises InvalidRequest for `field`, with a message that begins with `what`."""
    try:
        connection = socket.create_connection(address, CONNECT_TIMEOUT_S)
    except (OSError, UnicodeError) as error:
        raise InvalidRequest(
            f"{what} at {address[0]}:{address[1]}: {getattr(error, 'strerror', None) or error}",
            field=field,
            fix="let the trainer's sender listen first, at an address that the workers reach",
        ) from error
    return connection


def check_reach(place: Place) -> None:
    """Raises InvalidRequest if the store of a trainer of form plane, which listens before its workers come, can't be
    reached. The trainer's lifelines are not asked: it takes their connections only once a worker joins."""
    if place.form == "torch":
        return
    connected((place.master_address, place.master_port), "master_port", STORE_SILENT).close()


def _connected_within(address: tuple[str, int], timeout_s: float) -> socket.socket:
    """Connects to a trainer that may not listen yet."""
    until = time.monotonic() + timeout_s
    while True:
        try:
            return connected(address, "master_port", STORE_SILENT)
        except InvalidRequest:
            if time.monotonic() > until:
                raise
        time.sleep(CONNECT_AGAIN_S)
