"""The contracts of a transport's two halves: `Sender` in the trainer, `WeightTransport` in the engine.

A transport moves bytes. It knows nothing of engines, versions or commits: digests, checks, staging and the commit are
outside of it. A transport is one folder with `receiver.py`, `sender.py` and, if several modules share a format,
`wire.py`. The sender is missing if no trainer sends by the transport (`http`). `gloo` and `nccl` share the folder
`group`.

One update, on each side:

    trainer (a Sender)                                 engine (a WeightTransport)
    open(manifest) -> the request's `transport`   →    open(request, kind) -> a Delivery
    buffer(0), send(0), buffer(1), send(1), …     →    delivery.tensors(cancelled) yields (name, HostTensor)
    finish(digests)
    close()                                            delivery.close()

Both halves are found by their entry points: the group `rl_plane.transports` names the WeightTransport class, the group
`rl_plane.senders` names a function that takes a SenderContext and returns a Sender. A receiving half alone is enough
for `update_weights` over HTTP or NATS.
"""

from __future__ import annotations

import platform
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from rl_plane._util.tasks import Cancelled
from rl_plane.bus.credentials import NO_CREDENTIALS, NatsCredentials
from rl_plane.errors import InvalidRequest, InvalidWeights, NoWorkers
from rl_plane.protocol.canary import Canary
from rl_plane.protocol.envelope import engine_replies
from rl_plane.protocol.relay import RelayPlan, SourceUse
from rl_plane.protocol.strict_json import load_json_object
from rl_plane.protocol.subjects import DEFAULT_COMPONENT, DEFAULT_NAMESPACE, DEFAULT_NATS_URL
from rl_plane.protocol.update_requests import ReceivePart
from rl_plane.protocol.versions import DEFAULT_ALGORITHM, DigestAlgorithm, HostTensor, TensorSpec
from rl_plane.transports.packing import Buffer, Tensor
from rl_plane.weights.checkpoint import Kind, Places
from rl_plane.weights.manifest import DEFAULT_BUCKET_BYTES, Manifest, PackedBucket, pack
from rl_plane.weights.read_ahead import host_memory
from rl_plane.weights.rooted_files import listed

RunOp = Callable[[str, dict[str, Any]], dict[str, Any]]
"""Runs one op of the fleet: (op, body) to its merged reply. It blocks, and raises the fleet's PlaneError."""

CheckSpecs = Callable[[Mapping[str, TensorSpec], Mapping[str, TensorSpec]], None]
"""`(wanted, offered)`: raises InvalidWeights unless the offered tensors fit the wanted ones."""

# ---- the receiving half ----


@dataclass(frozen=True, slots=True)
class TransportContext:
    """The limits that the operator sets for a receiving half, and the device of the model."""

    weight_roots: tuple[Path, ...] = ()
    """The only directories that a transport may read, with symlinks resolved."""
    nats_url: str = DEFAULT_NATS_URL
    namespace: str = DEFAULT_NAMESPACE
    component: str = DEFAULT_COMPONENT
    """The only namespace and component whose stored objects a transport may read."""
    device: str = "cpu"
    """The device of the model, in torch's notation: that of the first rank for which this process receives."""
    rank_devices: tuple[str, ...] = ()
    """The devices of all ranks for which this process receives. Empty: there is one rank."""
    credentials: NatsCredentials = NO_CREDENTIALS
    """The files by which a transport connects to NATS."""
    weight_urls: tuple[str, ...] = ()
    """The only places that a transport may fetch from by HTTP: prefixes of URLs."""

    def to_wire(self) -> dict[str, Any]:
        roots = [str(root.absolute()) for root in self.weight_roots]
        return {**asdict(self), "weight_roots": roots, "credentials": self.credentials.to_wire()}

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> TransportContext:
        roots, credentials = tuple(map(Path, wire["weight_roots"])), NatsCredentials.from_wire(wire["credentials"])
        tuples = {name: tuple(wire[name]) for name in ("weight_urls", "rank_devices")}
        return cls(**{**wire, **tuples, "weight_roots": roots, "credentials": credentials})


