"""One seed: a fleet lives through updates and faults, and must be whole again at the end."""

from __future__ import annotations

import asyncio
import logging
import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest import mock

from tests.sim import world as world_module
from tests.sim.virtual_loop import VirtualLoop, virtual_time
from tests.sim.world import Process, SimFrontend, Violation, World, task_factory
from worker.engines.fake import make_fake_model

WORKERS = 3
FRONTENDS = 2
LIFE_S = 15.0
CLIENT_RATE = 15.0
"""Requests a second, spread over the live frontends."""
REST_S = 120.0
"""After the last fault: leases, retries with growing pauses and reconnects all fit in."""
MODELS = 5


@lru_cache(maxsize=1)
def models() -> list[Path]:
    """Real checkpoints on the disk, once for all seeds; the last one has another shape."""
    root = Path(tempfile.mkdtemp(prefix="rl-plane-sim-"))
    found = [make_fake_model(root / f"m{seed}", seed=seed, tensors=2, nbytes=64) for seed in range(MODELS)]
    found.append(make_fake_model(root / "wrong", seed=9, tensors=3, nbytes=64))
    return [root / path.name if isinstance(path, Path) else root / f"m{i}" for i, path in enumerate(found)]


@dataclass
class Result:
    seed: int
    violation: Violation | None
    trace: list[str]
    served: int
    committed: int
    aborted: int


CLOSING_TURNS = 100
"""Of the loop: nested clean-ups end one after another."""


class _NoCanary:
    """The simulation's server is like one whose advisories nobody has tried yet: the sweep runs at its full rate."""

    async def connect(self, *args: Any, **more: Any) -> None:
        raise OSError("simulated")


@contextmanager
def _simulated(seed: int) -> Iterator[tuple[VirtualLoop, random.Random]]:
    rng = random.Random(seed)
    state = random.getstate()
    random.seed(seed)
    loop = VirtualLoop(rng)
    loop.set_task_factory(task_factory)
    asyncio.set_event_loop(loop)
    logging.disable(logging.CRITICAL)
    try:
        with virtual_time(loop), mock.patch("rl_plane.view.Client", _NoCanary):
            yield loop, rng
    finally:
        logging.disable(logging.NOTSET)
        world_module._owner.clear()
        _close(loop)
        random.setstate(state)


def _close(loop: VirtualLoop) -> None:
    """Everything that still runs is cancelled and ends, with connections that are dead."""
    loop.set_exception_handler(lambda loop, context: None)
    for _ in range(CLOSING_TURNS):
        pending = asyncio.all_tasks(loop)
        if not pending:
            break
        for task in pending:
            task.cancel()
        loop.call_soon(loop.stop)
        loop.run_forever()
    asyncio.set_event_loop(None)
    loop.close()


def run_seed(seed: int) -> Result:
    with _simulated(seed) as (loop, rng):
        world = World(loop, rng, models())
        failures: list[BaseException] = []

        def failed(loop: Any, context: dict[str, Any]) -> None:
            error = context.get("exception")
            if isinstance(error, Violation):
                failures.append(error)

        loop.set_exception_handler(failed)
        violation: Violation | None = None
        try:
            loop.run_until_complete(_life(world, failures))
        except Violation as error:
            violation = error
        except RuntimeError as error:
            violation = Violation("I5", str(error))
        return Result(seed, violation, world.trace, world.served, world.committed_updates, world.aborted_updates)


