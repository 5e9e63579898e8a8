"""What can go wrong in a run, and how: each seed has some of it."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

from tests.sim.process import Process
from tests.sim.trainers import KINDS
from tests.sim.world import World

MAX_WORKERS = 5

Kind = str

FAULTS: dict[Kind, float] = {
    "kill_worker": 3.0,
    "kill_coordinator": 3.0,
    "freeze": 3.0,
    "cut_off": 1.0,
    "kill_nats": 1.5,
    "lose_writes": 0.7,
    "lose_store": 0.3,
    "lost_answers": 1.0,
    "duplicates": 0.7,
    "stalls": 0.5,
    "join": 1.0,
    "leave": 1.0,
    "hang_engine": 1.0,
    "fail_swap": 1.0,
    "engine_dies": 0.5,
    "source_gone": 0.7,
    "slow_threads": 0.5,
}
"""How often each happens, relative to the others, in a run that has it."""
RARE = {"lose_writes": 0.25, "lose_store": 0.2, "stalls": 0.3}
"""In how many runs; the others are in half of them. What these excuse, others could not show."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """What a seed is about."""

    workers: int
    frontends: int
    trainers: int
    life_s: float
    token_delay_s: float
    client_rate: float
    faults: frozenset[Kind]
    calls: frozenset[str]

    @classmethod
    def drawn(cls, rng: random.Random) -> Scenario:
        quiet = rng.random() < 0.05
        faults = [kind for kind in FAULTS if not quiet and rng.random() < RARE.get(kind, 0.5)]
        return cls(
            workers=rng.choice([1, 2, 2, 3, 3, 3, 4]),
            frontends=rng.choice([1, 2, 2, 3]),
            trainers=rng.choice([0, 0, 1]),
            life_s=rng.choice([6.0, 10.0, 15.0]),
            token_delay_s=rng.choice([0.0, 0.02, 0.1]),
            client_rate=rng.choice([4.0, 12.0]),
            faults=frozenset(faults),
            calls=frozenset(kind for kind in KINDS if rng.random() < (0.1 if kind == "new_run" else 0.4)),
        )

    def __str__(self) -> str:
        return f"{self.workers} workers, faults {sorted(self.faults)}, calls {sorted(self.calls)}"


class Faults:
    def __init__(self, world: World, scenario: Scenario) -> None:
        self._world = world
        self._kinds = [kind for kind in FAULTS if kind in scenario.faults]
        self._weights = [FAULTS[kind] for kind in self._kinds]
        self._new_ids = (f"{number:016x}" for number in itertools.count(scenario.workers + 1))

    def something(self) -> None:
        if self._kinds:
            kind = self._world.rng.choices(self._kinds, self._weights)[0]
            getattr(self, f"_{kind}")()

    def end(self) -> None:
        """Nothing fails any more, and what was broken is whole again."""
        world, server = self._world, self._world.server
        world.say("rest")
        server.lost_answers = server.stalls = server.duplicates = 0.0
        world.loop.slow_thread_share = 0.0
        world.gone.clear()
        server.start()
        for process in world.processes():
            process.thaw()
        for _, _, engine in world.workers.values():
            engine.hung_until = engine.failing_swaps = 0
        for instance_id, process in list(world.started.items()):
            if not process.alive:
                world.start_worker(instance_id)
        if not world.frontends():
            world.start_frontend()

    # ---- processes ----

    def _worker(self) -> tuple[str, Process] | None:
        alive = [(key, process) for key, process in self._world.started.items() if process.alive]
        return self._world.rng.choice(alive) if alive else None

    def _kill_worker(self) -> None:
        world = self._world
        if (found := self._worker()) is None:
            return
        instance_id, process = found
        world.say(f"kill {process.name}")
        process.kill()
        if world.rng.random() < 0.1 and len(world.started) > 1:
            del world.started[instance_id]  # for good
            return

        def again() -> None:
            if world.started.get(instance_id) is process:
                world.start_worker(instance_id)

        world.server.later(world.rng.uniform(0.0, 2.0), again)

    def _kill_coordinator(self) -> None:
        world = self._world
        alive = world.alive()
        if alive:
            one = world.rng.choice(alive)
            world.say(f"kill {one.process.name}")
            one.process.kill()
            world.server.later(
                world.rng.uniform(0.0, 1.0),
                world.start_frontend if one.frontend is not None else world.start_trainer,
            )

    def _freeze(self) -> None:
        world = self._world
        if processes := world.processes():
            process = world.rng.choice(processes)
            seconds = world.rng.choice([0.2, 1.0, 3.0, 8.0, 14.0]) * world.rng.uniform(0.5, 1.5)
            world.say(f"freeze {process.name} for {seconds:.1f} s")
            process.freeze(seconds)

    def _cut_off(self) -> None:
        """Its connection breaks, and comes back."""
        world = self._world
        processes = [process for process in world.processes() if process.buses]
        if processes and world.server.up:
            process = world.rng.choice(processes)
            world.say(f"cut {process.name} off")
            process.cut_off(process.buses[-1])

    def _join(self) -> None:
        if len(self._world.started) < MAX_WORKERS:
            self._world.start_worker(next(self._new_ids))

    def _leave(self) -> None:
        world = self._world
        ready = [key for key, (process, *_) in world.workers.items() if world.started.get(key) is process]
        ready = [key for key in ready if world.started[key].alive]
        if len(ready) > 1:
            world.leave(world.rng.choice(ready))

    # ---- NATS ----

    def _kill_nats(self, losing: str = "") -> None:
        world, server, rng = self._world, self._world.server, self._world.rng
        if not server.up:
            return
        away_s = rng.choice([0.05, 0.5, 3.0]) * rng.uniform(0.5, 1.5)
        world.say(f"kill nats for {away_s:.2f} s {losing}")
        server.kill()
        world.outage_s += away_s

        def back() -> None:
            if not server.up:
                self._lose(losing)
                server.start()

        server.later(away_s, back)

    def _lose(self, losing: str) -> None:
        world, server, rng = self._world, self._world.server, self._world.rng
        buckets = [world.subjects.state, world.subjects.members]
        if losing == "store":
            server.lose_store()
            for bucket in buckets:
                world.checks.lost_writes(bucket)
            return
        for bucket in buckets if losing else []:
            chance = rng.random()
            if chance < 0.4:
                lost = server.lose_writes(bucket, rng.choice([1, 2, 5, 20]))
            elif chance < 0.7:
                lost = server.lose_since(bucket, world.loop.now - rng.uniform(0.0, 6.0))
            else:
                continue
            if lost:
                world.say(f"the last {lost} writes of {bucket.name} are lost")
                world.checks.lost_writes(bucket)

    def _lose_writes(self) -> None:
        self._kill_nats("writes")

    def _lose_store(self) -> None:
        self._kill_nats("store")

    def _set(self, what: str, *values: float) -> None:
        value = self._world.rng.choice(values)
        setattr(self._world.server, what, value)
        self._world.say(f"{what}: {value}")

    def _lost_answers(self) -> None:
        self._set("lost_answers", 0.0, 0.01, 0.05)

    def _duplicates(self) -> None:
        self._set("duplicates", 0.0, 0.02, 0.2)

    def _stalls(self) -> None:
        self._set("stalls", 0.0, 0.002, 0.01)

    # ---- engines and sources ----

    def _slow_threads(self) -> None:
        self._world.loop.slow_thread_share = self._world.rng.choice([0.0, 0.1, 0.5])

    def _hang_engine(self) -> None:
        world = self._world
        if world.workers:
            process, _, engine = world.rng.choice(list(world.workers.values()))
            seconds = world.rng.choice([1.0, 4.0, 9.0, 30.0])
            world.say(f"the engine of {process.name} hangs for {seconds} s")
            process.disturbed_at = world.loop.now + seconds
            engine.hung_until = world.loop.now + seconds

    def _fail_swap(self) -> None:
        world = self._world
        if world.workers:
            process, _, engine = world.rng.choice(list(world.workers.values()))
            world.say(f"the next swap of {process.name} fails")
            engine.failing_swaps = 1

    def _engine_dies(self) -> None:
        world = self._world
        if found := self._worker():
            process, _, engine = world.workers.get(found[0], (None, None, None))
            if process is found[1] and engine is not None:
                world.say(f"the engine of {process.name} dies")
                process.disturbed_at = world.loop.now
                process.spawn(engine.close())

    def _source_gone(self) -> None:
        world = self._world
        path = str(world.rng.choice([*world.models[:-1], *world.adapters]))
        if path in world.gone:
            world.gone.discard(path)
        else:
            world.gone.add(path)
        world.say(f"gone: {sorted(one[-2:] for one in world.gone)}")
