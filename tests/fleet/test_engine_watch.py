"""The rules by which a worker declares its silent engine hung."""

from __future__ import annotations

import asyncio
import itertools
import math
import sys
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import AsyncMock

import pytest

from rl_plane.client import RlClient
from rl_plane.errors import PlaneError
from tests.conftest import START_S
from tests.support.fleet_updates import update_of
from worker import exit_codes
from worker.reconcile.engine_changes import EngineChanges
from worker.reconcile.worker_state import WorkerState
from worker.runtime.engine_loop import EngineLoop
from worker.runtime.engine_watch import DEFAULT_LIVENESS_TIMEOUT_S, MAX_BLOCKED_S, EngineWatch
from worker.worker import LIVENESS_INTERVAL_S

if TYPE_CHECKING:
    from tests.conftest import Plane, Spawned

pytestmark = [pytest.mark.slow, pytest.mark.parallel]

HANG_S = 8.0
"""More than one round trip's time-out: the worker is seen closed before it ends."""


def test_a_silent_engine_has_hung_after_its_time() -> None:
    watch = EngineWatch(60.0)
    assert [watch.silent(6.0) for _ in range(10)] == [False] * 9 + [True]


def test_an_answer_restarts_the_hang_timer() -> None:
    watch = EngineWatch(60.0)
    assert not watch.silent(59.0)
    watch.answered()
    assert not watch.silent(59.0)


def test_silence_in_what_blocks_the_engine_does_not_count_but_has_a_bound() -> None:
    watch = EngineWatch(60.0)
    with watch.blocking():
        loads = [watch.silent(6.0) for _ in range(math.ceil(MAX_BLOCKED_S / 6.0))]
        assert loads == [False] * (len(loads) - 1) + [True]
        watch.answered()
        assert not watch.silent(60.0), "it still blocks"


def test_behind_what_blocked_the_engine_silence_counts() -> None:
    watch = EngineWatch(60.0)
    with watch.blocking():
        pass
    assert not watch.silent(60.0), "it blocked for a part of this"
    assert not watch.silent(54.0)
    assert watch.silent(6.0)


def test_a_blocking_call_that_begins_on_a_silent_engine_does_not_stop_the_hang_timer() -> None:
    watch = EngineWatch(60.0)
    assert not watch.silent(6.0)
    with watch.blocking():
        assert not watch.silent(48.0)
    with pytest.raises(PlaneError), watch.blocking():
        raise PlaneError("in vain")
    with watch.blocking():
        assert watch.silent(6.0)


def test_the_silence_of_one_load_is_no_excuse_for_the_next() -> None:
    watch = EngineWatch(60.0)
    with watch.blocking():
        assert not watch.silent(90.0)
    with watch.blocking():
        assert not watch.silent(54.0), "the first one ended in this"
        assert not watch.silent(54.0)
        assert watch.silent(6.0)
    watch.answered()
    with watch.blocking():
        assert not watch.silent(90.0)


@pytest.mark.parametrize("end", [asyncio.CancelledError, TimeoutError])
def test_a_blocking_call_that_its_caller_gave_up_stops_the_hang_timer_until_the_engine_answers(
    end: type[BaseException],
) -> None:
    """A sound load that takes longer than a commit's deadline continues in the engine."""
    watch = EngineWatch(60.0)
    with pytest.raises(end), watch.blocking():
        raise end
    assert not watch.silent(90.0)
    assert watch.silent(MAX_BLOCKED_S)
    watch.answered()
    assert not watch.silent(54.0)
    assert watch.silent(6.0)


async def test_a_pause_that_is_answered_ends_the_silence_before_it() -> None:
    """A step took long before the pause. The swap behind the pause has its own excuse."""
    watch, adapter = EngineWatch(60.0), AsyncMock()
    core: Any = SimpleNamespace(state=WorkerState("w", "1", digest="d"))
    nothing: Any = None
    changes = EngineChanges(core, adapter, EngineLoop(), watch, nothing, lambda: None)
    assert not watch.silent(6.0)
    await changes.freeze("keep", None)
    adapter.pause.assert_awaited_once_with("keep", False)
    with watch.blocking():
        assert not watch.silent(90.0)


async def test_a_worker_whose_engine_hangs_closes_and_then_ends(plane: Plane) -> None:
    worker = plane.spawn(patch=f"options['engine_hang_s'] = {HANG_S}", hang_liveness="true")
    client = await plane.client()
    view = await client.view()

    async def closed() -> bool:
        state = (await client.call(worker.instance_id, "state")).body
        return any(reason.startswith("engine: ") for reason in state["admission"]["reasons"])

    await plane.until(closed, 3 * DEFAULT_LIVENESS_TIMEOUT_S)
    assert view.member(worker.instance_id) is not None, "it may answer again"
    await plane.until(lambda: worker.process.poll() is not None, 3 * (HANG_S + DEFAULT_LIVENESS_TIMEOUT_S))
    assert worker.process.returncode == exit_codes.ENGINE_HUNG
    await plane.until(lambda: view.member(worker.instance_id) is None)


