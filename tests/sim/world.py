"""A fleet in the simulation: workers, frontends and clients as processes that can be killed and cut off, and what is
checked of them at every step."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from frontend.committed import Committed
from frontend.engine_client import EngineClient
from frontend.fleet_status import FleetStatus
from rl_plane.client import RlClient
from rl_plane.errors import PlaneError
from rl_plane.fleet import Fleet
from rl_plane.generation import GenerateDelta, GenerateRequest
from rl_plane.record import DecisionRecord
from rl_plane.streams import StreamReceiver
from rl_plane.subjects import RECORD, Bucket, Subjects
from rl_plane.versions import WeightVersion
from tests.sim.sim_nats import SimBus, SimServer
from worker.engines.base import EngineOptions
from worker.engines.fake import build, fake_token
from worker.staging import model_digest
from worker.transports.filesystem import FilesystemTransport
from worker.worker import Worker

SUBJECTS = Subjects("sim", "engine")
TOKENS = 4
RESTART_S = 0.5
ANSWER_BOUND_S = 900.0
"""I5: a call ends within the bounds that its policy adds up to, and retries."""


class Violation(AssertionError):
    def __init__(self, invariant: str, text: str) -> None:
        super().__init__(f"{invariant}: {text}")
        self.invariant = invariant


class InlineEngine:
    """EngineLoop's interface on the one loop of the simulation."""

    def __init__(self, process: Process) -> None:
        self._process = process

    async def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return await work

    async def stream(self, source: Any) -> Any:
        async with contextlib.aclosing(source) as items:
            async for item in items:
                yield [item]


