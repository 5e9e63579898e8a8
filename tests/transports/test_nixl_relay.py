"""The relay of an update over real nixl: receivers in processes of their own, some of which fail on purpose."""

from __future__ import annotations

import signal
import socket
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest

pytest.importorskip("nixl")

from rl_plane._util.framing import read_frame, send_frame
from rl_plane.commit.relay_plan import plan_relay
from rl_plane.protocol.relay import RelayAddress, RelayPlan
from rl_plane.transports.nixl.wire import NOT_YET, PROTOCOL
from tests.support.relay_host import RelayHost

pytestmark = [pytest.mark.engines("nixl"), pytest.mark.timeout(400)]

TENSORS, TENSOR_BYTES = 24, 1 << 20
TOTAL = TENSORS * TENSOR_BYTES

Start = Callable[..., RelayHost]


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[RelayHost] = []

    def one(*fault: str) -> RelayHost:
        started.append(RelayHost(*fault))
        return started[-1]

    yield one
    for host in started:
        host.close()


def offered(trainer: RelayHost, tensors: int = TENSORS) -> dict[str, Any]:
    return trainer.does(do="offer", host="127.0.0.1", tensors=tensors, nbytes=TENSOR_BYTES, seed=1)


def plans_of(hosts: Sequence[RelayHost]) -> list[RelayPlan]:
    said = [host.does(do="address") for host in hosts]
    names = [f"w{number}" for number in range(len(hosts))]
    addresses = {
        name: RelayAddress(host=name, address=one["address"], port=one["port"])
        for name, one in zip(names, said, strict=True)
    }
    plans = plan_relay(addresses)
    return [plans[name] for name in names]


def open_all(hosts: Sequence[RelayHost], plans: Sequence[RelayPlan], transport: Mapping[str, Any]) -> None:
    for host, plan in zip(hosts, plans, strict=True):
        host.does(do="open", transport=transport, plan=plan.model_dump())


def begin(hosts: Sequence[RelayHost], plans: Sequence[RelayPlan], transport: Mapping[str, Any]) -> None:
    open_all(hosts, plans, transport)
    for host in hosts:
        host.does(do="begin")


def taken(results: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """The bytes that came from each source, over all receivers."""
    found: dict[str, int] = {}
    for result in results:
        for use in result["sources"]:
            found[use["source"]] = found.get(use["source"], 0) + use["bytes"]
    return found


def check_complete(results: Sequence[Mapping[str, Any]], offer: Mapping[str, Any]) -> None:
    for result in results:
        assert result.get("digest") == offer["digest"], result
        assert sum(use["bytes"] for use in result["sources"]) >= TOTAL


def test_receivers_give_one_another_what_they_have(start: Start) -> None:
    trainer, *hosts = (start() for _ in range(4))
    offer, plans = offered(trainer), plans_of(hosts)
    for _ in range(2):  # the second update uses the agents of the first
        begin(hosts, plans, offer["transport"])
        results = [host.does(do="result") for host in hosts]
        check_complete(results, offer)
        sent = taken(results)
        assert sum(sent.values()) >= 3 * TOTAL
        assert sum(sent.get(f"w{number}", 0) for number in range(3)) > 0
        for host in hosts:
            host.does(do="end")


@pytest.mark.parametrize("fault", ["dies", "stops", "lies"])
def test_a_source_that_fails_in_the_middle_is_replaced(start: Start, fault: str) -> None:
    """Wrong bytes are found by their digests, so no receiver uses them or passes them on."""
    trainer, failing, *hosts = start(), start(fault, "3"), start(), start()
    offer, plans = offered(trainer), plans_of([failing, *hosts])
    begin([failing, *hosts], plans, offer["transport"])
    results = [host.does(do="result") for host in hosts]
    check_complete(results, offer)
    if fault == "dies":
        assert failing.process.wait(30) == -signal.SIGKILL


def test_an_abort_in_the_middle_ends_every_receiver_and_what_it_serves(start: Start) -> None:
    trainer, *hosts = (start() for _ in range(4))
    offer, plans = offered(trainer), plans_of(hosts)
    open_all(hosts, plans, offer["transport"])
    trainer.process.send_signal(signal.SIGSTOP)  # so that no receiver can have everything
    for host in hosts:
        host.does(do="begin")
    for host in hosts:
        host.ask(do="abort")
    for host in hosts:
        result = host.answer()
        assert result["error"]["code"] == "engine_failed", result
        assert "cancelled" in result["error"]["message"]
    secret = offer["transport"]["secret"]
    for peer in plans[0].peers:
        with socket.create_connection((peer.address, peer.port), 10) as connection:
            send_frame(connection, {"protocol": PROTOCOL, "secret": secret, "relay": True})
            assert read_frame(connection) == {"error": NOT_YET}
    trainer.process.send_signal(signal.SIGCONT)
    begin(hosts, plans, offer["transport"])
    check_complete([host.does(do="result") for host in hosts], offer)


def test_a_peer_without_the_secret_learns_nothing(start: Start) -> None:
    trainer, *hosts = (start() for _ in range(3))
    offer, plans = offered(trainer), plans_of(hosts)
    begin(hosts, plans, offer["transport"])
    for host in hosts:
        host.does(do="result")
    peer = plans[0].peers[0]
    for secret in ("", "5" * 32, offer["transport"]["secret"][:-1]):
        with socket.create_connection((peer.address, peer.port), 10) as connection:
            send_frame(connection, {"protocol": PROTOCOL, "secret": secret, "relay": True})
            assert read_frame(connection) == {"error": NOT_YET}
    with socket.create_connection((peer.address, peer.port), 10) as connection:
        send_frame(connection, {"protocol": PROTOCOL, "secret": offer["transport"]["secret"], "relay": True})
        assert read_frame(connection).keys() == {"metadata", "reach", "places"}
        assert sorted(read_frame(connection)["verified"]) == list(range(TENSORS))


def test_readers_that_die_in_the_middle_of_a_read_do_no_harm_to_its_source(start: Start) -> None:
    """The kernel resets the connection of a killed process that has not read everything, as `SO_LINGER` does here."""
    trainer, host = start(), start()
    transport = offered(trainer)["transport"]
    where = transport["host"], transport["port"]
    with socket.create_connection(where, 10) as connection:
        send_frame(connection, {"protocol": PROTOCOL, "secret": transport["secret"]})
        ((address, nbytes, _),) = read_frame(connection)["places"][0]
    for _ in range(50):
        with socket.create_connection(where, 10) as connection:
            send_frame(connection, {"protocol": PROTOCOL, "secret": transport["secret"], "read": True})
            send_frame(connection, {"pieces": [[address, nbytes]]})
            assert connection.recv(1), "the bytes are on their way"
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    host.does(do="open", transport=transport, plan=None)
    host.does(do="begin")
    assert host.does(do="result")["seconds"]
    assert trainer.does(do="end") == {}
