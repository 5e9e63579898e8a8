"""One seed: a fleet lives through updates and faults, and must be whole again at the end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import random
import secrets
import tempfile
import uuid
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import permutations
from pathlib import Path
from typing import Any
from unittest import mock

from rl_plane.bus.connection import Bus
from rl_plane.bus.lock import HeldLock
from rl_plane.bus.token_stream import IncomingStream
from rl_plane.commit.steps import SESSION_IDLE_S
from rl_plane.protocol.versions import DTYPE_BYTES, HostTensor, TensorSpec
from rl_plane.weights.checkpoint import open_checkpoint
from rl_plane.weights.delta_codec import encode
from rl_plane.weights.safetensors_file import write_safetensors
from tests.sim.calls import call
from tests.sim.check_rest import problem as problem_of
from tests.sim.checks import Violation
from tests.sim.coverage import recorded
from tests.sim.faults import Faults, Scenario, drawn_apart
from tests.sim.trainers import ADAPTERS, Trainers
from tests.sim.virtual_loop import VirtualLoop, virtual_time
from tests.sim.world import Coordinator, World, sim_connect, watched_lock
from worker.engines.fake.adapter import make_fake_adapter, make_fake_model
from worker.receive.staging import model_digest

MODELS = 6
ADAPTER_FILES = 3
STEPS_S = 4.0
"""Calls and faults a second."""
LONG_SHARE = 0.05
"""The tokens of a request: long enough to see a fault."""
REST_S = 200.0
"""The seconds after the last fault: leases, retries with growing pauses and the idle limit of a prepared update fit
in."""
QUIET_S = 4.0
"""The fleet must not only become whole, but stay so."""
LOOK_S = 1.0
MAX_DRIFT = 0.02
"""The drift of two clocks in a second: much more than real clocks have, and much less than the leases allow."""
SHORT_IDLE_S = 3
"""The idle limit of a prepared update in some runs. In the others the real one is longer than a run."""


@lru_cache(maxsize=1)
def models() -> list[Path]:
    """Real checkpoints on the disk, the same for all runs; the last one has another shape."""
    root = Path(tempfile.gettempdir()) / f"rl-plane-sim-{os.getuid()}"
    found = [make_fake_model(root / f"m{seed}", seed=seed, tensors=2, nbytes=64) for seed in range(MODELS)]
    return [*found, make_fake_model(root / "wrong", seed=9, tensors=3, nbytes=64)]


@lru_cache(maxsize=1)
def deltas() -> dict[tuple[str, str], Path]:
    """The deltas from each good checkpoint to each other one, by their digests."""
    digests = {model_digest(path): path for path in models()[:-2]}
    found = {}
    for (base, old), (digest, new) in permutations(digests.items(), 2):
        path = found[base, digest] = old.parent / f"{old.name}-{new.name}"
        path.mkdir(exist_ok=True)
        after = dict(_tensors(new))
        blobs = {
            name: encode(tensor.data, after[name].data, DTYPE_BYTES[tensor.spec.dtype])
            for name, tensor in _tensors(old)
        }
        tensors = {
            name: (TensorSpec("U8", (len(blob),)), blob) for name, blob in blobs.items() if blob is not None
        }
        write_safetensors(path / "model.safetensors", tensors)
    return found


def _tensors(directory: Path) -> list[tuple[str, HostTensor]]:
    checkpoint = open_checkpoint(directory)
    try:
        return [
            (name, HostTensor(tensor.spec, memoryview(bytes(tensor.data))))
            for name, tensor in checkpoint.tensors()
        ]
    finally:
        checkpoint.close()


@lru_cache(maxsize=1)
def adapters() -> list[Path]:
    root = models()[0].parent
    return [make_fake_adapter(root / f"a{seed}", seed, models()[0]) for seed in range(ADAPTER_FILES)]


@dataclass
class Result:
    seed: int
    violation: Violation | None
    trace: list[str]
    served: int
    committed: int
    refused: int
    reached: frozenset[str]
    """Transitions of the machines."""
    migrated: int = 0
    """The number of served requests that continued at another worker."""


def session_idle_s(seed: int) -> int:
    return SHORT_IDLE_S if seed % 3 == 0 else SESSION_IDLE_S


@contextmanager
def simulated(seed: int) -> Iterator[tuple[VirtualLoop, random.Random]]:
    """A loop and a chance that are the same each time: nothing of this machine gets in."""
    rng, names = random.Random(seed), random.Random(seed)
    state = random.getstate()
    random.seed(seed)
    loop = VirtualLoop(rng)
    loop.set_exception_handler(lambda loop, context: None)
    asyncio.set_event_loop(loop)
    logging.disable(logging.CRITICAL)
    gc.disable()
    warnings.filterwarnings("ignore", "coroutine .* was never awaited")  # by a process that was killed
    numbers = iter(range(1 << 62))
    stand_ins: list[tuple[Any, str, Any]] = [
        (secrets, "token_hex", lambda count=16: f"{names.getrandbits(8 * count):0{2 * count}x}"),
        (uuid, "uuid4", lambda: uuid.UUID(int=names.getrandbits(128))),
        (Bus, "connect", classmethod(sim_connect)),
        (HeldLock, "__init__", watched_lock(HeldLock.__init__)),
        (IncomingStream, "__hash__", lambda self: self.__dict__.setdefault("born", next(numbers))),
    ]
    try:
        with ExitStack() as stack:
            for target, name, stand_in in stand_ins:
                stack.enter_context(mock.patch.object(target, name, stand_in))
            stack.enter_context(virtual_time(loop))
            yield loop, rng
    finally:
        random.setstate(state)
        asyncio.set_event_loop(None)
        gc.collect()
        gc.enable()
        logging.disable(logging.NOTSET)


def run_seed(seed: int, cluster: bool = False, partitions: bool = False) -> Result:
    """`cluster`: with what only a cluster of servers does. `partitions`: in this run in any case."""
    models(), adapters(), deltas()  # written outside of the run, which they would change
    with recorded() as reached, simulated(seed) as (loop, rng):
        return _run(seed, loop, rng, reached, Scenario.drawn(rng, cluster, drawn_apart(seed, partitions)))


def _run(seed: int, loop: VirtualLoop, rng: random.Random, reached: set[str], scenario: Scenario) -> Result:
    tensors = [(name, tensor.spec) for name, tensor in _tensors(models()[0])]
    world = World(loop, rng, models(), adapters(), deltas(), tensors, session_idle_s(seed))
    try:
        loop.run_until_complete(_life(world, scenario))
    except RuntimeError as error:  # nothing is left to do, or a violation has stopped the loop
        if world.checks.violation is None:
            world.checks.fail("I5", str(error))
    loop.bury(world.all_processes)
    checks = world.checks
    counts = world.served, world.committed, world.refused
    return Result(seed, checks.violation, world.trace, *counts, frozenset(reached), world.migrated)


async def _life(world: World, scenario: Scenario) -> None:
    rng, loop = world.rng, world.loop
    world.say(str(scenario))
    world.token_delay_s = scenario.token_delay_s
    world.clock_drift = MAX_DRIFT if scenario.clocks else 0.0
    faults, trainers = Faults(world, scenario), Trainers(world, scenario.calls, scenario.canary)
    world.ask_something = lambda by: _checked(world, trainers.something(by))
    for number in range(1, scenario.workers + 1):
        world.start_worker(f"{number:016x}")
    for _ in range(scenario.frontends):
        world.start_frontend()
    for _ in range(scenario.trainers):
        world.start_trainer()
    jobs: list[asyncio.Task[None]] = []

    async def clients() -> None:
        while True:
            await asyncio.sleep(rng.expovariate(scenario.client_rate))
            if alive := world.frontends():
                one = rng.choice(alive)
                tokens = 30 if rng.random() < LONG_SHARE else rng.choice([1, 3])
                adapter = rng.choice(ADAPTERS) if "lora" in scenario.calls and rng.random() < 0.3 else None
                one.process.spawn(_checked(world, world.generate(one, tokens, adapter)))

    asking = loop.create_task(_checked(world, clients()))
    end = loop.now + scenario.life_s
    while loop.now < end:
        await asyncio.sleep(rng.expovariate(STEPS_S))
        if rng.random() < 0.4 and (able := world.alive()):
            by = rng.choice(able)
            jobs.append(by.process.spawn(_checked(world, trainers.something(by))))
        else:
            faults.something()
    asking.cancel()
    faults.end()
    await _become_whole(world)
    await _must_work(world, trainers)


async def _checked(world: World, work: Any) -> None:
    """An error of the simulation itself is not lost."""
    try:
        await work
    except Exception as error:
        import traceback

        world.say(traceback.format_exc())
        world.checks.fail("simulator", f"{type(error).__name__}: {error}")


async def _become_whole(world: World) -> None:
    give_up = world.loop.now + REST_S
    whole_since: float | None = None
    while whole_since is None or world.loop.now < whole_since + QUIET_S:
        await asyncio.sleep(LOOK_S)
        running = next((each for each in world.calls if each.ended_at is None and each.by.alive), None)
        problem = problem_of(world)
        if problem is None and running is None:
            whole_since = whole_since or world.loop.now
            continue
        whole_since = None
        if world.loop.now > give_up:
            if problem is not None:
                world.checks.fail(problem.invariant, problem.text)
            elif running is not None:
                world.checks.fail("I5", f"{running.op} {running.name} does not end")


async def _must_work(world: World, trainers: Trainers) -> None:
    """The fleet is not only whole, it can still be steered, updated and asked."""
    one: Coordinator = world.frontends()[0]

    async def steps() -> None:
        await trainers.tidy_up(one)
        await _become_whole(world)
        body = {"transport": {"backend": "filesystem", "path": str(world.models[-2])}, "version": "last"}
        if world.members() and await call(world, one, "update_weights", body, "last") is None:
            world.checks.fail("I7", "at rest, an update does not commit")
        served = world.served
        await world.generate(one, 3)
        if world.members() and world.served == served:
            world.checks.fail("I7", "at rest, no worker generates")

    with contextlib.suppress(asyncio.CancelledError):
        await one.process.spawn(_checked(world, steps()))
    await _become_whole(world)
