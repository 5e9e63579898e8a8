"""The parts of a process's `nixl` transport that each of its pulls uses."""

from __future__ import annotations

from typing import Protocol

from rl_plane.transports.nixl.peer_source import PeerSource
from rl_plane.transports.nixl.puller import Puller
from rl_plane.transports.nixl.reads import ReadLimits


class PullContext(Protocol):
    """Lends Pullers to the pulls of one process. `NixlTransport` is one."""

    limits: ReadLimits

    def take(self, host: str) -> Puller:
        """An idle Puller at this machine's address `host`, or a new one."""

    def give_back(self, puller: Puller) -> None:
        """Returns a Puller after an update without an error."""

    def peer_source(self) -> PeerSource:
        """From it other workers read what this process has."""

    def end_relay(self) -> None:
        """Ends the relay of the last update, if there is one."""
