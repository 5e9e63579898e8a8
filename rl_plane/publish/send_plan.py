"""From one trainer to one fleet: the update that each version is, and the sender by which it goes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rl_plane.errors import PlaneError
from rl_plane.protocol.update_requests import UpdateWeights
from rl_plane.protocol.validation import parse_body
from rl_plane.publish.fleet_access import BlockingFleet
from rl_plane.sync import call_bound_s
from rl_plane.transports.registry import candidates, installed, is_passed_over, make_sender, none_can_be_made
from rl_plane.transports.sender_base import Sender, Surroundings, members

Encoding = Literal["auto", "full", "delta"]

DRAIN_S = 600.0
"""How long `close` and the next `publish` wait for the one under way, beside its update's own bounds: a large model on
a slow way."""


@dataclass(frozen=True, slots=True)
class Told:
    """What a trainer has said of every version; see WeightPublisher."""

    transport: str
    root: Path | None
    options: Mapping[str, Any]
    adapter: str | None
    policy: dict[str, Any]
    cast: bool
    bucket_bytes: int | None
    workers: int
    wait_s: float
    stays: bool

    def body(self, version: str | None) -> dict[str, Any]:
        """The update, but for its transport. InvalidRequest for what is wrong in it."""
        body: dict[str, Any] = {"cast": self.cast, "policy": self.policy}
        if version is not None:
            body["version"] = version
        if self.adapter is not None:
            body["target"] = {"kind": "lora", "op": "load", "name": self.adapter}
        parse_body(UpdateWeights, {**body, "transport": {"backend": "any"}})
        return body

    def bound_s(self) -> float:
        """Of one version."""
        return DRAIN_S + call_bound_s("update_weights", {"policy": self.policy})


class Way:
    """On rank 0."""

    def __init__(self, fleet: BlockingFleet, told: Told) -> None:
        self.fleet = fleet
        self.told = told
        self.backend: str | None = None
        """What the last version went by."""
        self.slow = False
        """Do bytes take longer by it, to the fleet of that moment, than to compare them with those before?"""
        self._sender: Sender | None = None
        self._colocated = True
        """Were all workers on this machine when it was made?"""
        self._replaced: Sender | None = None
        """The one before, from which workers heal until a version by the new one is committed."""

    @property
    def changes_sender(self) -> bool:
        """What the one before has sent goes with it, once a version by the new one is committed."""
        return self._replaced is not None

    def workers(self) -> list[Mapping[str, Any]]:
        return members(self.fleet.run("workers", {"min_workers": self.told.workers, "wait_s": self.told.wait_s}))

    def digest_of(self, label: str) -> str | None:
        """Of what is committed, if an update has brought it under that label and every worker serves it: one that does
        not may have nowhere to fetch it from. None too where the fleet can't say: to publish tells why."""
        try:
            self.workers()
            state = self.fleet.run("state", {})
        except PlaneError:
            return None
        adapter = self.told.adapter
        version = state["version"] if adapter is None else state["adapters"].get(adapter)
        brought = state["ready"] and version is not None and version["label"] == label and version["sequence"] > 0
        return str(version["digest"]) if brought else None

    def is_refetchable(self, digest: str | None) -> bool:
        """Does the fleet say of what was committed with this digest that a worker can fetch it again?"""
        told = self.fleet.run("updates", {})["updates"]
        found = (one["refetchable"] for one in told if one["digest"] == digest and one["outcome"] == "committed")
        return bool(next(found, False))

    def ready_sender(self) -> Sender:
        """Of the best way that the fleet of this moment can take, and that can be had here."""
        workers, told = self.workers(), self.told
        with_root = told.root is not None
        backends = candidates(told.transport, workers, installed(), with_root=with_root, stays=told.stays)
        around = Surroundings(
            self.fleet.run,
            told.root,
            told.options,
            self.fleet.nats_url,
            self.fleet.namespace,
            self.fleet.component,
            told.adapter,
            told.stays,
        )
        colocated = around.colocated(workers)
        # One that was made for this machine alone can't be reached from another, unless its address was told.
        far = self._colocated and not colocated and "host" not in told.options
        refused: dict[str, PlaneError] = {}
        for backend in backends:
            if self._sender is not None and backend == self.backend and not far:
                self.slow = _is_slow(self._sender, colocated)
                return self._sender
            try:
                sender = make_sender(backend, around)  # what it refuses leaves the one before
            except PlaneError as error:
                if not is_passed_over(error):
                    raise
                refused[backend] = error
                continue
            if self._replaced is None:
                self._replaced = self._sender
            elif self._sender is not None:
                self._sender.destroy()  # nothing that it brought was committed
            self._sender, self.backend, self._colocated = sender, backend, colocated
            self.slow = _is_slow(sender, colocated)
            return sender
        raise none_can_be_made(refused)

    def committed(self) -> None:
        """From here on nobody heals from the sender before."""
        replaced, self._replaced = self._replaced, None
        if replaced is not None:
            replaced.destroy()

    def close(self) -> None:
        for sender in (self._sender, self._replaced):
            if sender is not None:
                sender.destroy()
        self._sender = self._replaced = None
        self.fleet.close()


def _is_slow(sender: Sender, colocated: bool) -> bool:
    told: bool | None = getattr(sender, "slow", None)
    return not colocated if told is None else told