class Delivery(ABC):
    """The tensors of one update, before and while they arrive. Used by one thread, but for `close`."""

    specs: Mapping[str, TensorSpec]
    """Name to dtype and shape of every tensor that will arrive. Known before the first byte."""

    digest: str | None = None
    """The version's digest, if the publisher has stated it. A publisher that sends while it computes states the digest
    at the end: then this is None until the last tensor was taken. The worker computes the digest of the bytes
    anyway."""

    tensor_digests: Mapping[str, str] | None = None
    """Name to hex digest, if the publisher has stated them. Each is there when its tensor is yielded."""

    algorithm: DigestAlgorithm = DEFAULT_ALGORITHM
    """The algorithm of `HostTensor.digest`, if the delivery hashes. The receiver sets it before `tensors`."""

    places: Places | None = None
    """The memory into which the tensors shall go. The receiver sets it before `tensors`.

    A delivery that can write there directly does so: the `data` of the HostTensor is that memory, and its `digest` that
    of the bytes, if the delivery has hashed them on their way. The receiver copies and hashes all others."""

    adapter_config_raw: bytes | None = None
    """The bytes of an adapter's `adapter_config.json`; None for base weights. The digest of its version covers them."""

    refetchable: bool = False
    """True if a worker can fetch the same bytes again later, by the same request, to heal."""

    canary: Canary | InvalidRequest | None = None
    """The numeric canary that the publisher has put beside the weights, or what is wrong with it. None: nothing."""

    sources: Sequence[SourceUse] = ()
    """The bytes that came from each source, after the last tensor. Empty: the transport does not know."""

    @property
    def adapter_config(self) -> Mapping[str, Any] | None:
        """The PEFT config of an adapter; None for base weights. InvalidWeights: it can't be read."""
        if self.adapter_config_raw is None:
            return None
        try:
            return load_json_object(self.adapter_config_raw)
        except ValueError as error:
            raise InvalidWeights(
                f"the adapter's config can't be read: {str(error)[:200]}",
                field="transport",
                fix="publish the weights again",
            ) from error

    @abstractmethod
    def tensors(self, cancelled: Cancelled, /) -> Iterator[tuple[str, HostTensor]]:
        """Yields each tensor of `specs` once, in any order. May be called once.

        The bytes are contiguous, row-major and in host memory. The buffer of a HostTensor that is not `owned` is valid
        until the next tensor is asked for.

        Args:
            cancelled: becomes true, on another thread, when the update is aborted. A delivery that waits for bytes
                calls it at least once a second. Between two tensors the receiver calls it.

        Raises:
            EngineFailed: `cancelled` became true.
            InvalidWeights: what arrives is not what `specs` said.
            Unavailable: the source is gone.
            DeadlineExceeded: nothing arrived within the transport's own bound.
        """

    def close(self) -> None:  # noqa: B027  (a delivery that holds nothing need not close anything)
        """Frees what the delivery holds. Called on every path, perhaps twice, perhaps before the last tensor."""


class PartwiseDelivery(Delivery):
    """A Delivery whose trainer announces its tensors part by part, while `tensors` waits for them.

    `specs` begin as those of the model. Each part's own specs replace them before its bytes arrive, and after the last
    tensor `specs` are those of the tensors that have come.
    """

    def __init__(self) -> None:
        self._specs: dict[str, TensorSpec] = {}
        self.specs: Mapping[str, TensorSpec] = self._specs
        self._came: dict[str, TensorSpec] = {}
        self._wanted: Mapping[str, TensorSpec] = {}
        self._tied: Mapping[str, str] = {}
        self._check_specs: CheckSpecs = lambda wanted, offered: None

    def expect(self, wanted: Mapping[str, TensorSpec], tied: Mapping[str, str], check: CheckSpecs) -> None:
        """States what a full checkpoint must and may hold. Called once, before anything else.

        Args:
            wanted: every tensor that the model needs, by its checkpoint name.
            tied: names that a checkpoint may also hold, each with the wanted tensor to which the model ties it.
            check: compares the specs of a part with the wanted specs.
        """
        self._specs.update(wanted)
        self._wanted, self._tied, self._check_specs = wanted, tied, check

    @abstractmethod
    def receive_part(self, part: ReceivePart, cancelled: Cancelled) -> int:
        """Receives the tensors of one part. Returns how many tensors are still to come.

        Runs on another thread than `tensors`, and returns when `tensors` has yielded the whole part. An error ends the
        update: `tensors` raises it too.
        """

    def _memory_for(self, name: str, spec: TensorSpec) -> memoryview:
        """Returns the place of a tensor, or new memory if it has none."""
        place = None if self.places is None else self.places(name, spec)
        return place if place is not None and place.nbytes == spec.nbytes else host_memory(spec.nbytes)

    def _leave_out_tied(self) -> None:
        """Call it after the last tensor. A tensor that has not come is tied to another one, so `specs` lose it."""
        for name in self._specs.keys() - self._came.keys():
            del self._specs[name]


