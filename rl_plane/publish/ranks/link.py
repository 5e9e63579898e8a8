"""Connections between rank 0 of a trainer and its other ranks, by which one version has one outcome on all ranks.

Rank 0 sends commands, and the other ranks reply. Both sides send a beat each second, with the rank's step: the number
of tensors that it has gathered. So a rank that dies is noticed at once, and a rank that hangs within a bound. The error
names the rank.

    rank 0 → rank   {hello}           rank → rank 0   {rank, proof}
                    {beat: step}                      {beat: step}
                    {version, call, op, body}         {version, call, value} or {version, call, error}
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from typing import Any

from rl_plane._util.accepting import Acceptor, hang_up
from rl_plane._util.forks import not_for_children
from rl_plane._util.framing import read_frame, send_frame
from rl_plane._util.listening import listen_at
from rl_plane.errors import DeadlineExceeded, PlaneError, Unavailable, error_from_wire
from rl_plane.publish.publish_options import PublishLimits

BEAT_S = 1.0
"""Seconds between two beats."""
LOOK_S = 0.05
"""Seconds between two looks at the other ranks, in a wait for something else."""
SEND_S = 30.0
"""The time for one message in seconds. A rank reads each message at once, unless its process hangs."""
HELLO_S = 10.0
"""The time in seconds in which a new connection must prove which rank it is."""
MAX_HELLO_BYTES = 1024
"""A hello has about 90 bytes."""
STRANGERS = 64
"""The most connections without a proof beyond the trainer's ranks, which may all come at once."""
SECRET_BYTES = 16
BEGIN = 0
"""The call of the first message of a version, by which a rank begins it without a command."""

BEGUN = "begun"
"""The first command of a version, which no rank answers: rank 0 has come to publish it."""

INTERRUPTS = ("close", "abort")
"""Commands that a rank obeys at once, in the middle of another one."""

REACHABLE = (
    "on rank 0 set MASTER_ADDR to an address of its machine that the other ranks reach, or give options={'host': "
    "ADDRESS} if the transport has this option"
)
"""The fix if the other ranks can't reach rank 0, or if rank 0 finds no address to tell them."""
EQUALLY_OFTEN = "call publish equally often on every rank, and start the trainer again"
RESTART = "look at that rank's own log; start the trainer again if the rank is gone"


class Line:
    """One connection, with a thread that reads it."""

    def __init__(self, connection: socket.socket, who: str, heard: Callable[[Line, dict[str, Any]], None]) -> None:
        """Begins to read. `who`: the other end. `heard`: called with each message but beats, on the reading thread."""
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(SEND_S), 0))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        not_for_children.add(connection)
        self._connection = connection
        self._sending = threading.Lock()
        self._heard = heard
        self.who = who
        self.gone = False
        """The connection has ended."""
        self.step = 0
        """The last step that the other end has come to."""
        self.heard_at = self.moved_at = time.monotonic()
        threading.Thread(target=self._read, name="rl-plane-ranks", daemon=True).start()

    def send(self, message: dict[str, Any]) -> None:
        """Sends a message. An error only marks the connection as ended."""
        try:
            with self._sending:
                send_frame(self._connection, message)
        except OSError:
            self.end()

    def _read(self) -> None:
        with contextlib.suppress(OSError, EOFError, ValueError):
            while True:
                message = read_frame(self._connection)
                self.heard_at = time.monotonic()
                step = message.get("beat")
                if step is None:
                    self.moved_at = self.heard_at
                    self._heard(self, message)
                elif step != self.step:
                    self.step, self.moved_at = step, self.heard_at
        self.end()
        with self._sending:  # a thread that sends has the descriptor
            self._connection.close()
        self._heard(self, {})

    def end(self) -> None:
        self.gone = True
        hang_up(self._connection)

    def failure(self, silent_s: float) -> PlaneError | None:
        """The error of a rank that has died, or whose process hangs."""
        if self.gone:
            return Unavailable(f"{self.who} of the trainer has died, or has ended its publisher", fix=RESTART)
        silent = time.monotonic() - self.heard_at
        if silent > silent_s:
            return DeadlineExceeded(f"{self.who} of the trainer hangs: silent for {silent:.0f} s", fix=RESTART)
        return None


class _Beats:
    """Sends the beats of this rank, on a thread, until `stop`."""

    def __init__(self, lines: Callable[[], Collection[Line]], step: Callable[[], int]) -> None:
        self._stop = threading.Event()
        self._lines, self._step = lines, step
        threading.Thread(target=self._beat, name="rl-plane-ranks", daemon=True).start()

    def _beat(self) -> None:
        while not self._stop.wait(BEAT_S):
            for line in self._lines():
                if not line.gone:
                    line.send({"beat": self._step()})

    def stop(self) -> None:
        self._stop.set()


