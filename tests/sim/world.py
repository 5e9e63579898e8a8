"""A fleet in the simulation: its workers, frontends and trainers as processes that can be killed and cut off."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from frontend.frontend_limits import FrontendLimits
from frontend.main import Frontend
from frontend.routing.attempts import Accepted
from frontend.routing.demands import Demands
from frontend.server.options import FrontendOptions
from rl_plane.bus.lock import HeldLock
from rl_plane.client import RlClient
from rl_plane.commit.steps import SESSION_IDLE_S
from rl_plane.errors import BusUnreachable, PlaneError
from rl_plane.fleet.fleet import Fleet
from rl_plane.membership.core import Member, fingerprint
from rl_plane.protocol.generation import GenerateDelta, GenerateRequest
from rl_plane.protocol.subjects import MEMBER_PREFIX, SESSION, Entry, Subjects
from rl_plane.protocol.versions import TensorSpec
from tests.sim import product
from tests.sim.checks import CALL, CallRecord, Checks
from tests.sim.desired import MAX_SKEW_S, Desired
from tests.sim.engine import TRANSPORTS, SimEngine
from tests.sim.process import InlineEngine, Process
from tests.sim.sim_nats import SimServer
from tests.sim.sources import Sources
from tests.sim.virtual_loop import PROCESS, VirtualLoop
from worker.receive.staging import model_digest
from worker.worker import Worker

RESTART_S = 0.5
ADMISSION_WAIT_S = 10.0


@dataclass(eq=False)
class Coordinator:
    """A process that may change the fleet: a frontend, or a trainer with an RlClient of its own."""

    process: Process
    client: RlClient
    fleet: Fleet
    frontend: Frontend | None = None

    async def run(self, op: str, body: dict[str, Any], request_id: str = "") -> dict[str, Any]:
        if self.frontend is not None:
            return await self.frontend.own.calls.run(op, body, request_id)
        return await self.fleet.run(op, body, request_id)


@dataclass(eq=False)
class World:
    loop: VirtualLoop
    rng: random.Random
    models: list[Path]
    adapters: list[Path]
    deltas: dict[tuple[str, str], Path]
    """(digest of the version before, digest of the version after) → path of the delta."""
    tensors: list[tuple[str, TensorSpec]]
    """The tensors of each good checkpoint."""
    session_idle_s: int = SESSION_IDLE_S
    """The idle limit of a prepared update."""
    trace: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.subjects = Subjects("sim", "engine")
        self.server = SimServer(self.loop, self.rng)
        self.checks = Checks(self)
        self.server.on_write = self.checks.written
        self.server.on_replaced = self.checks.replaced
        self.desired = Desired(self)
        self.numbers = itertools.count(1)
        self.token_delay_s = 0.0
        self.sources = Sources(self.rng, self.models)
        self.all_processes: list[Process] = []
        self.workers: dict[str, tuple[Process, Worker, SimEngine]] = {}
        self.started: dict[str, Process] = {}
        """The newest process of each instance id; it is in `workers` once its engine is built."""
        self.coordinators: list[Coordinator] = []
        self.calls: list[CallRecord] = []
        self.memory_at = 0.0
        """The time at which memory was last released."""
        self.outage_s = 0.0
        """The seconds for which the server was down, in total."""
        self.reset_at = 0.0
        """The time at which an operator last overwrote weights with noise."""
        self.clock_drift = 0.0
        """The largest drift of two processes' clocks in a second."""
        self.doubles: list[Process] = []
        """Workers whose instance id another process has taken while they stood still."""
        self.engines: list[SimEngine] = []
        self._worker_of: dict[Process, Worker] = {}
        self.ask_something: Callable[[Coordinator], Any] = lambda by: None
        """One call of a trainer by way of this coordinator."""
        self.served = self.committed = self.refused = 0
        self.migrated = 0
        """Choices that another worker continued."""

    @property
    def good_models(self) -> list[Path]:
        """The models that trainers publish. The model that workers start with comes before them. After them come a
        model that is used only at rest, and a model that fits no worker."""
        return self.models[1:-2]

    def say(self, text: str) -> None:
        self.trace.append(f"{self.loop.now - 1000:9.4f} {text}")

    # ---- what there is ----

    def live_workers(self) -> Iterator[tuple[Process, Worker]]:
        for process, worker in list(self._worker_of.items()):
            if process.alive and not self.is_replaced(process):
                yield process, worker

    def is_replaced(self, process: Process) -> bool:
        """Does another living process have its instance id?"""
        worker = self._worker_of.get(process)
        newest = self.workers[product.instance_id(worker)][0] if worker is not None else process
        return newest is not process and newest.alive

    def witnesses(self) -> Iterator[Worker]:
        """All workers that know something, including workers that should have ended."""
        return (worker for process, worker in self._worker_of.items() if process.alive)

    def worker_of(self, process: Process) -> Worker | None:
        return self._worker_of.get(process)

    def _process_of(self, incarnation: str) -> Process:
        return next(one for one, worker in self._worker_of.items() if product.incarnation(worker) == incarnation)

    def anything_wrong(self) -> bool:
        """Has something happened in this run that may keep a worker from the committed weights, or from saying that it
        has them, though nothing was done to this worker?"""
        away = self.outage_s > 0.0 or self.server.stalled or self.server.stood_still
        return bool(away or self.sources.failed or self.reset_at or self.checks.lost_at or self.memory_at)

    def has_double(self, process: Process) -> bool:
        """Does another living process answer under its instance id?"""
        mine = self._worker_of[process]
        return any(
            worker is not mine and product.instance_id(worker) == product.instance_id(mine)
            for worker in self.witnesses()
        )

    def frontends(self) -> list[Coordinator]:
        return [one for one in self.alive() if one.frontend is not None]

    def alive(self) -> list[Coordinator]:
        return [one for one in self.coordinators if one.process.alive]

    def processes(self) -> list[Process]:
        found = [*self.started.values(), *self.doubles, *(one.process for one in self.coordinators)]
        return [process for process in found if process.alive]

    def undisturbed(self, process: Process, seconds: float) -> bool:
        quiet_since = self.loop.now - seconds
        return not process.frozen and process.disturbed_at < quiet_since and self._up_since() < quiet_since

    def _up_since(self) -> float:
        return self.server.up_since if self.server.up else self.loop.now

    def _entries(self, bucket: Any, prefix: str) -> list[Entry]:
        stream = self.server.streams.get(bucket.name)
        keys = stream.keys if stream is not None else {}
        return [
            Entry(key, entry.value, entry.sequence)
            for key, entry in keys.items()
            if key.startswith(prefix) and entry.value
        ]

    def members(self) -> list[str]:
        return [entry.key[len(MEMBER_PREFIX) :] for entry in self._entries(self.subjects.members, MEMBER_PREFIX)]

    def fingerprint(self) -> str:
        found = (Member.from_entry(one) for one in self._entries(self.subjects.members, MEMBER_PREFIX))
        return fingerprint(member for member in found if member is not None)

    def session_waits(self) -> bool:
        """Is an update prepared, and waits for complete or abort?"""
        found = self._entries(self.subjects.state, SESSION)
        return bool(found) and bool(found[0].value)

    # ---- processes ----

    def process(self, name: str) -> Process:
        process = Process(self.loop, self.server, name)
        if self.clock_drift:
            self.set_clocks(process)
        self.all_processes.append(process)
        return process

    def set_clocks(self, process: Process) -> None:
        rng = self.rng
        process.clock.offset = rng.uniform(0.0, 1e6)
        process.clock.rate = 1.0 + rng.uniform(-0.5, 0.5) * self.clock_drift
        process.clock.skew_s = rng.choice([0.0, 1.0, 10.0, MAX_SKEW_S]) * rng.uniform(-1.0, 1.0)

    def start_worker(self, instance_id: str) -> None:
        process = self.started[instance_id] = self.process(f"worker {instance_id[-2:]}.{next(self.numbers)}")
        self.say(f"{process.name} starts")

        async def life() -> None:
            engine = SimEngine(self, process, self.models[0])
            info = await engine.start()
            bus = process.bus(instance_id)
            await bus.connected()
            worker = Worker(
                bus,
                self.subjects,
                engine,
                InlineEngine(),  # type: ignore[arg-type]
                info,
                member_info={
                    "engine": "fake",
                    "host": "sim",
                    "model": "m",
                    "model_path": str(self.models[0]),
                    "max_model_len": 4096,
                    "world_size": 1,
                    "transports": list(TRANSPORTS),
                },
                model_digest=model_digest(self.models[0]),
                on_end=lambda why, code: self._ended(instance_id, process, why),
            )
            self._worker_of[process] = worker
            self.engines.append(engine)
            product.watch_ops(worker, lambda request: self.checks.doing(process, worker, request))
            product.watch_staging(worker, lambda update_id: self.checks.holds_staged(process, update_id))
            self.workers[instance_id] = (process, worker, engine)
            try:
                await worker.start()
            except PlaneError as error:
                self._ended(instance_id, process, f"could not start: {error.message}")

        process.spawn(life())

    def _ended(self, instance_id: str, process: Process, why: str) -> None:
        """Restarts a process that ended, like a supervisor, unless another process was faster."""
        self.say(f"{process.name} ends: {why}")

        def restart() -> None:
            if self.started.get(instance_id) is process:
                self.start_worker(instance_id)

        self.server.later(0.0, process.kill)
        self.server.later(RESTART_S, restart)

    def leave(self, instance_id: str) -> None:
        """SIGTERM: it drains and leaves."""
        process, worker, _ = self.workers[instance_id]
        del self.started[instance_id]
        process.disturb()
        process.leaving = True
        self.say(f"{process.name} leaves")

        async def stop() -> None:
            await worker.drain(5.0, "leaving")
            await worker.stop()
            self.say(f"{process.name} has left")
            self.server.later(0.0, process.kill)

        process.spawn(stop())

    def start_frontend(self) -> None:
        process = self.process(f"frontend {next(self.numbers)}")

        async def life() -> None:
            limits = FrontendLimits(session_idle_s=self.session_idle_s)
            options = FrontendOptions("sim", "sim", "engine", admission_wait_s=ADMISSION_WAIT_S, limits=limits)
            while True:
                try:
                    async with Frontend.running(options) as frontend:
                        me = Coordinator(process, frontend.own.client, frontend.own.calls.fleet, frontend)
                        self.coordinators.append(me)
                        self.say(f"{process.name} is up")
                        await asyncio.Event().wait()
                except PlaneError as error:
                    self.say(f"{process.name} could not start: {error.message[:60]}")
                    for bus in process.buses:
                        await bus.close()
                    await asyncio.sleep(RESTART_S)

        process.spawn(life())

    def start_trainer(self) -> None:
        process = self.process(f"trainer {next(self.numbers)}")

        async def life() -> None:
            while True:
                try:
                    client = await RlClient.connect("sim", "sim", "engine", name=process.name.replace(" ", "-"))
                    self.coordinators.append(Coordinator(process, client, Fleet(client, self.session_idle_s)))
                    self.say(f"{process.name} is up")
                    return
                except PlaneError:
                    await asyncio.sleep(RESTART_S)

        process.spawn(life())

    # ---- generation ----

    async def generate(self, coordinator: Coordinator, tokens_wanted: int, adapter: str | None = None) -> None:
        assert coordinator.frontend is not None
        process = coordinator.process
        prompt = [self.rng.randrange(3, 200) for _ in range(3)]
        request = GenerateRequest(
            id=f"r{next(self.numbers)}", prompt_token_ids=prompt, max_tokens=tokens_wanted, adapter=adapter
        )
        number = next(self.numbers)
        demands = Demands(migrate=number % 2 == 0, one_version=number % 3 == 0)
        tokens: list[int] = []
        spans: list[Any] = []
        seams: dict[int, None] = {}  # where each worker began, in order
        start = self.loop.now
        by: Process | None = None
        try:
            async for event in coordinator.frontend.own.engines.generate(request, demands=demands):
                if isinstance(event, GenerateDelta):
                    tokens += event.token_ids
                    spans = list(event.spans) or spans
                    if event.finish_reason in ("abort", "error"):
                        return
                elif isinstance(event, Accepted):
                    seams[event.at] = None
                    by = self._process_of(event.incarnation)
        except PlaneError as error:
            self.say(f"generate: {error.code}")
            if tokens and error.code in ("worker_lost", "engine_failed"):
                self.checks.answers.failed_stream(process, by, f"{error.code}: {error.message}", start)
            return
        self.served += 1
        self.migrated += len(seams) > 1
        if demands.one_version and len(spans) > 1:
            self.checks.fail("I3", f"{process.name} delivers tokens of several versions, and one was demanded")
        self.checks.serving.completed(process.name, prompt, tokens, spans, start, list(seams))


# ---- what is put into the product, to watch it and to connect it ----


async def sim_connect(
    cls: Any, url: str = "", name: str = "rl-plane", wait_s: float = 5.0, credentials: object = None
) -> Any:
    """`Bus.connect`, for the simulated process that runs now."""
    process = PROCESS.get()
    bus = process.bus(name)
    try:
        async with asyncio.timeout(wait_s):
            await bus.connected()
    except TimeoutError:
        await bus.close()
        raise BusUnreachable("simulated: no NATS server answers") from None
    return bus


def watched_lock(init: Any) -> Any:
    """`HeldLock.__init__`, which also notes under which fence a call works."""

    def __init__(self: HeldLock, *args: Any, **more: Any) -> None:
        init(self, *args, **more)
        if (call := CALL.get()) is not None:
            call.fences.append(self.fence)

    return __init__