FROZEN = """
import time, types, worker.engines.fake.adapter as fake, worker.worker as module
frozen_s = [0.0]
module.time = types.SimpleNamespace(monotonic=lambda: time.monotonic() + frozen_s[0])
async def liveness(self):
    if Path({folder!r}, "freeze").exists() and not frozen_s[0]:
        frozen_s[0] = 2 * options["engine_hang_s"]
        raise TimeoutError
    await really(self)
    if frozen_s[0]:
        Path({folder!r}, "answered").touch()
really, fake.FakeEngine.liveness = fake.FakeEngine.liveness, liveness
"""
"""A patch: with a file `freeze` the process seems to have stood still for long during one round trip, as at SIGSTOP."""


async def test_a_freeze_of_the_machine_does_not_end_a_worker_that_runs_again(plane: Plane) -> None:
    worker = plane.spawn(patch="options['engine_hang_s'] = 60.0\n" + FROZEN.format(folder=str(plane.tmp)))
    (plane.tmp / "freeze").touch()
    await plane.until(lambda: (plane.tmp / "answered").exists() or worker.process.poll() is not None)
    assert worker.process.poll() is None


SLOW = """
import asyncio, worker.engines.fake.adapter as fake
options["liveness_timeout_s"] = {timeout_s}
async def liveness(self):
    while not Path({folder!r}, "answer {name}").exists():
        Path({folder!r}, "stands {name}").touch()
        await asyncio.sleep(0.01)
    await really(self)
    Path({folder!r}, "answered {name}").touch()
really, fake.FakeEngine.liveness = fake.FakeEngine.liveness, liveness
"""


async def test_a_slow_engine_closes_only_the_worker_with_the_shorter_time_out(plane: Plane) -> None:
    """An answer opens the worker again. Both engines take equally long."""

    def spawn(name: str, timeout_s: float) -> Spawned:
        (plane.tmp / f"answer {name}").touch()
        patch = SLOW.format(name=name, timeout_s=timeout_s, folder=str(plane.tmp))
        return plane.spawn(patch=patch)

    def stands(name: str) -> Callable[[], object]:
        """The engine hangs from here on."""
        (plane.tmp / f"answer {name}").unlink()
        return (plane.tmp / f"stands {name}").exists

    async def reasons(worker: Spawned) -> list[str]:
        admission = (await client.call(worker.instance_id, "state")).body["admission"]
        return [reason for reason in admission["reasons"] if reason.startswith("engine: ")]

    patient, hasty = spawn("patient", 60.0), spawn("hasty", 0.5)
    client = await plane.client()
    await plane.until(stands("patient"))
    await plane.until(stands("hasty"))
    await plane.until(lambda: reasons(hasty))
    assert await reasons(hasty) == ["engine: no round trip through the engine within 0.5 s"]
    assert await reasons(patient) == []
    for name in ("patient", "hasty"):
        (plane.tmp / f"answered {name}").unlink(missing_ok=True)
        (plane.tmp / f"answer {name}").touch()
        await plane.until((plane.tmp / f"answered {name}").exists)

    async def open_again() -> bool:
        return await reasons(hasty) == []

    await plane.until(open_again)
    assert await reasons(patient) == []


HANGING = """
import asyncio, worker.engines.fake.adapter as fake
options["engine_hang_s"] = {hang_s}
options["liveness_timeout_s"] = 0.5
def _hanging(name):
    really = getattr(fake.FakeEngine, name)
    async def method(self, *arguments):
        if Path({folder!r}, "hang").exists():
            Path({folder!r}, name).touch()
            await asyncio.Event().wait()
        return await really(self, *arguments)
    setattr(fake.FakeEngine, name, method)
_hanging("liveness")
_hanging("pause")
"""
"""A patch: with a file `hang` no method of the engine returns. A file named after a method shows that it was called
since."""


def hanging(plane: Plane) -> Spawned:
    return plane.spawn(ready=False, patch=HANGING.format(hang_s=HANG_S, folder=str(plane.tmp)))


async def until_it_has_ended(plane: Plane, worker: Spawned) -> None:
    await plane.until(lambda: worker.process.poll() is not None, 3 * (HANG_S + DEFAULT_LIVENESS_TIMEOUT_S))
    assert worker.process.returncode == exit_codes.ENGINE_HUNG


async def update(plane: Plane, client: RlClient) -> None:
    with suppress(PlaneError):
        await client.run("update_weights", update_of(plane.model(1), "step_1"))


async def pause_again_and_again(plane: Plane, client: RlClient) -> None:
    while True:
        with suppress(PlaneError):
            await client.run("pause", {"mode": "keep"})


@pytest.mark.parametrize("trainer", [update, pause_again_and_again])
async def test_a_call_that_waits_for_a_hung_engine_does_not_delay_its_end(
    plane: Plane, trainer: Callable[[Plane, RlClient], Awaitable[None]]
) -> None:
    worker = hanging(plane).wait_ready()
    client = await plane.client()
    (plane.tmp / "hang").touch()

    async def closed() -> bool:
        return not (await client.call(worker.instance_id, "state")).body["admission"]["open"]

    await plane.until(closed)
    calling = asyncio.ensure_future(trainer(plane, client))
    await plane.until((plane.tmp / "pause").exists)
    assert worker.process.poll() is None
    await until_it_has_ended(plane, worker)
    calling.cancel()


