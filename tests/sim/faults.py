"""The faults of a run. Each seed has some of them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

from tests.sim.desired import MAX_SKEW_S
from tests.sim.faults_nats import NatsFaults
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
    "contend": 3.0,
    "still_nats": 1.0,
    "still_disk": 1.0,
    "pause_machine": 1.5,
    "clock_step": 1.0,
    "double": 1.0,
    "miscompute": 1.5,
    "cut_plane": 1.0,
    "write_over": 0.7,
}
"""Fault → its frequency relative to the others, in a run that has it."""
RARE = {
    "lose_writes": 0.25,
    "lose_store": 0.2,
    "stalls": 0.3,
    "contend": 0.4,
    "still_nats": 0.25,
    "still_disk": 0.25,
    "pause_machine": 0.2,
    "clock_step": 0.2,
    "double": 0.25,
    "miscompute": 0.3,
    "cut_plane": 0.3,
    "write_over": 0.2,
}
"""In how many runs; the others are in half of them. What these excuse, others could not show."""
FOCUSED = 0.25
"""In how many runs little goes wrong, and that often: much at once excuses more than it shows."""
CLUSTER: dict[Kind, float] = {"change_leader": 1.5, "keep_old_leader": 1.5}
"""Faults of a cluster, which the protocol does not claim to survive. `--cluster` has them in every run."""

APART: dict[Kind, float] = {"partition": 3.0, "overtake": 3.0}
"""Faults that a chance of its own adds to some runs: the other runs are what they would be without."""
APART_SHARE = {"partition": 0.3, "overtake": 0.3}
"""In how many runs."""


def drawn_apart(seed: int, partitions: bool) -> list[Kind]:
    """The faults of APART that the run of this seed has. `partitions`: it has partitions in any case."""
    shares = {**APART_SHARE, "partition": 1.0} if partitions else APART_SHARE
    return [kind for kind, share in shares.items() if random.Random(f"{kind}s {seed}").random() < share]


@dataclass(frozen=True, slots=True)
class Scenario:
    """The contents of a seed."""

    workers: int
    frontends: int
    trainers: int
    life_s: float
    token_delay_s: float
    client_rate: float
    faults: frozenset[Kind]
    calls: frozenset[str]
    clocks: bool
    """Do the clocks of its processes differ?"""
    canary: bool
    """Do its trainers say what their weights compute?"""

    @classmethod
    def drawn(cls, rng: random.Random, cluster: bool = False, apart: Sequence[Kind] = ()) -> Scenario:
        """`apart`: the faults of APART that this run has."""
        quiet = rng.random() < 0.05
        faults = [kind for kind in FAULTS if not quiet and rng.random() < RARE.get(kind, 0.5)]
        faults += CLUSTER if cluster else ()
        calls = [kind for kind in KINDS if rng.random() < (0.1 if kind == "new_run" else 0.4)]
        if rng.random() < FOCUSED:
            faults = [*rng.sample([*FAULTS], 2), *(["contend"] if rng.random() < 0.6 else [])]
            calls = [*rng.sample(KINDS, 1), *(["pause"] if rng.random() < 0.5 else [])]
        faults += apart
        return cls(
            workers=rng.choice([1, 2, 2, 3, 3, 3, 4]),
            frontends=rng.choice([1, 2, 2, 3]),
            trainers=rng.choice([0, 0, 1]),
            life_s=rng.choice([6.0, 10.0, 15.0]),
            token_delay_s=rng.choice([0.0, 0.02, 0.1]),
            client_rate=rng.choice([4.0, 12.0]),
            faults=frozenset(faults),
            calls=frozenset(calls),
            clocks=rng.random() < 0.3,
            canary=rng.random() < 0.4,
        )

    def __str__(self) -> str:
        traits = f"{', clocks' if self.clocks else ''}{', canary' if self.canary else ''}"
        return f"{self.workers} workers{traits}, faults {sorted(self.faults)}, calls {sorted(self.calls)}"


class Faults(NatsFaults):
    def __init__(self, world: World, scenario: Scenario) -> None:
        super().__init__(world)
        if CLUSTER.keys() <= scenario.faults:
            self._ways = (*self._ways, "refused")
        weights = {**FAULTS, **CLUSTER, **APART}
        self._kinds = [kind for kind in weights if kind in scenario.faults]
        self._weights = [weights[kind] for kind in self._kinds]
        self._new_ids = (f"{number:016x}" for number in itertools.count(scenario.workers + 1))

    def something(self) -> None:
        if self._kinds:
            kind = self._world.rng.choices(self._kinds, self._weights)[0]
            getattr(self, f"_{kind}")()

    def end(self) -> None:
        """Nothing fails any more, and what was broken is whole again."""
        world, server = self._world, self._world.server
        world.say("rest")
        self._over = True
        server.lost_answers = server.stalls = server.duplicates = 0.0
        server.still_until = server.disk_until = 0.0
        server.old_leader = None
        if server.holding is not None:
            server.holding.release()
        server.heal()
        world.loop.slow_thread_share = 0.0
        world.sources.gone.clear()
        world.sources.written()
        server.start()
        for process in world.processes():
            process.thaw()
            process.plane = ""
        for engine in world.engines:
            engine.hung_until = engine.failing_swaps = 0
            engine.config.miscompute = False
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
            soon = world.rng.uniform(0.0, 1.0)
            world.server.later(
                soon if soon < 0.8 else 10.0 * soon,  # some come when each worker has given up to wait
                world.start_frontend if one.frontend is not None else world.start_trainer,
            )

    def _freeze(self) -> None:
        world = self._world
        if processes := world.processes():
            process = world.rng.choice(processes)
            seconds = world.rng.choice([0.2, 1.0, 3.0, 8.0, 14.0]) * world.rng.uniform(0.5, 1.5)
            world.say(f"freeze {process.name} for {seconds:.1f} s")
            process.freeze(seconds)

    def _pause_machine(self) -> None:
        """Pauses a machine, whose clock does not count the time."""
        world = self._world
        if processes := world.processes():
            process = world.rng.choice(processes)
            seconds = world.rng.choice([1.0, 3.0, 8.0, 20.0]) * world.rng.uniform(0.5, 1.5)
            world.say(f"the machine of {process.name} is paused for {seconds:.1f} s")
            process.freeze(seconds, clock_too=True)

    def _clock_step(self) -> None:
        world = self._world
        if world.clock_drift and (processes := world.processes()):
            process = world.rng.choice(processes)
            process.clock.skew_s = world.rng.uniform(-MAX_SKEW_S, MAX_SKEW_S)
            world.say(f"the clock of {process.name} is {process.clock.skew_s:.1f} s ahead")

    def _double(self) -> None:
        """A process that only stands still is taken for dead, and another one is started under its id."""
        world, rng = self._world, self._world.rng
        if (found := self._worker()) is None or found[1].leaving:
            return
        instance_id, process = found
        seconds = rng.choice([1.0, 3.0, 8.0]) * rng.uniform(0.5, 1.5)
        world.say(f"freeze {process.name} for {seconds:.1f} s, and start another one in its place")
        process.freeze(seconds)
        world.doubles.append(process)
        world.start_worker(instance_id)

    def _cut_off(self) -> None:
        """Breaks a process's connection, which it makes again later."""
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

    # ---- engines and sources ----

    def _slow_threads(self) -> None:
        self._world.loop.slow_thread_share = self._world.rng.choice([0.0, 0.1, 0.5])

    def _hang_engine(self) -> None:
        world = self._world
        if world.workers:
            process, _, engine = world.rng.choice(list(world.workers.values()))
            seconds = world.rng.choice([1.0, 4.0, 9.0, 30.0])
            world.say(f"the engine of {process.name} hangs for {seconds} s")
            process.disturb(seconds)
            engine.hung_until = world.loop.now + seconds

    def _fail_swap(self) -> None:
        world = self._world
        if world.workers:
            process, _, engine = world.rng.choice(list(world.workers.values()))
            world.say(f"the next swap of {process.name} fails")
            process.disturb()
            engine.failing_swaps = 1

    def _engine_dies(self) -> None:
        world = self._world
        if found := self._worker():
            process, _, engine = world.workers.get(found[0], (None, None, None))
            if process is found[1] and engine is not None:
                world.say(f"the engine of {process.name} dies")
                process.disturb()
                process.spawn(engine.close())

    def _miscompute(self) -> None:
        """Takes effect from the worker's next swap on, until the worker is well again."""
        world = self._world
        if world.workers:
            process, _, engine = world.rng.choice(list(world.workers.values()))
            engine.config.miscompute = not engine.config.miscompute
            process.miscomputed = process.miscomputed or engine.config.miscompute
            process.disturb()
            world.say(
                f"the engine of {process.name} {'miscomputes' if engine.config.miscompute else 'is well again'}"
            )

    def _cut_plane(self) -> None:
        """A worker reaches NATS, but not what brings the weights."""
        world, rng = self._world, self._world.rng
        if (found := self._worker()) is None:
            return
        process, seconds = found[1], rng.choice([0.5, 3.0, 20.0])
        process.plane = rng.choice(["fails", "hangs"])
        process.disturb()
        world.say(f"what {process.name} wants to receive {process.plane}, for {seconds} s")

        def back() -> None:
            process.plane = ""
            process.disturb()

        world.server.later(seconds, back)

    def _source_gone(self) -> None:
        world = self._world
        path = str(world.rng.choice([*world.models[:-2], *world.adapters]))
        gone = world.sources.gone
        world.sources.failed = True
        if path in gone:
            gone.discard(path)
        else:
            gone.add(path)
        world.say(f"gone: {sorted(one[-2:] for one in gone)}")

    def _write_over(self) -> None:
        """A trainer overwrites a published checkpoint while workers may be reading it."""
        world, rng = self._world, self._world.rng
        path, other = rng.sample(world.good_models, 2)
        world.say(f"{other.name} is written over {path.name}")
        world.sources.write_over(path, other)
        world.server.later(rng.choice([0.05, 0.5, 3.0]), world.sources.written)
