"""The contract of receiving weights: the calls by which the worker brings weights into its engine.

Received weights are staged in host memory beside the model, in every rank, under the name `staging`, which is never
used twice. `EngineAdapter.swap` then puts them in the place of the served weights.

The methods block, so the worker calls them on a thread: all but `weight_spec` and `received`. Errors are those of
`worker.engines.base`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import Any

from rl_plane._util.tasks import Cancelled
from rl_plane.protocol.update_requests import CanaryLimits, PreparedReply, ReceiveRequest
from rl_plane.protocol.versions import TensorSpec
from worker.receive.received_bytes import ByteCount


class ReceivesWeights(ABC):
    """Receives weights and offers them to peers. `Receiver` does this for a model in the worker's process,
    `WeightsInRanks` for ranks that are processes of their own."""

    @abstractmethod
    def weight_spec(self) -> Mapping[str, TensorSpec]:
        """Every tensor that a full checkpoint must hold, by its checkpoint name."""

    @abstractmethod
    def open(self, staging: str, request: ReceiveRequest, limits: CanaryLimits | None = None) -> None:
        """Opens the delivery in every rank and checks everything that needs none of its bytes. Touches nothing.

        `staging`: a name that was not used before. `limits`: what a `canary.json` has to fit. A request without a
        transport asks for the kept copy of each rank, whose bytes `receive` hashes again. Raises InvalidRequest or
        InvalidWeights. NotAtBase, also from `receive`: there is no such copy, or it was damaged and is dropped."""

    @abstractmethod
    def receive(self, staging: str, cancelled: Cancelled) -> PreparedReply:
        """Receives what `open` opened under this name, complete and verified, while generation continues.

        Ends early with an EngineFailed when `cancelled()` is true. Raises InvalidWeights for weights that don't fit.
        When it raises, nothing stays staged or open. An engine with rank processes reports what each staged as `ranks`.

        With `in_place` the tensors overwrite the served weights as they arrive. The engine is paused. When this raises,
        its weights are of no version; when it returns, `set_version` follows."""

    @abstractmethod
    def receive_part(self, staging: str, part: Mapping[str, Any], cancelled: Cancelled) -> int:
        """Announces tensors that a running `receive` gets now, as `ReceivePart` describes them. Returns when every rank
        has staged them: how many tensors are still missing. When it raises, that `receive` ends too."""

    def received(self) -> ByteCount | None:
        """The bytes that have come of the update that is being received. None: the engine does not count them."""
        return None

    @abstractmethod
    def cached_digest(self) -> str | None:
        """The digest of the version of which every rank keeps a copy in host memory (`ReceiveRequest.keeps_copy`). None
        if there is none, or if ranks differ."""

    @abstractmethod
    def discard(self, staging: str) -> None:
        """Frees what is opened or staged under this name. A name that is not in use is no error."""

    @abstractmethod
    def offer(self, adapters: Collection[str] = ()) -> list[dict[str, Any]]:
        """Offers the kept copy of the base weights, and the copies of the adapters with these digests, to other
        workers. Returns where they fetch each, `{digest, transport}`. Drops the copies of other adapters."""

    def relay_addresses(self) -> list[tuple[str, int]]:
        """The address and port at which peers fetch an update while this worker receives it, for each host of the
        engine, by node rank. It listens from now on. Empty: no transport of this engine serves peers."""
        return []

    @abstractmethod
    def init_transport(self, config: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Sets a transport up in every rank. Returns a row per rank, `{rank, …}`."""

    @abstractmethod
    def destroy_transport(self, backend: str, group: str | None = None) -> list[dict[str, Any]]:
        """Takes a transport down in every rank; with `group`, only that group of it. Returns a row per rank."""
