"""The rank, the thread and the GPU on which a publication's tensors are read."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from rl_plane.errors import InvalidRequest
from rl_plane.publish import WeightPublisher
from rl_plane.publish.sources.base import Taken
from rl_plane.publish.threads import on_thread
from tests.conftest import Plane
from tests.support.publishing import BOUND_S, Gathering, root_of
from worker.engines.fake.adapter import make_fake_model

pytestmark = [pytest.mark.slow, pytest.mark.parallel]


def test_other_ranks_only_gather(tmp_path: Path) -> None:
    source = Gathering(make_fake_model(tmp_path, 1))
    publisher = WeightPublisher(source, "nats://127.0.0.1:9", rank=1)  # which is never asked
    publication = publisher.publish("one")
    assert publication.done
    assert publication.result() == {}
    publisher.close()
    taken = source.take()
    assert source.taken == len(taken.specs)
    taken.close()


async def test_a_gather_runs_on_the_callers_thread_and_to_its_end(plane: Plane) -> None:
    plane.spawn()
    fleet = await plane.fleet()
    source = Gathering(plane.model(1))
    publisher = WeightPublisher(source, fleet, root=root_of(plane))

    def publish(label: str) -> threading.Thread:
        publication = publisher.publish(label, wait=False)
        assert publication.read
        publication.result(BOUND_S)
        return threading.current_thread()

    assert await asyncio.to_thread(publish, "one") is source.thread
    count = source.taken
    with pytest.raises(InvalidRequest):
        await asyncio.to_thread(publish, "")
    assert source.taken == 2 * count  # it failed before a byte was sent, and other ranks were not left waiting


class CurrentGpu(threading.local):
    """Stands in for `torch.cuda`: it has one current GPU for each thread."""

    number = 0
    has_failed = False

    def set_in(self, patch: pytest.MonkeyPatch) -> None:
        from torch import cuda

        @contextlib.contextmanager
        def device(number: int) -> Iterator[None]:
            if self.has_failed:
                raise RuntimeError("CUDA error: device-side assert triggered")
            before, self.number = self.number, number
            yield
            self.number = before

        patch.setattr(cuda, "is_initialized", lambda: True)
        patch.setattr(cuda, "current_device", lambda: self.number)
        patch.setattr(cuda, "device", device)


class FailedGpu(CurrentGpu):
    has_failed = True


class OnGpu(Gathering):
    """Records the GPU that was current when it was read."""

    def __init__(self, path: Path, current: CurrentGpu) -> None:
        super().__init__(path)
        self.current = current
        self.read_at: list[tuple[int, bool]] = []

    def take(self) -> Taken:
        taken = super().take()

        def tensors() -> Iterator[Any]:
            for pair in taken.tensors:
                self.read_at.append((self.current.number, threading.current_thread() is threading.main_thread()))
                yield pair

        return Taken(taken.specs, tensors(), None, taken.close)


@pytest.mark.parametrize("collective", [True, False])
async def test_another_thread_reads_the_source_by_the_callers_gpu(
    collective: bool, plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise every rank would gather on GPU 0."""
    plane.spawn()
    fleet = await plane.fleet()
    current = CurrentGpu()
    source = OnGpu(plane.model(1), current)
    source.collective = collective
    count = len(source.take().specs)
    publisher = WeightPublisher(source, fleet, root=root_of(plane))
    with monkeypatch.context() as patch:
        current.set_in(patch)
        current.number = 1
        await publisher.publish_async("one")
        assert source.read_at == [(1, False)] * count
        if collective:
            other = WeightPublisher(source, "nats://127.0.0.1:9", rank=1)
            await other.publish_async("one")
            assert source.read_at == [(1, False)] * 2 * count
            assert await asyncio.to_thread(lambda: current.number) == 0  # the pool's threads are others' too
        else:
            current.number = 2
            publication = publisher.publish("two", wait=False)
            await publication.wait()
            assert source.read_at[count:] == [(2, False)] * count
    await asyncio.to_thread(publisher.close)


def test_a_failed_gpu_is_reported_by_the_code_that_reads_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The readers end what they have begun. A thread that raised before it called them would leave that undone."""
    FailedGpu().set_in(monkeypatch)
    outcome: Future[str] = Future()
    on_thread(lambda: outcome.set_result("read"))
    assert outcome.result(BOUND_S) == "read"


async def test_a_trainer_without_cuda_does_not_initialise_it(tmp_path: Path) -> None:
    """Without a GPU, a question about the current one raises an error."""
    from torch import cuda

    assert not cuda.is_initialized()
    source = Gathering(make_fake_model(tmp_path, 1))
    publication = await WeightPublisher(source, "nats://127.0.0.1:9", rank=1).publish_async("one")
    assert publication.result() == {}
    assert source.taken > 0
    assert not cuda.is_initialized()


def test_a_trainer_without_torch_does_not_import_it() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import asyncio, threading\n"
        "from rl_plane.publish.threads import at_callers_gpu, on_thread\n"
        "read = threading.Event()\n"
        "on_thread(read.set)\n"
        f"assert read.wait({BOUND_S})\n"
        "sys.modules['torch.cuda'] = type(sys)('torch.cuda')  # that another thread has begun to import\n"
        "assert at_callers_gpu(read.set) == read.set\n"
        "print('read')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=BOUND_S, check=False
    )
    assert done.stdout == "read\n", done.stderr
