"""The way to one source's memory: by UCX if UCX reaches the source without TCP, else by a TCP connection."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rl_plane.transports.nixl.reads import Piece
from rl_plane.transports.nixl.tcp_reads import TcpRead, TcpReads
from rl_plane.transports.nixl.wire import in_reach

log = logging.getLogger("rl_plane.transports.nixl.receiver")

END_S = 1.0
"""The time in seconds for the bytes of a connection that was closed to stop."""


@dataclass(frozen=True, slots=True)
class ReadSource:
    """A source, as it has answered."""

    where: tuple[str, int]
    """Its host and port."""
    secret: str
    metadata: bytes
    reach: Any

    def channel(self, agent: Any) -> Channel:
        """Opens the way to its memory. Raises nixl's error if its metadata can't be used."""
        return Channel(agent, self)


class Channel:
    """Reads from one source. Keep it as long as a read is under way."""

    def __init__(self, agent: Any, source: ReadSource, wake: Callable[[], None] = lambda: None) -> None:
        """Raises nixl's error if the source's metadata can't be used. `wake` is called when a read over TCP has ended;
        the end of other reads is seen by looking."""
        self._agent = agent
        self._source = source
        self._wake = wake
        self._tcp: TcpReads | None = None
        self._name = agent.add_remote_agent(source.metadata) if in_reach(source.reach) else None
        self._works = False
        """A read by UCX has ended well."""

    @property
    def by_tcp(self) -> bool:
        return self._name is None

    def begin(self, moves: Sequence[Piece], owner: Any) -> ChannelRead:
        """Begins a read into memory that is registered with the agent. `moves`: from where it reads, each with the
        address here. `owner` keeps the memory from being freed."""
        return ChannelRead(self, moves, owner)

    def leave(self) -> None:
        """Ends the channel, and its reads over TCP."""
        self._leave_ucx()
        self._agent = None
        if self._tcp is not None:
            self._tcp.close()

    def has_ended(self, within_s: float) -> bool:
        """Waits after `leave`, and returns whether no more bytes can arrive over TCP."""
        return self._tcp is None or self._tcp.has_ended(within_s)

    def _begin(self, moves: Sequence[Piece], owner: Any) -> UcxRead | TcpRead:
        if self._name is not None:
            try:
                return UcxRead(self._agent, self._name, moves)
            except Exception as error:  # nixl's errors have no common base
                if self._works:
                    raise
                self._give_up_ucx(error)
        self._tcp = self._tcp or TcpReads(self._source.where, self._source.secret, self._wake)
        return self._tcp.begin(moves, owner)

    def _give_up_ucx(self, why: object) -> None:
        """UCX has no way to the source: the kernel forbids to read another process's memory, for example."""
        log.info("UCX does not reach %s, so its bytes come over TCP: %s", self._source.where[0], why)
        self._leave_ucx()

    def _leave_ucx(self) -> None:
        name, self._name = self._name, None
        if name is not None:
            with contextlib.suppress(Exception):  # the agent has removed it already
                self._agent.remove_remote_agent(name)


class ChannelRead:
    """One read. If a read by UCX fails before any has succeeded, the channel reads everything over TCP from then on,
    and repeats this read."""

    def __init__(self, channel: Channel, moves: Sequence[Piece], owner: Any) -> None:
        self._channel = channel
        self._moves = moves
        self._owner = owner
        self._read = channel._begin(moves, owner)

    @property
    def arrived(self) -> int:
        """Bytes so far. Reads by UCX show them at their end only."""
        return self._read.arrived

    def look(self) -> str:
        """PROC, DONE, or why the read has failed."""
        state = self._read.look()
        channel = self._channel
        if isinstance(self._read, TcpRead) or state == "PROC":
            return state
        if state == "DONE":
            channel._works = True
        elif not channel._works:
            self.release()
            channel._give_up_ucx(state)
            self._read = channel._begin(self._moves, self._owner)
            return "PROC"
        return state

    def release(self) -> None:
        """Frees the read. Bytes may still arrive if it was under way."""
        self._read.release()


class UcxRead:
    """A read by UCX."""

    def __init__(self, agent: Any, name: str, moves: Sequence[Piece]) -> None:
        here = [(address, place[1], 0) for address, place in moves]
        there = [place for _, place in moves]
        self.arrived = 0
        self._nbytes = sum(place[1] for place in there)
        self._agent = agent
        self._handle = agent.initialize_xfer(
            "READ", agent.get_xfer_descs(here, "DRAM"), agent.get_xfer_descs(there, "DRAM"), name
        )
        try:
            self._state: str = agent.transfer(self._handle)
        except BaseException:
            self.release()
            raise

    def look(self) -> str:
        if self._state == "PROC":
            try:
                self._state = self._agent.check_xfer_state(self._handle)
            except Exception as error:  # nixl's errors have no common base
                self._state = str(error) or "ERR"
        if self._state == "DONE":
            self.arrived = self._nbytes
        return self._state

    def release(self) -> None:
        handle, self._handle, self._agent = self._handle, None, None
        if handle is not None:
            with contextlib.suppress(Exception):  # nixl raises if it has to break off the read
                handle.release()
