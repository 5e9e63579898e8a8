"""A publication whose caller leaves early ends in order: after a cancelled wait, Ctrl-C, or the end of the script."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from rl_plane.errors import (
    InvalidRequest,
    UpdateAborted,
)
from rl_plane.protocol.versions import tensor_digest
from rl_plane.publish import Progress, Publication, WeightPublisher
from rl_plane.publish.fleet_access import BlockingFleet
from rl_plane.publish.publication import RunningPublication
from rl_plane.transports.packing import raw_bytes, spec_of
from rl_plane.weights.manifest import Manifest, pack
from tests.conftest import Plane
from tests.support.paths import ROOT
from tests.support.publishing import (
    BOUND_S,
    Gathering,
    Held,
    Noted,
    Streaming,
    loaded,
    publisher_by,
    root_of,
    served,
)
from worker.receive.staging import model_digest

pytestmark = [pytest.mark.slow, pytest.mark.parallel]


@pytest.mark.parametrize("kind", [Held, Gathering])
async def test_a_publication_continues_after_its_waiter_is_cancelled(
    kind: type[Held], plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane.spawn()
    alive: list[str] = []
    held, go = threading.Event(), threading.Event()

    class Holding(BlockingFleet):
        def run(self, op: str, body: dict[str, Any], request_id: str = "") -> dict[str, Any]:
            if op == "update_weights":
                held.set()
                assert go.wait(BOUND_S)
            return super().run(op, body, request_id)

    source = kind(plane.model(1))
    source.go.set()
    publisher = publisher_by(
        lambda name, around: Noted(name, root_of(plane), alive),
        source,
        Holding(await plane.fleet()),
        root=root_of(plane),
    )
    publishing = asyncio.create_task(publisher.publish_async("a"))
    await asyncio.to_thread(held.wait, BOUND_S)
    a = publisher.latest
    assert a is not None
    waiting = asyncio.create_task(a.wait())
    await asyncio.sleep(0)  # it waits now
    for task in (publishing, waiting):
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert not a.done
    b = asyncio.create_task(publisher.publish_async("b"))
    await plane.until(lambda: publisher.latest is not a, BOUND_S)
    go.set()
    replies = [await asyncio.to_thread(a.result, BOUND_S), (await b).result()]
    assert [(reply["version"]["label"], reply["version"]["sequence"]) for reply in replies] == [("a", 1), ("b", 2)]
    await asyncio.to_thread(publisher.close)
    assert not alive


async def test_in_the_loop_of_its_client_a_publisher_is_closed_without_blocking_it(plane: Plane) -> None:
    plane.spawn()
    client, held = await plane.client(), Held(plane.model(1))
    publisher = WeightPublisher(held, client, root=root_of(plane))
    one = publisher.publish("one", wait=False)
    assert await asyncio.to_thread(held.begun.wait, BOUND_S)
    with pytest.raises(InvalidRequest, match="would block") as refused:
        publisher.close()
    assert "aclose" in refused.value.facts["fix"]
    assert not one.done
    async with asyncio.timeout(BOUND_S):
        closing = asyncio.create_task(publisher.aclose())
        held.go.set()
        await closing
        assert (await one.wait())["version"]["label"] == "one"
        publisher.close()  # nothing is under way
        async with WeightPublisher(plane.model(2), client, root=root_of(plane)) as publisher:
            two = publisher.publish("two", wait=False)
        assert two.done
    assert await served(plane) == {("two", model_digest(plane.model(2)), 2)}


async def test_a_block_that_fails_raises_its_own_error_in_the_loop_of_its_client(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task is cancelled while a version is under way. The transport frees its memory once that version has
    ended."""
    plane.spawn()
    alive: list[str] = []
    client, held = await plane.client(), Held(plane.model(1))

    async def publish() -> None:
        with publisher_by(
            lambda name, around: Noted(name, root_of(plane), alive), held, client, root=root_of(plane)
        ) as publisher:
            await publisher.publish_async("one")

    publishing = asyncio.create_task(publish())
    assert await asyncio.to_thread(held.begun.wait, BOUND_S)
    publishing.cancel()
    async with asyncio.timeout(BOUND_S):
        with pytest.raises(asyncio.CancelledError):
            await publishing
    assert alive
    held.go.set()
    await plane.until(lambda: not alive, BOUND_S)
    assert await served(plane) == {("one", model_digest(plane.model(1)), 1)}
    held.go.clear()
    publisher = WeightPublisher(held, client, root=root_of(plane))
    publisher.publish("two", wait=False)
    with pytest.raises(InvalidRequest, match="would block"):  # there is no error to hide
        publisher.__exit__(None, None, None)
    held.go.set()
    await publisher.aclose()


@contextlib.contextmanager
def interrupted_after(begun: threading.Event) -> Iterator[None]:
    """Waiting for a publication raises KeyboardInterrupt once `begun` is set, as Ctrl-C does in the main thread."""

    def interrupted(self: Publication, timeout_s: float | None = None) -> dict[str, Any]:
        assert begun.wait(BOUND_S)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Publication, "result", interrupted)
        yield