class WeightTransport(ABC):
    """The receiving half of a transport, in the process that holds the model. Called by one thread at a time."""

    backend: str
    """The name of the entry point, and of `transport.backend` in a request."""

    def __init__(self, context: TransportContext) -> None:  # noqa: B027
        """Makes the transport of one process. Raises Unsupported if it can't work there."""

    def init(self, config: Mapping[str, Any]) -> None:
        """Sets up what outlives one update, such as a group. Idempotent. `config`: the body of `init_transport`."""
        check_fields(self.backend, config)

    def destroy(self) -> None:  # noqa: B027
        """Takes down what `init` has set up. Without `init` it does nothing."""

    def leave(self, name: str) -> None:
        """Leaves this group only. Without such a group it does nothing. InvalidRequest: the transport has no groups."""
        raise InvalidRequest(f"{self.backend} has no groups", field="group", fix="leave it out")

    @abstractmethod
    def open(self, request: Mapping[str, Any], kind: Kind) -> Delivery:
        """Checks all that can be checked without receiving a tensor, and returns the Delivery.

        Args:
            request: the `transport` object of the update, `backend` included. Not to be changed.
            kind: what the update's target needs.

        Raises:
            InvalidRequest: a field of `request` is wrong.
            InvalidWeights: what lies at the source is not usable.
        """


class RelayingTransport(WeightTransport):
    """A WeightTransport by which workers fetch from one another: what a process keeps (see `Receiver.offer`), and an
    update while it arrives.

    Of an update it serves what a delivery has put into its `places`, each tensor once its digest is known to be right.
    It does so until `end_relay`, also after the delivery is closed. A delivery that fails ends it too."""

    @abstractmethod
    def offer(self, tensors: Mapping[str, HostTensor], adapter_config: bytes | None = None) -> Mapping[str, Any]:
        """Lets other workers read these tensors until `withdraw`, beside all that is offered already. Returns the
        `transport` object of their request. `adapter_config`: the `adapter_config.json` of an adapter, as published;
        None: base weights.

        The memory of the tensors is lent: it does not change before `withdraw` returns.
        """

    @abstractmethod
    def withdraw(self, transport: Mapping[str, Any]) -> None:
        """Ends one offer, for which `offer` has returned `transport`. When it returns, no other worker reads those
        tensors. After `destroy` it does nothing."""

    @abstractmethod
    def relay_address(self) -> tuple[str, int]:
        """The host and port at which this process serves its peers. It listens there from now on."""

    @abstractmethod
    def open_relayed(self, request: Mapping[str, Any], kind: Kind, plan: RelayPlan) -> Delivery:
        """Does the same as `open`, for a delivery that takes its bytes as the plan says."""

    @abstractmethod
    def end_relay(self) -> None:
        """Ends what is served. When it returns, no other worker reads the `places`. It may wait for a second."""


def check_fields(backend: str, given: Mapping[str, Any], *known: str) -> None:
    """Raises InvalidRequest for a field that the backend doesn't know. Every backend knows `backend`."""
    unknown = sorted(str(key)[:64] for key in given if key not in ("backend", *known))
    if unknown:
        raise InvalidRequest(
            f"the {backend} transport has no field {listed(unknown)}",
            field=f"transport.{unknown[0]}",
            fix=f"use only {', '.join(sorted(('backend', *known)))}",
        )


# ---- the sending half ----