class LeadLink:
    """Rank 0's end of all connections. Used by one thread at a time, but for `tell`."""

    def __init__(
        self,
        host: str,
        ranks: int,
        limits: PublishLimits,
        *,
        hello_s: float = HELLO_S,
        strangers: int = STRANGERS,
    ) -> None:
        self.ranks = ranks
        self.limits = limits
        self.step = 0
        """The step that this rank has come to."""
        self.secret = secrets.token_hex(SECRET_BYTES)
        listener = listen_at(host)
        not_for_children.add(listener)
        self.address: tuple[str, int] = listener.getsockname()[:2]
        self._hello_s = hello_s
        self._lines: dict[int, Line] = {}
        self._unheard: dict[int, dict[str, Any]] = {}
        """The last command for each rank that has not connected yet."""
        self._messages: dict[int, deque[dict[str, Any]]] = {rank: deque() for rank in range(1, ranks)}
        self._changed = threading.Condition()
        self._beats = _Beats(lambda: list(self._lines.values()), lambda: self.step)
        self._acceptor = Acceptor(listener, self._greet, "rl-plane-ranks", ranks + strangers)
        self._acceptor.start()

    def _greet(self, connection: socket.socket) -> None:
        """Takes a connection as a rank's, or closes it."""
        try:
            rank = self._proved(read_frame(connection, MAX_HELLO_BYTES, within_s=self._hello_s))
        except (OSError, EOFError, ValueError):
            rank = None
        with self._changed:
            if not self._acceptor.take(connection) or rank is None or rank in self._lines:
                connection.close()
                return
            line = self._lines[rank] = Line(connection, f"rank {rank}", self._heard_from(rank))
            unheard = self._unheard.pop(rank, None)
            whole = len(self._lines) == self.ranks - 1
            self._changed.notify_all()
        if whole:
            self._acceptor.close()
        if unheard is not None:
            line.send(unheard)

    def _proved(self, hello: dict[str, Any]) -> int | None:
        """The rank of a hello. None: the hello does not prove that it is a rank of this trainer."""
        rank = hello.get("rank")
        if type(rank) is not int or not 0 < rank < self.ranks:
            return None
        proof = str(hello.get("proof")).encode()
        return rank if hmac.compare_digest(proof, proof_of(self.secret, rank).encode()) else None

    def _heard_from(self, rank: int) -> Callable[[Line, dict[str, Any]], None]:
        def heard(line: Line, message: dict[str, Any]) -> None:
            with self._changed:
                if message:
                    self._messages[rank].append(message)
                self._changed.notify_all()

        return heard

    def tell(self, rank: int, command: dict[str, Any]) -> None:
        """Sends a command to a rank. If the rank has not connected yet, it gets the last command when it connects. May
        be called from any thread."""
        with self._changed:
            line = self._lines.get(rank)
            if line is None:
                self._unheard[rank] = command
        if line is not None:
            line.send(command)

    def replies(self, version: int, call: int, ranks: Collection[int] | None = None) -> dict[int, Any]:
        """Waits until these ranks (None: all) have replied to a call. Raises the first error, with the rank's name."""
        wanted = set(self._messages if ranks is None else ranks)
        found: dict[int, dict[str, Any]] = {}
        asked = time.monotonic()
        while True:
            with self._changed:
                for rank in wanted - found.keys():
                    reply = self._reply(rank, version, call)
                    if reply is not None:
                        found[rank] = reply
                failed = next((rank for rank in sorted(found) if "error" in found[rank]), None)
                if failed is not None:
                    raise _named(failed, found[failed]["error"])
                if len(found) == len(wanted):
                    return {rank: found[rank].get("value") for rank in sorted(found)}
                self._changed.wait(LOOK_S)
            self.check()
            self._check_moving(wanted - found.keys(), asked)

    def _reply(self, rank: int, version: int, call: int) -> dict[str, Any] | None:
        """The rank's reply, if it has come. Replies to earlier versions and commands are dropped."""
        waiting = self._messages[rank]
        while waiting:
            message = waiting.popleft()
            if message.get("version") == version and message.get("call") == call:
                return message
        return None

    def reported(self, version: int, only_broken: bool = False) -> PlaneError | None:
        """An error that a rank has reported of this version, and that no call has raised. `only_broken`: of a rank that
        can't gather any more."""
        with self._changed:
            for rank, waiting in self._messages.items():
                for message in waiting:
                    counts = message.get("version") == version and "error" in message
                    if counts and (message.get("broken") or not only_broken):
                        return _named(rank, message["error"])
        return None

    def check(self) -> None:
        """Raises if a rank has died, or if its process hangs."""
        for rank in range(1, self.ranks):
            line = self._lines.get(rank)
            failure = None if line is None else line.failure(self.limits.silent_s)
            if failure is not None:
                raise failure

    def _check_moving(self, ranks: Collection[int], since: float) -> None:
        now, bound = time.monotonic(), self.limits.ranks_s
        missing = [rank for rank in ranks if rank not in self._lines]
        if missing and now - since > bound:
            raise DeadlineExceeded(
                f"rank {missing[0]} of the trainer has not come to publish within {bound:g} s", fix=RESTART
            )
        lines = {rank: self._lines[rank] for rank in ranks if rank in self._lines}
        stuck = {rank: line for rank, line in lines.items() if now - max(since, line.moved_at) > bound}
        if stuck and len(stuck) == len(lines):
            raise self._stuck(stuck)

    def check_step(self, since: float, what: str, version: int) -> None:
        """Raises if a rank has died or can't gather, or if this rank has waited since `since` for too long."""
        self.check()
        broken = self.reported(version, only_broken=True)
        if broken is not None:
            raise broken
        if time.monotonic() - since > self.limits.ranks_s:
            behind = {rank: line for rank, line in self._lines.items() if line.step < self.step}
            raise (
                self._stuck(behind)
                if behind
                else DeadlineExceeded(f"{what} did not end within {self.limits.ranks_s:g} s", fix=RESTART)
            )

    def _stuck(self, lines: Mapping[int, Line]) -> PlaneError:
        """The error that names the rank which is furthest behind."""
        rank, line = min(lines.items(), key=lambda one: (one[1].step, one[1].heard_at))
        return DeadlineExceeded(
            f"rank {rank} of the trainer hangs: no step beyond {line.step} for more than {self.limits.ranks_s:g} s",
            fix=RESTART,
        )

    def close(self) -> None:
        self._beats.stop()
        self._acceptor.close()
        with self._changed:
            lines = list(self._lines.values())
        for line in lines:
            line.end()


