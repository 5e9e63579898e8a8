"""The choice of a transport for a version, and the error if none is usable."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rl_plane.errors import InvalidRequest, NoWorkers, PlaneError, Unsupported
from rl_plane.publish import WeightPublisher
from rl_plane.transports.base import SenderContext, world_size
from rl_plane.transports.registry import candidates, installed
from tests.conftest import Plane
from tests.support.publishing import on_another_machine, served
from worker.receive.staging import model_digest

pytestmark = [pytest.mark.slow, pytest.mark.parallel]


def row(name: str, host: str, *transports: str, ranks: int = 1) -> dict[str, Any]:
    return {"instance_id": name, "host": host, "transports": list(transports), "world_size": ranks}


ALL = ("filesystem", "gloo", "ipc", "nixl", "object_store")


@pytest.mark.parametrize(
    ("transport", "workers", "with_root", "expected"),
    [
        ("auto", [row("a", "here", *ALL), row("b", "here", *ALL)], True, "filesystem nixl ipc gloo object_store"),
        ("auto", [row("a", "here", *ALL), row("b", "here", *ALL)], False, "nixl ipc gloo object_store"),
        ("auto", [row("a", "here", "filesystem", "gloo", "ipc")], False, "ipc gloo"),
        ("auto", [row("a", "here", *ALL), row("b", "there", *ALL)], False, "nixl gloo object_store"),
        ("auto", [row("a", "here", "gloo", "ipc"), row("b", "there", "gloo", "ipc")], False, "gloo"),
        ("auto", [row("a", "there", "filesystem", "gloo"), row("b", "there", "gloo")], True, "gloo"),
        ("auto", [row("a", "there", "filesystem", "object_store")], True, "filesystem object_store"),
        ("auto", [row("a", "there", "filesystem", "object_store")], False, "object_store"),
        ("gloo", [row("a", "here", *ALL)], True, "gloo"),
    ],
)
def test_the_candidates_are_transports_that_every_worker_can_use(
    transport: str, workers: list[Any], with_root: bool, expected: str
) -> None:
    assert candidates(transport, workers, ALL, with_root=with_root, host="here") == expected.split()


@pytest.mark.parametrize(
    ("host", "with_root", "expected"),
    [
        ("here", True, "filesystem object_store nixl ipc gloo"),
        ("here", False, "object_store nixl ipc gloo"),
        ("there", False, "object_store nixl gloo"),
    ],
)
def test_a_trainer_that_ends_tries_the_lasting_transports_first(host: str, with_root: bool, expected: str) -> None:
    workers = [row("a", host, *ALL)]
    assert (
        candidates("auto", workers, ALL, with_root=with_root, trainer_stays=False, host="here") == expected.split()
    )


@contextlib.contextmanager
def lacking_nixl() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "nixl", None)
        yield


@contextlib.contextmanager
def lacking_torch_and_linux() -> Iterator[None]:
    def refuse() -> None:
        raise Unsupported("ipc needs Linux")

    with lacking_nixl(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("rl_plane.transports.ipc.sender.check_platform", refuse)
        patch.setitem(sys.modules, "torch.distributed", None)
        yield


@pytest.mark.engines("nixl")
@pytest.mark.parametrize(
    ("of_the_trainer", "expected"),
    [(lacking_nixl, "ipc"), (lacking_torch_and_linux, "object_store"), (on_another_machine, "object_store")],
)
async def test_auto_goes_by_what_the_trainer_has(
    of_the_trainer: Callable[[], contextlib.AbstractContextManager[None]],
    expected: str,
    plane: Plane,
) -> None:
    plane.spawn()
    fleet = await plane.fleet()
    (worker,) = (await fleet.run("workers"))["workers"]
    assert set(ALL) <= set(worker["transports"])
    with of_the_trainer():
        publisher = WeightPublisher(plane.model(1), fleet)
        for label in ("one", "two"):
            await publisher.publish_async(label)
            assert publisher.backend == expected
    assert await served(plane) == {("two", model_digest(plane.model(1)), 2)}
    await asyncio.to_thread(publisher.close)
    # No transport fits: the error says what each needs.
    publisher = WeightPublisher(plane.model(1), fleet, options={"colour": "red"})
    with pytest.raises(Unsupported, match="no option 'colour'") as caught:
        await publisher.publish_async("never")
    assert "object_store: " in str(caught.value)
    assert "nixl: " in str(caught.value)
    assert caught.value.facts["field"] == "transport"
    await asyncio.to_thread(publisher.close)


@pytest.mark.parametrize(
    ("transport", "workers", "error", "words"),
    [
        ("pigeon", [row("a", "here", "pigeon")], InvalidRequest, "no sender 'pigeon'"),
        ("gloo", [row("a", "here", *ALL), row("b", "here", "ipc")], Unsupported, "no gloo transport on b"),
        ("auto", [row("a", "here", "filesystem")], Unsupported, "filesystem"),
        ("auto", [row("a", "here", "pigeon")], Unsupported, "the workers have none"),
        ("auto", [], NoWorkers, "no worker"),
    ],
)
def test_an_error_names_the_fix_if_no_transport_is_usable(
    transport: str, workers: list[Any], error: type[PlaneError], words: str
) -> None:
    with pytest.raises(error, match=words) as caught:
        candidates(transport, workers, ALL, with_root=False, host="here")
    assert caught.value.facts["fix"]


def test_workers_that_have_left_do_not_count() -> None:
    there = row("a", "here", *ALL)
    gone = {"instance_id": "b", "status": "error"}
    around = SenderContext(lambda op, body: {"workers": [there, gone]})
    assert around.workers() == [there]


def test_every_rank_of_every_replica_counts() -> None:
    assert world_size([row("a", "here"), row("b", "there", ranks=4), row("c", "there", ranks=4)]) == 10


def test_each_installed_sender_can_be_loaded() -> None:
    for point in installed().values():
        assert callable(point.load())