@dataclass(frozen=True, slots=True)
class SenderContext:
    """The fleet to which a sender sends, and the options of the trainer."""

    run: RunOp
    """Runs one op of the fleet, such as `workers` or `init_transport`."""
    root: Path | None = None
    """A directory that trainer and workers share, if the trainer has named one."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The transport's own options. A sender refuses an option that it doesn't know (`check_options`)."""
    nats_url: str | None = None
    """The URL of the fleet's NATS; None if the trainer has only the frontend's URL."""
    credentials: NatsCredentials = NO_CREDENTIALS
    """The files by which the trainer connects to NATS."""
    adapter: str | None = None
    """The name of the adapter that is published; None for base weights."""
    trainer_stays: bool = True
    """True if the trainer's process lives on after a commit, so that workers may fetch from it."""
    rank: int = 0
    """The rank of this process among those of the trainer that send tensors."""

    def workers(self) -> Sequence[Mapping[str, Any]]:
        """The rows of `GET /v1/rl/workers` at this moment, engines only."""
        return members(self.run("workers", {}))

    def colocated(self, workers: Sequence[Mapping[str, Any]]) -> bool:
        """True if all of these workers run on this machine, with all hosts of their engines."""
        return colocated(workers, platform.node())

    def address(self) -> tuple[str, int]:
        """(host, port) at which workers reach this rank: the options `host` and `port` (0: any free port). Each further
        rank has the next port."""
        host, port = self.options.get("host"), self.options.get("port", 0)
        if host is None and self.colocated(self.workers()):
            host = "127.0.0.1"
        if not isinstance(host, str):
            raise InvalidRequest(
                "some workers run on other machines, and need an address of this one",
                field="options.host",
                fix="options={'host': ADDRESS} (--option host=ADDRESS), an address of this machine",
            )
        if type(port) is not int or not 0 <= port < 1 << 16:
            raise InvalidRequest(f"port is {port!r}", field="options.port", fix="give a free port, or 0")
        return host, port + self.rank if port else 0

    def check_options(self, backend: str, *known: str) -> None:
        """Raises InvalidRequest for an option that the backend doesn't know."""
        unknown = sorted(self.options.keys() - set(known))
        if unknown:
            raise InvalidRequest(
                f"the {backend} transport has no option {unknown[0]!r}",
                field=f"options.{unknown[0]}",
                fix=f"use {', '.join(known)}" if known else "leave it out",
            )

    def keep_option(self, default: int, *, least: int) -> int:
        """The option `keep`: how many versions stay."""
        keep = self.options.get("keep", default)
        if type(keep) is not int or keep < least:
            raise InvalidRequest(f"keep is {keep!r}", field="options.keep", fix=f"give a number, at least {least}")
        return keep

    def publisher(self) -> str:
        """The name of this publisher, the same after a restart. It tells the versions of one publisher from another's.

        The option `publisher`, or this machine's name, the workers' component and what is published.
        """
        name = self.options.get("publisher")
        if "publisher" not in self.options:
            fleets = [f"{one['namespace']}.{one['component']}" for one in self.workers()]
            if not fleets:
                raise NoWorkers("all workers have left", fix="publish again when there are workers")
            name = f"{platform.node()}/{fleets[0]}/{'base' if self.adapter is None else f'adapter {self.adapter}'}"
        if not isinstance(name, str) or not name:
            raise InvalidRequest(
                f"publisher is {name!r}", field="options.publisher", fix="give each publisher a name of its own"
            )
        return name

    def sources(self) -> list[Mapping[str, Any]] | None:
        """The `transport` objects by which a worker fetches what is committed, to heal; None while that is unknown."""
        state = self.run("state", {})
        return None if state["version"] is None else state["sources"]


class Sender(ABC):
    """The sending half of a transport, in the trainer's process. It packs nothing: it lends buffers and sends them.

    All methods block, and run on threads of the publisher, one at a time. Only `close` may come from another thread, in
    the middle of another call: that call then ends with Unavailable.

    A Sender is made by a function that takes a SenderContext (entry point group `rl_plane.senders`). That function
    raises Unsupported if the transport can't work here (a package is missing, for example), and InvalidRequest with the
    field `options.<name>` for a wrong, unknown or missing option. After either error, `auto` tries the next transport.
    """

    backend: str
    """The name of the entry point, and of `transport.backend` in a request."""

    receivers_from: Literal["open", "finish"] = "open"
    """The moment at which the publisher sends `update_weights` to the fleet: after `open`, so that receivers read while
    the trainer sends, or after `finish`, when everything can be fetched."""

    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    """The size in bytes at which a bucket is full, unless the trainer gives `bucket_bytes`."""

    slow: bool | None = None
    """True if to send the bytes takes longer than to compare them with the version before, so that deltas pay. None:
    deltas pay where a worker is on another machine."""

    device: str = "cpu"
    """The device of the tensors of the next update, in torch's notation. The publisher sets it before `open`."""

    fingerprint: str | None = None
    """The fingerprint of the fleet for which the sender was opened, if its receivers must listen before it sends. The
    publisher then prepares the update before the first bucket, and completes it after `finish`."""

    def pack(self, specs: Iterable[tuple[str, TensorSpec]], bucket_bytes: int) -> tuple[PackedBucket, ...]:
        """Groups tensors into buckets, in the order given. Called before `open`."""
        return pack(specs, bucket_bytes)

    @abstractmethod
    def open(self, manifest: Manifest) -> dict[str, Any]:
        """Begins one update. Returns the `transport` object of its request, `backend` included."""

    def lend(self, tensors: Mapping[str, Tensor]) -> Collection[int]:
        """Offers tensors that are contiguous, and that stay unchanged and in place until the update is closed.

        Called between `open` and the first `buffer`. Returns the numbers of the buckets that receivers read from
        there, without packing; `buffer` is not called for them. The memory must stay allocated until the next version,
        or `destroy`. Without this method every bucket is packed.
        """
        return ()

    @abstractmethod
    def buffer(self, number: int) -> Buffer:
        """The memory into which bucket `number` is packed, as long as the bucket. Blocks until it is free.

        Called for each bucket in order, starting at 0, except for those of `lend`.
        """

    @abstractmethod
    def send(self, number: int) -> None:
        """Sends bucket `number`, which is packed. May return before the bytes have left.

        The publisher hashes the bytes meanwhile, so they must not change before the next `buffer`.

        Raises:
            Unavailable: no receiver is left.
            DeadlineExceeded: a bound of the transport ran out.
        """

    @abstractmethod
    def finish(self, digests: Mapping[str, str] | None) -> None:
        """Waits until every receiver that is still there has every bucket.

        Args:
            digests: name to hex digest of each tensor; None if the trainer has made none.
        """

    def keep(  # noqa: B027
        self, adapter: str | None = None, onto_previous: bool = False, earlier: int | None = None
    ) -> None:
        """Holds the weights that were sent last, until the next `keep` of the same kind, so that workers may fetch them
        to heal.

        Called after the commit and before `close`. Without it `close` withdraws the weights of this update; the weights
        of an earlier `keep` stay.

        Args:
            adapter: the name of the adapter that was committed; None for base weights.
            onto_previous: the version is built on those before, back to a full one. They stay as long as this one does.
            earlier: with `onto_previous`, how many of them are needed, the full one first. None: all.
        """

    @abstractmethod
    def close(self) -> None:
        """Ends the update and frees what it held, finished or not. Called on every path, perhaps twice. The next
        `open` may follow."""

    def destroy(self) -> None:  # noqa: B027
        """Ends what outlives an update, such as a group or registered memory. Called after the last `close`."""