@pytest.mark.parametrize("follows", ["update_weights", "pause"])
async def test_an_engine_that_hangs_while_its_worker_starts_ends_it(plane: Plane, follows: str) -> None:
    """The worker follows the fleet's state while it waits for its engine."""
    plane.spawn()
    client = await plane.client()
    await client.wait_for(1)
    await client.run(follows, update_of(plane.model(1), "step_1") if follows == "update_weights" else {})
    (plane.tmp / "hang").touch()
    late = hanging(plane)
    await plane.until((plane.tmp / "pause").exists)
    await until_it_has_ended(plane, late)


DYING = """
import worker.engines.fake.adapter as fake
from rl_plane.errors import EngineDied
def _dying(name):
    async def method(self, *arguments, **more):
        if name == {at!r} or self.has_died:
            self.has_died = True
            raise EngineDied("it has died")
        return await really(self, *arguments, **more)
    really = getattr(fake.FakeEngine, name)
    setattr(fake.FakeEngine, name, method)
fake.FakeEngine.has_died = False
for _name in ("liveness", "pause", "resume", "abort", "swap"):
    _dying(_name)
"""
"""From the first call of that method on."""


@pytest.mark.parametrize(("at", "follows"), [("swap", "update_weights"), ("pause", "pause")])
async def test_an_engine_that_dies_while_its_worker_starts_ends_it_as_at_any_time(
    plane: Plane, at: str, follows: str
) -> None:
    plane.spawn()
    client = await plane.client()
    await client.wait_for(1)
    await client.run(follows, update_of(plane.model(1), "step_1") if follows == "update_weights" else {})
    late = plane.spawn(ready=False, patch=DYING.format(at=at))
    await plane.until(lambda: late.process.poll() is not None, START_S)
    assert late.process.returncode == exit_codes.ENGINE_DEAD, late.log.read_text()


STARTED = """
import worker.engines.fake.adapter as fake
from rl_plane.errors import EngineDied
async def start(self):
    raise EngineDied("as it started")
fake.FakeEngine.start = start
"""

HASHED = """
import threading, worker.engines.fake.adapter as fake, worker.process as process
from rl_plane.errors import EngineDied
async def liveness(self):
    if Path({folder!r}, "hashes").exists():
        raise EngineDied("as the model was hashed")
def model_digest(model, tied):
    Path({folder!r}, "hashes").touch()
    threading.Event().wait()
fake.FakeEngine.liveness, process.model_digest = liveness, model_digest
"""
"""A model that takes for ever to hash."""


@pytest.mark.parametrize("at", ["start", "digest"])
async def test_an_engine_that_dies_before_its_worker_serves_ends_it_so_too(plane: Plane, at: str) -> None:
    patches = {"start": STARTED, "digest": HASHED.format(folder=str(plane.tmp))}
    one = plane.spawn(ready=False, patch=patches[at])
    await plane.until(lambda: one.process.poll() is not None, START_S)
    assert one.process.returncode == exit_codes.ENGINE_DEAD, one.log.read_text()
    assert "the engine is dead: as " in one.log.read_text()


LOADED = """
import worker.engines.fake.adapter as fake
really = fake.FakeEngine.load
def load(self):
    if Path({folder!r}, "fails").exists():
        raise RuntimeError("as it should")
    return really(self)
fake.FakeEngine.load = load
"""


async def test_a_worker_whose_own_part_fails_ends(plane: Plane) -> None:
    """A worker without this part would never notice that its engine has died."""
    one = plane.spawn(patch=LOADED.format(folder=str(plane.tmp)))
    (plane.tmp / "fails").touch()
    await plane.until(lambda: one.process.poll() is not None, 3 * LIVENESS_INTERVAL_S + START_S)
    assert one.process.returncode == exit_codes.FAILED
    assert "as it should" in one.log.read_text()


def _fake() -> tuple[Callable[[], object], dict[str, Any]]:
    from worker.engines.common.request_gate import RequestGate

    gate = RequestGate()
    return gate.load, gate._requests


def _with_processes() -> tuple[Callable[[], object], dict[str, Any]]:
    from worker.engines.sglang.adapter import SglangEngine

    engine: Any = SglangEngine.__new__(SglangEngine)
    engine._requests = {}
    return engine.load, engine._requests


@pytest.mark.parametrize("of", [_fake, _with_processes])
def test_the_load_can_be_asked_for_while_requests_come_and_go(
    of: Callable[[], tuple[Callable[[], object], dict[str, Any]]],
) -> None:
    load, requests = of()
    one, end = SimpleNamespace(admitted=True, begun=True, tokenizing=False), threading.Event()
    requests |= {str(number): one for number in range(64)}

    def come_and_go() -> None:
        for number in itertools.count(64):
            requests[str(number)] = one
            del requests[str(number - 64)]
            if end.is_set():
                return

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        for _ in range(20_000):
            load()
    finally:
        end.set()
        thread.join()
        sys.setswitchinterval(before)