@pytest.mark.parametrize(
    ("transport", "how"),
    [(each, {}) for each in ("filesystem", "gloo", "ipc", "nixl", "object_store")]
    + [("ipc", {"initial": "two"}), ("filesystem", {"encoding": "delta"})],
)
async def test_ctrl_c_in_the_middle_gives_the_version_up(
    transport: str, how: dict[str, Any], plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tensors may change as soon as the error is raised. No worker gets changed tensors."""
    if transport == "nixl":
        pytest.importorskip("nixl")
    shape = {"tensors": 40, "nbytes": 65536}
    plane.spawn_many(2, model=plane.model(0, **shape))
    one, two = loaded(plane.model(1, **shape)), loaded(plane.model(2, **shape))
    begun, given_up = threading.Event(), threading.Event()
    options: dict[str, Any] = {"namespace": plane.namespace, "component": plane.component, "root": root_of(plane)}
    options |= {"transport": transport, "bucket_bytes": 1 << 18, "workers": 2, "progress": lambda now: holds(now)}

    def holds(now: Progress) -> None:
        if now.buckets == 2:
            begun.set()
            assert given_up.wait(BOUND_S)

    give_up = RunningPublication.give_up

    def noted(self: RunningPublication, error: BaseException) -> None:
        give_up(self, error)
        given_up.set()

    given_up.set()
    first = WeightPublisher(one, plane.url, **{**options, "initial": None})
    await first.publish_async("one")
    await asyncio.to_thread(first.close)
    before = await served(plane)
    assert {label for label, _, _ in before} == {"one"}
    begun.clear()
    given_up.clear()
    publishers_made: list[WeightPublisher] = []

    def publish() -> None:
        publishers_made.append(WeightPublisher(two, plane.url, **{**options, **how}))
        publishers_made[0].publish("two")

    with interrupted_after(begun), monkeypatch.context() as patch:
        patch.setattr(RunningPublication, "give_up", noted)
        with pytest.raises(KeyboardInterrupt):
            await asyncio.to_thread(publish)
    for tensor in two.values():
        tensor.add_(1)
    if publishers_made:
        cut_off = publishers_made[0].latest
        assert cut_off is not None
        assert cut_off.read
        with pytest.raises(UpdateAborted, match="KeyboardInterrupt"):
            await asyncio.to_thread(cut_off.result, BOUND_S)
    assert await served(plane) == before
    again = publishers_made[0] if publishers_made else WeightPublisher(two, plane.url, **options)
    assert (await again.publish_async("three")).result()["version"]["label"] == "three"
    manifest = Manifest(pack([(name, spec_of(tensor)) for name, tensor in two.items()], 1 << 18))
    digest = manifest.digested({name: tensor_digest(raw_bytes(tensor)) for name, tensor in two.items()}).digest
    assert {each[:2] for each in await served(plane)} == {("three", digest)}
    await asyncio.to_thread(again.close)


async def test_ctrl_c_ends_a_sender_without_receivers(plane: Plane) -> None:
    plane.spawn()
    begun = threading.Event()

    class Stuck(Streaming):
        receivers_from = "finish"

        def send(self, number: int) -> None:
            begun.set()
            super().send(number)

    options: dict[str, Any] = {"namespace": plane.namespace, "component": plane.component, "root": root_of(plane)}
    publisher = publisher_by(lambda name, around: Stuck(around), plane.model(1), plane.url, **options)
    with interrupted_after(begun), pytest.raises(KeyboardInterrupt):
        await asyncio.to_thread(publisher.publish, "one")
    one = publisher.latest
    assert one is not None
    assert one.read
    with pytest.raises(UpdateAborted, match="one was given up"):
        await asyncio.to_thread(one.result, BOUND_S)
    await asyncio.to_thread(publisher.close)


NOT_CLOSED = """
import sys
import threading
from rl_plane.publish import DirectorySource, WeightPublisher

url, namespace, component, model, ends = sys.argv[1:]
begun = threading.Event()

class Slow(DirectorySource):
    def take(self):
        begun.set()
        if ends == "under way":
            threading.Event().wait()
        raise RuntimeError("out of memory, say")

publisher = WeightPublisher(Slow(model), url, namespace=namespace, component=component, transport="ipc")
publication = publisher.publish("last", wait=False)
begun.wait()
if ends != "under way":
    publication._outcome.exception()
if ends == "told":
    try:
        publication.result()
    except RuntimeError:
        pass
if ends == "closed":
    publisher.close()
"""


@pytest.mark.parametrize(
    ("ends", "message"),
    [("under way", "last is lost"), ("failed", "not published"), ("told", ""), ("closed", "not published")],
)
async def test_a_script_that_ends_before_its_last_version_says_so(ends: str, message: str, plane: Plane) -> None:
    ended = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", NOT_CLOSED, plane.url, plane.namespace, plane.component, str(plane.model(1)), ends],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        check=True,
    )
    assert message in ended.stderr
    assert len(ended.stderr.splitlines()) == bool(message), ended.stderr