class FollowingRankLink:
    """The end of another rank."""

    def __init__(self, address: tuple[str, int], secret: str, rank: int, limits: PublishLimits) -> None:
        self.limits = limits
        self.rank = rank
        self.step = 0
        self.interrupt: Callable[[dict[str, Any]], None] = lambda message: None
        """Obeys a command of INTERRUPTS, on the reading thread."""
        self._commands: deque[dict[str, Any]] = deque()
        self._begun = 0
        """The last version of which rank 0 has sent a command."""
        self._changed = threading.Condition()
        try:
            connection = socket.create_connection(address, HELLO_S)
            send_frame(connection, {"rank": rank, "proof": proof_of(secret, rank)})
        except OSError as error:
            raise Unavailable(
                f"rank {rank} can't reach rank 0 of the trainer at {address[0]}:{address[1]}: {error}",
                fix=REACHABLE,
            ) from error
        self._line = Line(connection, "rank 0", self._heard)
        self._beats = _Beats(lambda: [self._line], lambda: self.step)

    def _heard(self, line: Line, message: dict[str, Any]) -> None:
        if message.get("op") in INTERRUPTS:
            self.interrupt(message)
        with self._changed:
            if message:
                self._commands.append(message)
            self._changed.notify_all()

    def reply(
        self, version: int, call: int, value: Any = None, error: BaseException | None = None, broken: bool = False
    ) -> None:
        """Answers a call. `broken`: this rank can't gather any more."""
        message: dict[str, Any] = {"version": version, "call": call}
        if error is None:
            self._line.send({**message, "value": value})
        else:
            self._line.send({**message, "error": wire_of(error), "broken": broken})

    def next_command(self, version: int, begins_within_s: float | None = None) -> dict[str, Any]:
        """Waits for rank 0's next command for this version. Commands for earlier versions are dropped.

        Args:
            version: the number of the version that this rank publishes.
            begins_within_s: seconds in which rank 0 must come to publish it. None: rank 0 has come, or its coming is
                bounded otherwise.

        Raises:
            Unavailable: rank 0 has died, or has gone on to a later version.
            DeadlineExceeded: rank 0 hangs, or does not come to publish.
        """
        asked = time.monotonic()
        while True:
            with self._changed:
                while self._commands and self._commands[0]["version"] <= version:
                    command = self._commands.popleft()
                    self._begun = command["version"]
                    if self._begun == version and command["op"] not in (BEGUN, *INTERRUPTS):
                        return command
                if self._commands:
                    raise Unavailable(
                        f"rank 0 of the trainer publishes its version {self._commands[0]['version']}, and rank "
                        f"{self.rank} its version {version}",
                        fix=EQUALLY_OFTEN,
                    )
                self._changed.wait(LOOK_S)
                if self._commands:
                    continue
            self.check()
            late = begins_within_s is not None and time.monotonic() - asked > begins_within_s
            if late and self._begun != version:
                raise DeadlineExceeded(
                    f"rank 0 of the trainer has not come to publish within {begins_within_s:g} s", fix=RESTART
                )

    def check(self) -> None:
        """Raises if rank 0 has died, or if its process hangs."""
        failure = self._line.failure(self.limits.silent_s)
        if failure is not None:
            raise failure

    def close(self) -> None:
        self._beats.stop()
        self._line.end()


def proof_of(secret: str, rank: object) -> str:
    """The proof by which a rank shows that it belongs to this trainer."""
    return hmac.new(secret.encode(), f"rank {rank}".encode(), "sha256").hexdigest()


def wire_of(error: BaseException, who: str = "") -> dict[str, Any]:
    """An error as it travels between ranks. `who`: put before an error that the plane has not made."""
    if isinstance(error, PlaneError):
        return error.to_wire()
    return PlaneError(f"{who}{type(error).__name__}: {error}").to_wire()


def _named(rank: int, wire: dict[str, Any]) -> PlaneError:
    """The error of another rank, with the rank's name."""
    error = error_from_wire(wire)
    return type(error)(f"rank {rank}: {error.message}", **error.facts)