class Process:
    """Tasks and connections that die together, at once, without a last word."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.alive = True
        self.buses: list[SimBus] = []
        self.before: set[asyncio.Task[Any]] = set()

    def bus(self, name: str) -> SimBus:
        bus = SimBus(self.world.server, name)
        self.buses.append(bus)
        return bus

    def kill(self) -> None:
        self.alive = False
        for bus in self.buses:
            bus.die()
        for task in asyncio.all_tasks():
            if _owner.get(task) is self:
                task.cancel()

    def freeze(self, seconds: float) -> None:
        """SIGSTOP, then SIGCONT: it goes on where it was, and sends late what it had to say."""
        for bus in self.buses:
            bus.conn.frozen = True
            bus.conn.thawed.clear()
            self.world.loop.call_later(seconds, self.thaw, bus)
            # The server's PING goes unanswered.
            self.world.loop.call_later(min(seconds, 5.0), self._pinged, bus)

    def _pinged(self, bus: SimBus) -> None:
        if bus.conn.frozen and bus.conn.is_connected:
            self.world.server.disconnect(bus.conn, for_good=False)

    @staticmethod
    def thaw(bus: SimBus) -> None:
        bus.conn.frozen = False
        bus.conn.thawed.set()
        bus.conn.send_pending()


class _Owners(dict["asyncio.Task[Any]", Process]):
    pass


_owner: _Owners = _Owners()
_current: list[Process | None] = [None]


def task_factory(loop: asyncio.AbstractEventLoop, work: Any, **more: Any) -> asyncio.Task[Any]:
    """A task belongs to the process of the task that made it."""
    task: asyncio.Task[Any] = asyncio.Task(work, loop=loop, **more)
    maker = asyncio.current_task(loop)
    owner = _owner.get(maker) if maker is not None else _current[0]
    if owner is not None:
        _owner[task] = owner
        task.add_done_callback(lambda done: _owner.pop(done, None))
    return task


@contextlib.contextmanager
def as_process(process: Process) -> Any:
    task = asyncio.current_task()
    assert task is not None
    before = _owner.get(task)
    _owner[task] = process
    try:
        yield
    finally:
        if before is None:
            _owner.pop(task, None)
        else:
            _owner[task] = before


@dataclass
class SimFrontend:
    process: Process
    client: RlClient
    fleet: Fleet
    engines: EngineClient


@dataclass
class World:
    loop: Any
    rng: random.Random
    models: list[Path]
    trace: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.server = SimServer(self.loop, self.rng)
        self.server.on_write = self._written
        self.decided: list[WeightVersion] = []
        self.ids = itertools.count(1)
        self.workers: dict[str, tuple[Process, Worker]] = {}
        self.started: dict[str, Process] = {}
        """The newest process of each instance id; it is in `workers` once its engine is built."""
        self.frontends: list[SimFrontend] = []
        self.first_delivered: dict[int, float] = {}
        """Sequence → when a client first had tokens of it."""
        self.served = 0
        self.committed_updates = 0
        self.aborted_updates = 0

    def say(self, text: str) -> None:
        self.trace.append(f"{self.loop.now - 1000:9.4f} {text}")

    # ---- I6, I1 ----

    def _written(self, bucket: Bucket, key: str, value: bytes | None) -> None:
        if bucket != SUBJECTS.state or key != RECORD or not value:
            return
        version = DecisionRecord.decode(value).version
        self.say(f"record: {version.sequence} {version.label}")
        if self.decided and version == self.decided[-1]:
            return  # it was opened
        if self.decided:
            last = self.decided[-1]
            if version.run != last.run or version.sequence != last.sequence + 1:
                raise Violation("I6", f"the record went from {last.sequence} to {version.sequence}")
        self.decided.append(version)

    # ---- processes ----

    def spawn(self, process: Process, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = self.loop.create_task(work)
        _owner[task] = process
        return task

    async def start_worker(self, instance_id: str) -> None:
        process = self.started[instance_id] = Process(self, f"worker {instance_id[-2:]}")
        self.say(f"{process.name} starts")

        async def life() -> None:
            adapter = build(EngineOptions(self.models[0]))
            info = await adapter.start()
            transports = {"filesystem": FilesystemTransport([self.models[0].parent])}
            bus = process.bus(instance_id)
            await bus.connected()
            worker = Worker(
                bus,
                SUBJECTS,
                adapter,
                InlineEngine(process),  # type: ignore[arg-type]
                info,
                transports,
                member_info={
                    "engine": "fake",
                    "model": "m",
                    "model_path": str(self.models[0]),
                    "max_model_len": 4096,
                    "transports": ["filesystem"],
                },
                model_digest=model_digest(self.models[0]),
                on_end=lambda why: self._ended(process, why),
            )
            self.workers[instance_id] = (process, worker)
            try:
                await worker.start()
            except PlaneError as error:
                self._ended(process, f"could not start: {error.message}")
                if self.started[instance_id] is process:
                    self.loop.call_later(RESTART_S, self._restart, instance_id, process)

        self.spawn(process, life())

    def _restart(self, instance_id: str, ended: Process) -> None:
        """As a supervisor does, unless somebody was faster."""
        if self.started[instance_id] is ended:
            self.loop.create_task(self.start_worker(instance_id))

    def _ended(self, process: Process, why: str) -> None:
        self.say(f"{process.name} ends: {why}")
        self.loop.call_soon(process.kill)  # a real one exits

    async def start_frontend(self) -> None:
        process = Process(self, f"frontend {next(self.ids)}")

        async def life() -> None:
            bus = process.bus(process.name.replace(" ", "-"))
            await bus.connected()
            client = RlClient(bus, SUBJECTS.namespace, SUBJECTS.component)
            while True:
                try:
                    await client._gather.start_listening()
                    view = await client._start_view(SUBJECTS)
                    break
                except PlaneError:
                    await asyncio.sleep(0.2)
            receiver = StreamReceiver(bus)
            await receiver.start()
            committed = Committed(bus, SUBJECTS.state)
            status = FleetStatus(client, view)
            while True:
                try:
                    await committed.start()
                    await status.start()
                    break
                except PlaneError:
                    await asyncio.sleep(0.2)
            engines = EngineClient(receiver, view, status, committed, 10.0)
            engines.start()
            self.frontends.append(SimFrontend(process, client, Fleet(client), engines))
            self.say(f"{process.name} is up")

        self.spawn(process, life())

    # ---- what clients do ----

    async def generate(self, frontend: SimFrontend) -> None:
        prompt = [self.rng.randrange(3, 200) for _ in range(3)]
        request = GenerateRequest(id=f"r{next(self.ids)}", prompt_token_ids=prompt, max_tokens=TOKENS)
        tokens: list[int] = []
        spans: list[Any] = []
        start = self.loop.now
        try:
            async for event in frontend.engines.generate(request):
                if isinstance(event, GenerateDelta):
                    tokens += event.token_ids
                    spans = list(event.spans) or spans
                    if event.finish_reason in ("abort", "error"):
                        return
        except PlaneError as error:
            self.say(f"generate: {error.code}")
            return
        self._check_tokens(prompt, tokens, spans, start)

    def _check_tokens(self, prompt: list[int], tokens: list[int], spans: list[Any], start: float) -> None:
        """I3: whatever a frontend delivers was made by committed weights, and says which."""
        self.served += 1
        if not spans or spans[0].start != 0 or spans[-1].end != len(tokens):
            raise Violation("I3", f"{len(tokens)} tokens came with the spans {spans}")
        for span in spans:
            version = WeightVersion(span.run, span.sequence, span.version, span.digest)
            if version not in self.decided:
                raise Violation("I3", f"tokens of {version}, which was never committed")
            for newer, at in self.first_delivered.items():
                if newer > span.sequence and at < start:
                    raise Violation("I3", f"asked after {newer} was served, and answered by {span.sequence}")
            for position in range(span.start, span.end):
                if tokens[position] != fake_token(span.digest, prompt, position, 512):
                    raise Violation("I3", f"token {position} was not made by {span.version}")
        for span in spans:
            self.first_delivered.setdefault(span.sequence, self.loop.now)

    async def update(self, frontend: SimFrontend, body: dict[str, Any]) -> None:
        name = body.get("version", "?")
        decided = len(self.decided)
        start = self.loop.now
        self.say(f"{frontend.process.name} updates to {name}: {body['transport']['path'][-12:]}")
        try:
            async with asyncio.timeout(ANSWER_BOUND_S):
                reply = await frontend.fleet.run("update_weights", body)
        except TimeoutError:
            if frontend.process.alive:
                raise Violation("I5", f"the update {name} did not end in {self.loop.now - start:g} s") from None
            return
        except PlaneError as error:
            self.aborted_updates += 1
            self.say(f"update {name}: {error.code} {error.message[:90]}")
            if error.code in ("update_aborted", "invalid_weights", "invalid_request"):
                labels = [version.label for version in self.decided[decided:]]
                if name in labels:
                    raise Violation("I2", f"the update {name} was told as aborted, and is committed") from error
            return
        self.committed_updates += 1
        self.say(f"update {name}: committed, excluded {reply['excluded']}")
        version = WeightVersion.from_wire(reply["version"])
        if version not in self.decided:
            raise Violation("I2", f"the update {name} was told as committed, and is not")

    # ---- at rest ----

    async def check_rest(self) -> None:
        """I7, I2: when nothing fails any more, every worker serves the committed version, and nobody is stuck."""
        last = self.decided[-1]
        for instance_id, (process, worker) in self.workers.items():
            if not process.alive:
                continue
            state = worker.state
            if state.version != last or state.closed or state.digest != last.digest:
                raise Violation(
                    "I7",
                    f"{process.name} ({instance_id}) holds {state.version and state.version.label}, "
                    f"closed {state.closed}, committed is {last.label}",
                )
            if (busy := worker._updates.busy_with) is not None:
                raise Violation("I7", f"{process.name} still holds staged weights of {busy}")


Fault = Callable[[], None]
