"""The faults of NATS and of the way to it."""

from __future__ import annotations

import json
from collections.abc import Callable

from rl_plane.protocol.subjects import LOCK, RECORD
from tests.sim.coverage import CUT_PHASES
from tests.sim.holding import DECISION, Holding
from tests.sim.partition import Partition, Way
from tests.sim.process import Process
from tests.sim.sim_client import SimBus
from tests.sim.sim_nats import OldLeader
from tests.sim.world import Coordinator, World

HOLDER_LOOK_S = 0.005
HOLDER_TRIES = 600
"""The number of looks, three seconds in all, in which another client may take the lock."""


WAYS: tuple[Way, ...] = ("lost", "lost", "late")
"""The fates of messages that a partition cuts. `--cluster` has `refused` too: the plane takes a 503 for a proof that a
process is dead, which is true only with one server."""


class NatsFaults:
    def __init__(self, world: World) -> None:
        self._world = world
        self._over = False
        """Nothing fails any more."""
        self._ways = WAYS

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

    def _still_nats(self) -> None:
        """SIGSTOP: connections stay, and nothing is answered; then all that was sent meanwhile is taken."""
        world, server, rng = self._world, self._world.server, self._world.rng
        if server.up and not server.still:
            seconds = rng.choice([0.3, 1.5, 3.0, 7.0]) * rng.uniform(0.5, 1.5)
            world.say(f"nats stands still for {seconds:.2f} s")
            world.outage_s += seconds
            server.stand_still(seconds)

    def _still_disk(self) -> None:
        world, server, rng = self._world, self._world.server, self._world.rng
        if server.up:
            seconds = rng.choice([0.3, 2.5, 5.0]) * rng.uniform(0.5, 1.5)
            world.say(f"the disk of nats stands still for {seconds:.2f} s")
            server.disk_until, server.stood_still = world.loop.now + seconds, True

    # ---- chosen messages ----

    def _contend(self) -> None:
        """A write of the lock's holder is delayed for as long as another call needs to take the lock; its connection
        may break just before."""
        self._world.say("the next holder of the lock is in for it")
        self._when_held(self._hold_back, HOLDER_TRIES)

    def _when_held(self, do: Callable[[Coordinator, SimBus], None], tries: int) -> None:
        """Does it to the next holder of the lock."""
        world, server = self._world, self._world.server
        found = server.value(world.subjects.state, LOCK)
        client_id = json.loads(found.value)["client_id"] if found is not None and found.value else None
        buses = ((one, bus) for one in world.alive() for bus in one.process.buses)
        holder = next((each for each in buses if each[1].conn.client_id == client_id), None)
        if holder is not None and server.holding is None and not self._over:
            do(*holder)
        elif tries and not self._over:
            server.later(HOLDER_LOOK_S, self._when_held, do, tries - 1)

    def _hold_back(self, holder: Coordinator, bus: SimBus) -> None:
        world, server, rng = self._world, self._world.server, self._world.rng
        key = rng.choice([DECISION, DECISION, RECORD, LOCK])
        skip = 0 if key == DECISION else rng.choice([0, 0, 1, 2])
        breaks = rng.random()
        delays_s = rng.choice([(), (0.0, 0.7, 1.5, 3.0), (1.2,)])

        def contend() -> None:
            world.say(f"the {key} of {holder.process.name} is delayed")
            others = [one for one in world.alive() if one is not holder]
            for delay_s in delays_s:
                if others:
                    other = rng.choice(others)
                    server.later(delay_s, lambda one: one.process.spawn(world.ask_something(one)), other)

        after_s = rng.choice([0.0, 0.002, 0.02, 0.2, 1.0]) * rng.uniform(0.5, 1.5)
        Holding(server, world.subjects.state, bus.conn, key, skip, after_s, contend).start()
        if breaks < 0.7:
            world.say(f"cut {holder.process.name} off, which has the lock")
            holder.process.cut_off(bus)

    def _overtake(self) -> None:
        """The decision of the lock's next holder is on its way while the lock expires and another call takes it."""
        self._world.say("the next decision is overtaken")
        self._when_held(self._overtake_decision, HOLDER_TRIES)

    def _overtake_decision(self, holder: Coordinator, bus: SimBus) -> None:
        world, server, rng = self._world, self._world.server, self._world.rng

        def begun() -> None:
            others = [one for one in world.alive() if one is not holder]
            world.say(f"the decision of {holder.process.name} is delayed, and the lock expires")
            server.later(0.0, server.expire, world.subjects.state, LOCK)
            if others:
                other = rng.choice(others)
                server.later(0.0, lambda one: one.process.spawn(world.ask_something(one)), other)

        after_s = rng.choice([0.01, 0.02, 0.04]) * rng.uniform(0.5, 1.5)
        Holding(server, world.subjects.state, bus.conn, DECISION, 0, after_s, begun).start()

    # ---- partitions ----

    def _partition(self) -> None:
        """Two groups of processes don't reach each other for a while: any two groups, or the lock's next holder and
        some others, from a chosen phase of an update on."""
        if self._world.rng.random() < 0.6:
            self._when_held(self._part_holder, HOLDER_TRIES)
        else:
            processes = self._world.processes()
            self._world.rng.shuffle(processes)
            cut = self._world.rng.randint(1, max(1, len(processes) - 1))
            self._part(processes[:cut][:2], processes[cut:])

    def _part_holder(self, holder: Coordinator, bus: SimBus) -> None:
        """Partitions the holder once its call enters a chosen phase."""
        world, rng = self._world, self._world.rng
        chosen = rng.choice(CUT_PHASES)

        def entered(phase: str) -> None:
            if phase != chosen:
                return
            holder.process.on_phase = lambda phase: None
            workers = [process for process in world.started.values() if process.alive]
            others = [process for process in world.processes() if process is not holder.process]
            among = workers if workers and rng.random() < 0.7 else others
            if among:
                self._part([holder.process], rng.sample(among, rng.randint(1, len(among))))

        holder.process.on_phase = entered

    def _part(self, first: list[Process], second: list[Process]) -> None:
        """The buckets lie on a third server, or beside one of the groups."""
        world, server, rng = self._world, self._world.server, self._world.rng
        sides: list[list[Process | None]] = [[*first], [*second]]
        if rng.random() < 0.4:
            rng.choice(sides).append(None)
        way = rng.choice(self._ways)
        directions = [(0, 1), (1, 0)]
        if way != "refused":
            directions = rng.choice([directions, directions[:1], directions[1:]])
        seconds = rng.choice([0.3, 1.5, 4.0, 12.0]) * rng.uniform(0.5, 1.5)
        if server.partition is not None or self._over or not all(sides):
            return
        names = [", ".join(one.name if one is not None else "the buckets" for one in side) for side in sides]
        arrow = "and" if len(directions) == 2 else "to" if directions == [(0, 1)] else "from"
        world.say(f"cut for {seconds:.2f} s: {names[0]} {arrow} {names[1]}, {way}")
        partition = server.partition = Partition(sides, directions, way)
        for process in partition.processes:
            process.disturb(seconds)

        def heal() -> None:
            if server.partition is partition:
                world.say("the cut has healed")
                server.heal()
                for process in partition.processes:
                    process.disturb()

        server.later(seconds, heal)

    # ---- a cluster ----

    def _change_leader(self) -> None:
        """The new leader lacks what the old one had acknowledged last. Connections stay."""
        world, rng = self._world, self._world.rng
        lost = world.server.lose_writes(world.subjects.state, rng.choice([1, 2, 5]))
        world.say(f"another node leads, without the last {lost} writes")
        if lost:
            world.checks.lost_writes(world.subjects.state)

    def _keep_old_leader(self) -> None:
        """A node that was cut off answers the reads of its clients still, as of then."""
        world, server, rng = self._world, self._world.server, self._world.rng
        conns = [conn for conn in sorted(server.conns, key=lambda each: each.client_id) if rng.random() < 0.5]
        world.say(f"an old leader answers {', '.join(conn.name for conn in conns)}")
        old = server.old_leader = OldLeader(conns, world.loop.now)

        def found_out() -> None:
            if server.old_leader is old:
                server.old_leader = None

        server.later(rng.uniform(1.0, 10.0), found_out)
