"""A Delivery of one version whose tensors come from several ranks of a trainer, each of which sends its own share.

A request has `shares: [{rank, …}, …]` in place of a transport's own fields. Each share is the rest of such a request.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rl_plane._util.tasks import Cancelled, never
from rl_plane.errors import InvalidRequest, InvalidWeights, PlaneError
from rl_plane.protocol.versions import HostTensor, TensorSpec
from rl_plane.transports.base import Delivery
from rl_plane.transports.packed_delivery import PackedDelivery
from rl_plane.weights.manifest import Manifest

SHARES = "shares"
MAX_SHARES = 1024
"""The most shares of a version: some more than a trainer has owners."""
LOOK_S = 0.5
"""Seconds between two looks at `cancelled`, while no share has a tensor ready."""
END_S = 60.0
"""Seconds that `close` waits for the threads of the shares, each of which ends within its transport's own bound."""

Named = tuple[str, HostTensor]


class MergedDelivery(Delivery):
    """The tensors of all shares, in the order in which they arrive. Each share is received on a thread."""

    def __init__(self, shares: Mapping[int, PackedDelivery], lanes: int) -> None:
        """Makes the delivery. Raises InvalidWeights if two shares have a tensor of the same name.

        Args:
            shares: the opened shares by the rank of their owner. They belong to this delivery from now on.
            lanes: how many shares are received at once.
        """
        self._shares = shares
        self._lanes = lanes
        self._coming: queue.SimpleQueue[_Handed | None] = queue.SimpleQueue()
        self._ending = threading.Event()
        self._threads: list[threading.Thread] = []
        self._error: Exception | None = None
        manifests = [one.manifest for one in shares.values()]
        digests = [one.tensor_digests for one in manifests]
        known = {name: value for one in digests if one is not None for name, value in one.items()}
        merged = Manifest(
            tuple(bucket for one in manifests for bucket in one.buckets),
            None,
            None if any(one is None for one in digests) else known,
        )
        self.specs: Mapping[str, TensorSpec] = merged.specs
        if len(self.specs) < sum(len(one.specs) for one in manifests):
            self.close()
            raise InvalidWeights(
                "two ranks of the trainer own a tensor of the same name",
                field=f"transport.{SHARES}",
                fix="publish the weights again",
            )
        self.tensor_digests: Mapping[str, str] | None = merged.tensor_digests
        self.digest: str | None = merged.digest
        self.refetchable = all(one.refetchable for one in shares.values())

    def tensors(self, cancelled: Cancelled = never) -> Iterator[Named]:
        waiting = iter(self._shares.items())
        lock = threading.Lock()
        lanes = min(self._lanes, len(self._shares))
        for _ in range(lanes):
            lane = threading.Thread(
                target=self._receive, args=(waiting, lock, cancelled), name="share", daemon=True
            )
            self._threads.append(lane)
            lane.start()
        while lanes:
            try:
                handed = self._coming.get(timeout=LOOK_S)
            except queue.Empty:
                continue  # each share looks at `cancelled`, and has its own bound
            if handed is None:
                lanes -= 1
                continue
            yield handed.tensor
            handed.taken.set()
            if self._error is not None:
                break
        if self._error is not None:
            raise self._error

    def _receive(
        self, waiting: Iterator[tuple[int, PackedDelivery]], lock: threading.Lock, cancelled: Cancelled
    ) -> None:
        """Receives one share after another, and hands over each tensor. A tensor's memory is lent until it is taken."""

        def ended() -> bool:
            return self._ending.is_set() or cancelled()

        try:
            while True:
                with lock:
                    rank, share = next(waiting, (-1, None))
                if share is None or self._error is not None:
                    return
                self._receive_share(rank, share, ended)
        finally:
            self._coming.put(None)

    def _receive_share(self, rank: int, share: PackedDelivery, ended: Cancelled) -> None:
        share.algorithm, share.places = self.algorithm, self.places
        try:
            for tensor in share.tensors(ended):
                handed = _Handed(tensor)
                self._coming.put(handed)
                while not tensor[1].owned and not handed.taken.wait(LOOK_S):
                    if self._ending.is_set():
                        return
        except Exception as error:
            self._error = self._error or _of_rank(rank, error)
            self._ending.set()

    def close(self) -> None:
        self._ending.set()
        for share in self._shares.values():
            share.close()
        for thread in self._threads:
            thread.join(END_S)


class _Handed:
    """A tensor that a thread hands over, until it is taken."""

    def __init__(self, tensor: Named) -> None:
        self.tensor = tensor
        self.taken = threading.Event()


def open_shares(
    backend: str,
    request: Mapping[str, Any],
    lanes: int,
    open_one: Callable[[Mapping[str, Any]], PackedDelivery],
) -> MergedDelivery:
    """Opens each share of a request by `open_one`. After an error none is open, and the error names the rank."""
    shares = _checked_shares(backend, request)
    opened: dict[int, PackedDelivery] = {}
    with contextlib.ExitStack() as on_error:
        for rank, share in shares:
            try:
                opened[rank] = open_one(share)
            except PlaneError as error:
                raise _of_rank(rank, error) from error
            on_error.callback(opened[rank].close)
        merged = MergedDelivery(opened, lanes)
        on_error.pop_all()
    return merged


def _checked_shares(backend: str, request: Mapping[str, Any]) -> Sequence[tuple[int, Mapping[str, Any]]]:
    given = request[SHARES]
    others = sorted(request.keys() - {"backend", SHARES})
    if others:
        raise InvalidRequest(
            f"{others[0]} is given beside {SHARES}",
            field=f"transport.{others[0]}",
            fix="put it into each share, or leave the shares out",
        )
    if not isinstance(given, list) or not 0 < len(given) <= MAX_SHARES:
        raise _refuse(f"must be a list of 1 to {MAX_SHARES}")
    found: dict[int, Mapping[str, Any]] = {}
    for one in given:
        rank = one.get("rank") if isinstance(one, Mapping) else None
        if type(rank) is not int or rank < 0 or rank in found or SHARES in one:
            raise _refuse("must each be an object with a `rank` of its own")
        found[rank] = {**{key: value for key, value in one.items() if key != "rank"}, "backend": backend}
    return list(found.items())


def _refuse(what: str) -> InvalidRequest:
    return InvalidRequest(
        f"transport.{SHARES} {what}", field=f"transport.{SHARES}", fix="pass on what the publisher gave"
    )


def _of_rank(rank: int, error: Exception) -> Exception:
    """The error of one share, with the rank that owns it."""
    if not isinstance(error, PlaneError):
        return error
    return type(error)(f"the share of the trainer's rank {rank}: {error.message}", **error.facts)
