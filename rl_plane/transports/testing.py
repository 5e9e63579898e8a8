"""Checks that both halves of a transport keep the contract. For the tests of a transport, with no engine and no fleet.

    from rl_plane.transports.testing import check_transport

    def test_my_transport():
        check_transport(lambda: MySender(...), lambda: MyTransport(TransportContext()))

Each check raises AssertionError. A sender with a `fingerprint` is not covered: its receivers need a group first.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rl_plane._util.tasks import Cancelled, never
from rl_plane.errors import EngineFailed, InvalidRequest, PlaneError
from rl_plane.protocol.versions import DTYPE_BYTES, HostTensor, TensorSpec
from rl_plane.transports.base import Sender, WeightTransport
from rl_plane.transports.packing import fill
from rl_plane.weights.manifest import Manifest

BOUND_S = 60.0
"""The longest time in seconds that a receiver may take to end: a transport must not hang."""
BUCKET_BYTES = 256
"""Small, so that the tensors fill several buckets."""
SHAPES = ((3, 5), (), (0, 4), (41,))

Tensors = Mapping[str, HostTensor]


def example_tensors(seed: int = 0) -> dict[str, HostTensor]:
    """Tensors of each dtype in several shapes, a scalar and an empty one included."""
    found = {}
    for dtype in DTYPE_BYTES:
        for shape in SHAPES:
            spec = TensorSpec(dtype, shape)
            data = bytearray((seed + at) % 251 for at in range(spec.nbytes))
            found[f"{dtype}.{'x'.join(map(str, shape)) or 'scalar'}"] = HostTensor(spec, memoryview(data))
    return found


def check_transport(make_sender: Callable[[], Sender], make_transport: Callable[[], WeightTransport]) -> None:
    """Runs all checks with new halves."""
    for check in (check_round_trip, check_requests, check_cancel, check_end):
        sender, transport = make_sender(), make_transport()
        try:
            check(sender, transport)
        finally:
            sender.close()
            sender.destroy()
            transport.destroy()


def check_round_trip(sender: Sender, transport: WeightTransport) -> None:
    """Two versions, one after another, arrive as they were sent, with the digest that was stated."""
    for seed in (1, 2):
        tensors = example_tensors(seed)
        manifest = manifest_of(sender, tensors)
        request = opened(sender, manifest)
        digests: dict[str, str] = {}
        with ThreadPoolExecutor(1) as threads:
            if sender.receivers_from == "open":
                receiving = threads.submit(receive, transport, request)
                send(sender, manifest, tensors, digests)
            else:
                send(sender, manifest, tensors, digests)
                receiving = threads.submit(receive, transport, request)
            came, digest = receiving.result(BOUND_S)
        assert came == {name: bytes(tensor.data) for name, tensor in tensors.items()}, "other bytes arrived"
        assert digest in (None, manifest.digested(digests).digest), f"the digest that arrived is {digest}"
        sender.close()
        sender.close()  # `close` must be possible twice


def check_requests(sender: Sender, transport: WeightTransport) -> None:
    """A request is plain JSON. An unknown field is refused, and so are base weights where an adapter is wanted."""
    tensors = example_tensors()
    manifest = manifest_of(sender, tensors)
    request = opened(sender, manifest)
    if sender.receivers_from == "finish":
        send(sender, manifest, tensors, {})
    _refused(lambda: transport.open({**request, "no such field": 1}, "base"), InvalidRequest)
    if sender.receivers_from == "finish":
        _refused(lambda: transport.open(request, "lora"), PlaneError)


def check_cancel(sender: Sender, transport: WeightTransport) -> None:
    """A cancelled delivery ends soon: while it waits for bytes, and between two tensors."""
    tensors, cancelled = example_tensors(), threading.Event()
    manifest = manifest_of(sender, tensors)
    request = opened(sender, manifest)
    if sender.receivers_from == "open":
        sender.buffer(0)  # from here on receivers are answered, and no bucket comes
        with ThreadPoolExecutor(1) as threads:
            receiving = threads.submit(receive, transport, request, cancelled.is_set)
            cancelled.set()
            _refused(lambda: receiving.result(BOUND_S), EngineFailed)
    else:
        send(sender, manifest, tensors, {})
        delivery = transport.open(request, "base")
        next(delivery.tensors(never))
        delivery.close()
        delivery.close()  # `close` must be possible twice


def check_end(sender: Sender, transport: WeightTransport) -> None:
    """A sender that is closed in the middle of an update ends its receivers, with an error."""
    tensors = example_tensors()
    manifest = manifest_of(sender, tensors)
    request = opened(sender, manifest)
    with ThreadPoolExecutor(1) as threads:
        sender.buffer(0)
        receiving = threads.submit(receive, transport, request)
        sender.close()
        _refused(lambda: receiving.result(BOUND_S), PlaneError)


def manifest_of(sender: Sender, tensors: Tensors) -> Manifest:
    """The manifest of some tensors, in buckets as the sender packs them."""
    return Manifest(sender.pack([(name, tensor.spec) for name, tensor in tensors.items()], BUCKET_BYTES))


def opened(sender: Sender, manifest: Manifest) -> dict[str, Any]:
    """Opens an update, and returns its request as it arrives at a worker: through JSON."""
    request: dict[str, Any] = json.loads(json.dumps(sender.open(manifest)))
    assert request["backend"] == sender.backend, "the request names another backend than the sender"
    return request


def send(sender: Sender, manifest: Manifest, tensors: Tensors, digests: dict[str, str]) -> None:
    """Packs, sends and finishes one version, as a publisher does."""
    for number in fill(manifest, tensors.items(), sender.buffer, digests):
        sender.send(number)
    sender.finish(digests)


def receive(
    transport: WeightTransport, request: Mapping[str, Any], cancelled: Cancelled = never
) -> tuple[dict[str, bytes], str | None]:
    """Receives one version. Returns the bytes of each tensor, and the digest that the delivery states."""
    assert request["backend"] == transport.backend, "the request names another backend than the transport"
    delivery = transport.open(request, "base")
    try:
        specs = dict(delivery.specs)
        came: dict[str, bytes] = {}
        for name, tensor in delivery.tensors(cancelled):
            assert name not in came, f"{name} came twice"
            assert tensor.spec == specs[name], f"{name} came as {tensor.spec}"
            came[name] = bytes(tensor.data)
        return came, delivery.digest
    finally:
        delivery.close()
        delivery.close()


def _refused(act: Callable[[], object], error: type[PlaneError]) -> None:
    try:
        act()
    except error:
        return
    raise AssertionError(f"no {error.__name__} was raised")
