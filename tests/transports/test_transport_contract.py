"""The shipped transports and the example keep the contract that `rl_plane.transports.testing` checks."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rl_plane.protocol.versions import HostTensor
from rl_plane.transports.base import Sender, TransportContext, WeightTransport
from rl_plane.transports.filesystem.receiver import FilesystemTransport
from rl_plane.transports.filesystem.sender import FilesystemSender
from rl_plane.transports.ipc.receiver import IpcTransport
from rl_plane.transports.ipc.sender import IpcSender
from rl_plane.transports.packed_delivery import PackedDelivery
from rl_plane.transports.testing import check_cancel, check_round_trip, check_transport
from tests.support.paths import ROOT

Halves = tuple[Callable[[], Sender], Callable[[], WeightTransport]]


def http_example() -> ModuleType:
    path = ROOT / "examples" / "plain_http_transport" / "rl_plane_plain_http.py"
    spec = importlib.util.spec_from_file_location("rl_plane_plain_http", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def halves(backend: str, tmp_path: Path) -> Halves:
    if backend == "filesystem":
        context = TransportContext((tmp_path,))
        return lambda: FilesystemSender(tmp_path), lambda: FilesystemTransport(context)
    if backend == "ipc":
        return lambda: IpcSender(lambda: 1), lambda: IpcTransport(TransportContext())
    if backend == "nixl":
        pytest.importorskip("nixl")
        from rl_plane.transports.nixl.receiver import NixlTransport
        from rl_plane.transports.nixl.sender import NixlSender

        return NixlSender, lambda: NixlTransport(TransportContext())
    http = http_example()
    return lambda: http.PlainHttpSender("127.0.0.1", 0), lambda: http.PlainHttpTransport(TransportContext())


@pytest.mark.parametrize("backend", ["filesystem", "ipc", "nixl", "plain_http"])
def test_a_transport_keeps_the_contract(backend: str, tmp_path: Path) -> None:
    check_transport(*halves(backend, tmp_path))


class Damaged(FilesystemTransport):
    """A transport that changes a byte on the way."""

    def open(self, request: Mapping[str, Any], kind: Any) -> Any:
        delivery = super().open(request, kind)
        tensors = delivery.tensors

        def damaged(cancelled: Any) -> Iterator[tuple[str, HostTensor]]:
            for name, tensor in tensors(cancelled):
                data = bytearray(tensor.data)
                if data:
                    data[0] ^= 1
                yield name, HostTensor(tensor.spec, memoryview(data))

        delivery.tensors = damaged  # type: ignore[method-assign, assignment]
        return delivery


class Deaf(IpcTransport):
    """A transport that ignores the cancellation, and takes a closed sender for the end."""

    def open(self, request: Mapping[str, Any], kind: Any) -> PackedDelivery:
        delivery = super().open(request, kind)
        assert isinstance(delivery, PackedDelivery)
        delivery.tensors = lambda cancelled: iter(())  # type: ignore[method-assign, assignment, misc]
        return delivery


def test_the_checks_find_damaged_bytes(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="other bytes"):
        check_round_trip(FilesystemSender(tmp_path), Damaged(TransportContext((tmp_path,))))


@pytest.mark.parametrize("check", [check_cancel])
def test_the_checks_find_a_receiver_that_hears_nothing(check: Callable[[Sender, WeightTransport], None]) -> None:
    sender = IpcSender(lambda: 1)
    try:
        with pytest.raises(AssertionError, match="was raised"):
            check(sender, Deaf(TransportContext()))
    finally:
        sender.close()