class SharingSender(Sender):
    """A Sender of which each rank of a trainer can have one, to send its own share of a version.

    Rank 0 joins the shares to one update. A rank without tensors takes no part. In order, before any tensor is read:

        plan_shares(manifests)               on rank 0
        announce(plan)                       on each rank with a share
        assemble(plan, offers)               on rank 0
        open_share(rank, manifest, plan)     on each rank with a share, in place of `open`
        joined(parts)                        on rank 0

    Then each rank packs and sends its own buckets, and calls `finish` with the digests of its own tensors. Last comes
    `seal` on rank 0. `keep`, `close` and `destroy` are called on each rank.
    """

    def plan_shares(self, manifests: Mapping[int, Manifest]) -> dict[str, Any]:
        """Returns what every rank has to know, as plain values. `manifests`: each owner's share, by rank."""
        return {}

    def announce(self, plan: Mapping[str, Any]) -> dict[str, Any]:
        """Returns what rank 0 has to know before any share is opened, as plain values."""
        return {}

    def assemble(self, plan: Mapping[str, Any], offers: Mapping[int, dict[str, Any]]) -> None:
        """Prepares the fleet. `offers`: what each rank has announced."""

    def open_share(self, rank: int, manifest: Manifest, plan: Mapping[str, Any]) -> dict[str, Any]:
        """Begins to send a share. Returns the `transport` object of a request for this share alone."""
        return self.open(manifest)

    def joined(self, parts: Mapping[int, dict[str, Any]]) -> dict[str, Any]:
        """The `transport` object of the update. `parts`: what `open_share` has returned on each rank."""
        shares = [
            {"rank": rank, **{key: value for key, value in part.items() if key != "backend"}}
            for rank, part in parts.items()
        ]
        return {"backend": self.backend, "shares": shares}

    def seal(self, digests: Mapping[str, str]) -> None:
        """Ends the version when every rank has finished its share. `digests`: those of all tensors."""


def members(reply: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The engines' rows of a reply to `workers`, without workers that have left: of these only the name is known."""
    return [row for row in engine_replies(reply) if "transports" in row]


def receivers(workers: Sequence[Mapping[str, Any]]) -> int:
    """The number of processes that receive for these workers: one on each host of each engine."""
    return sum(len(worker.get("nodes") or (None,)) for worker in workers)


def colocated(workers: Sequence[Mapping[str, Any]], host: str) -> bool:
    """True if all of these workers run on this host, with all nodes of their engines."""
    return all(place["host"] == host for worker in workers for place in (worker, *(worker.get("nodes") or ())))


def world_size(workers: Sequence[Mapping[str, Any]]) -> int:
    """The size of a group of the trainer's rank 0 and every rank of every engine.

    A worker's own `world_size` counts all its ranks, those of each replica of data parallelism included.
    """
    return 1 + sum(int(worker["world_size"]) for worker in workers)