async def _life(world: World, failures: list[BaseException]) -> None:
    rng, loop = world.rng, world.loop
    ids = [f"{number:016x}" for number in range(1, WORKERS + 1)]
    for instance_id in ids:
        await world.start_worker(instance_id)
    for _ in range(FRONTENDS):
        await world.start_frontend()
    jobs: set[asyncio.Task[Any]] = set()

    def job(process: Process, work: Any) -> None:
        task = world.spawn(process, work)
        jobs.add(task)

    def check() -> None:
        for task in [task for task in jobs if task.done()]:
            jobs.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error
        if failures:
            raise failures[0]

    async def clients() -> None:
        while True:
            await asyncio.sleep(rng.expovariate(CLIENT_RATE))
            if alive := [frontend for frontend in world.frontends if frontend.process.alive]:
                frontend = rng.choice(alive)
                job(frontend.process, world.generate(frontend))

    asking = loop.create_task(clients())
    end = loop.now + LIFE_S
    step = 0
    while loop.now < end:
        await asyncio.sleep(rng.expovariate(4.0))
        check()
        alive = [frontend for frontend in world.frontends if frontend.process.alive]
        choice = rng.random()
        if choice < 0.5 and alive:
            step += 1
            frontend = rng.choice(alive)
            job(frontend.process, world.update(frontend, _update_body(world, step)))
        else:
            await _fault(world, ids)
    asking.cancel()
    # Rest: everything is brought back, and nothing fails any more.
    world.say("rest")
    world.server.lost_answers = 0.0
    world.server.start()
    for process in [*world.started.values()] + [each.process for each in world.frontends]:
        for bus in process.buses:
            process.thaw(bus)
    for instance_id in ids:
        if not world.started[instance_id].alive:
            await world.start_worker(instance_id)
    if not any(frontend.process.alive for frontend in world.frontends):
        await world.start_frontend()
    await asyncio.sleep(REST_S)
    check()
    await world.check_rest()
    frontend = next(frontend for frontend in world.frontends if frontend.process.alive)
    await _must_work(world, frontend)
    check()
    await world.check_rest()


async def _must_work(world: World, frontend: SimFrontend) -> None:
    """The fleet is not only whole, it can still be updated and asked."""
    before = world.committed_updates
    body = {"transport": {"backend": "filesystem", "path": str(world.models[1])}, "version": "last"}
    await world.update(frontend, body)
    if world.committed_updates == before:
        raise Violation("I7", "at rest, an update does not commit")
    served = world.served
    await world.generate(frontend)
    if world.served == served:
        raise Violation("I7", "at rest, nobody generates")


def _update_body(world: World, step: int) -> dict[str, Any]:
    rng = world.rng
    path = world.models[rng.randrange(1, MODELS)] if rng.random() < 0.85 else world.models[-1]
    policy: dict[str, Any] = {"prepare_timeout_s": 20.0, "commit_timeout_s": 20.0}
    if rng.random() < 0.4:
        policy["on_prepare_failure"] = "exclude"
    return {
        "transport": {"backend": "filesystem", "path": str(path)},
        "version": f"step_{step}",
        "policy": policy,
    }


async def _fault(world: World, ids: list[str]) -> None:
    rng, loop = world.rng, world.loop
    choice = rng.random()
    if choice < 0.35:
        instance_id = rng.choice(ids)
        process = world.started[instance_id]
        if process.alive:
            world.say(f"kill {process.name}")
            process.kill()
            await asyncio.sleep(rng.uniform(0.0, 2.0))
            await world.start_worker(instance_id)
    elif choice < 0.55:
        alive = [frontend for frontend in world.frontends if frontend.process.alive]
        if len(alive) > 1 or (alive and rng.random() < 0.5):
            frontend = rng.choice(alive)
            world.say(f"kill {frontend.process.name}")
            frontend.process.kill()
            await world.start_frontend()
    elif choice < 0.8:
        processes = [*world.started.values()] + [each.process for each in world.frontends]
        process = rng.choice([process for process in processes if process.alive])
        seconds = rng.uniform(0.1, 12.0)
        world.say(f"freeze {process.name} for {seconds:.1f} s")
        process.freeze(seconds)
    elif choice < 0.9:
        if world.server.up:
            world.say("kill nats")
            world.server.kill()
            loop.call_later(rng.uniform(0.05, 3.0), world.server.start)
    else:
        world.server.lost_answers = rng.choice([0.0, 0.01, 0.05])
        world.say(f"lost answers: {world.server.lost_answers}")
