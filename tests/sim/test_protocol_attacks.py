"""Interleavings that once broke the commit protocol, each built by hand on the simulated NATS of tests/sim: the real
workers, coordinators and frontends, of whose messages the test holds a few back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any
from unittest import mock

import pytest

from rl_plane.bus.connection import WrongSequence
from rl_plane.bus.sealed_record import bar
from rl_plane.bus.state_store import read_session
from rl_plane.errors import BusUnreachable
from rl_plane.protocol.record import DecisionRecord
from rl_plane.protocol.subjects import LOCK, RECORD
from tests.sim import product
from tests.sim.calls import call
from tests.sim.checks import CallRecord
from tests.sim.run import adapters, deltas, models, session_idle_s, simulated
from tests.sim.sessions import CANARY, PHASES
from tests.sim.world import Coordinator, World
from worker.receive.staging import model_digest
from worker.reconcile.instructions import CoordinatedUpdate

pytestmark = [pytest.mark.slow, pytest.mark.parallel]

UP_S = 3.0
"""Virtual seconds until the fleet has started."""
REST_S = 60.0
"""Virtual seconds in which leases, retries and the gates of workers end."""
LOOK_S = 0.001
BOUND_S = 30.0
"""Virtual seconds in which what an attack waits for must come."""


def live(life: Callable[[World], Coroutine[Any, Any, None]], seed: int = 1, workers: int = 2) -> World:
    """A fleet lives through the attack, and must be whole at the end."""
    models(), adapters(), deltas()  # written outside of the run
    with simulated(seed) as (loop, rng):
        world = World(loop, rng, models(), adapters(), deltas(), [], session_idle_s(seed))
        try:
            loop.run_until_complete(_life(world, life, workers))
        except RuntimeError:  # a violation has stopped the loop
            assert world.checks.violation is not None
        finally:
            loop.bury(world.all_processes)
    assert world.checks.violation is None, "\n".join([str(world.checks.violation), *world.trace[-30:]])
    return world


async def _life(world: World, life: Callable[[World], Coroutine[Any, Any, None]], workers: int) -> None:
    for number in range(1, workers + 1):
        world.start_worker(f"{number:016x}")
    world.start_frontend()
    world.start_trainer()
    await asyncio.sleep(UP_S)
    await life(world)
    await asyncio.sleep(REST_S)
    newest = stored(world)
    for _, worker in world.live_workers():
        assert product.closed(worker) == {}, "the fleet is open"
        assert product.holds(worker) == newest.held


def trainer(world: World) -> Coordinator:
    return next(one for one in world.alive() if one.frontend is None)


def body(world: World, number: int, label: str, pushed: bool = False) -> dict[str, Any]:
    """`pushed`: no worker can fetch it a second time."""
    transport = {"backend": "gloo" if pushed else "filesystem", "path": str(world.models[number])}
    return {"transport": transport, "version": label, "policy": PHASES}


def begin(world: World, by: Coordinator, number: int, label: str, pushed: bool = False) -> asyncio.Task[Any]:
    """An update under way."""
    return by.process.spawn(call(world, by, "update_weights", body(world, number, label, pushed), label))


def outcome(world: World, label: str) -> str:
    found: CallRecord = next(one for one in world.calls if one.name == label)
    assert found.outcome is not None
    return found.outcome


def labels(world: World) -> list[str]:
    return [decision.made.label for decision in world.checks.decided]


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(BOUND_S):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(LOOK_S)


def stored(world: World) -> DecisionRecord:
    entry = world.server.value(world.subjects.state, RECORD)
    assert entry is not None
    assert entry.value is not None
    return DecisionRecord.decode(entry.value)


def staged(world: World) -> list[str]:
    found = (product.staged_in(worker) for _, worker in world.live_workers())
    return [one for one in found if one is not None]


class Late:
    """Holds back the decision of one coordinator, labelled `late`, and every write of its lock from then on."""

    def __init__(self, by: Coordinator) -> None:
        self.on_its_way = asyncio.Event()
        self.arrives = asyncio.Event()
        self.arrived = asyncio.Event()
        self.update_id = ""
        self._nonce = ""
        bus: Any = by.client.bus
        self._put = bus.put
        bus.put = self._held_back

    async def _held_back(self, bucket: Any, key: str, value: bytes, **conditions: Any) -> int:
        if key == LOCK and not self.on_its_way.is_set():
            self._nonce = json.loads(value)["nonce"]
        elif key == LOCK and json.loads(value)["nonce"] == self._nonce:
            await self.arrives.wait()
        elif key == RECORD and not self.on_its_way.is_set():
            record = json.loads(value)
            if record["made"]["label"] == "late" and not record["open"]:
                self.update_id = record["update_id"]
                self.on_its_way.set()
                await self.arrives.wait()
                try:
                    return int(await self._put(bucket, key, value, **conditions))
                finally:
                    self.arrived.set()
        return int(await self._put(bucket, key, value, **conditions))


def at_seal(by: Coordinator, locked: Callable[[], Coroutine[Any, Any, None]] | None = None) -> asyncio.Event:
    """Is set once this coordinator has written the record. `locked`: runs when it has taken the lock."""
    sealed = asyncio.Event()
    bus: Any = by.client.bus
    put = bus.put

    async def sealing(bucket: Any, key: str, value: bytes, **conditions: Any) -> int:
        nonlocal locked
        written = int(await put(bucket, key, value, **conditions))
        if key == LOCK and locked is not None:
            first, locked = locked, None
            await first()
        if key == RECORD:
            sealed.set()
        return written

    bus.put = sealing
    return sealed


# ---- a decision that arrives after its coordinator has lost the lock ----


@pytest.mark.parametrize("pushed", [False, True])
@pytest.mark.parametrize(
    "arrives", ["between the lock and the seal", "after the seal", "after what it has staged is dropped"]
)
def test_a_late_decision_counts_only_before_the_next_holders_seal(arrives: str, pushed: bool) -> None:
    """The coordinator's connection breaks and is made again, so that others take it for dead; its decision is late."""

    async def attack(world: World) -> None:
        one, two = trainer(world), world.frontends()[0]
        await begin(world, one, 1, "good")
        late = Late(one)
        first = begin(world, one, 2, "late", pushed)
        await late.on_its_way.wait()
        assert staged(world) == [late.update_id] * 2
        one.process.cut_off(one.client.bus)  # type: ignore[arg-type]

        async def arrive() -> None:
            late.arrives.set()
            await late.arrived.wait()

        sealed = at_seal(two, arrive if arrives == "between the lock and the seal" else None)
        second = begin(world, two, 3, "other")
        await sealed.wait()
        if arrives == "after what it has staged is dropped":
            await until(lambda: late.update_id not in staged(world))
        late.arrives.set()
        await asyncio.wait([first, second])

    world = live(attack)
    assert outcome(world, "other") == "ok", "of the lock's holder"
    if arrives == "between the lock and the seal":
        assert labels(world) == ["initial", "good", "late", "other"], "the next coordinator carries it out"
        assert outcome(world, "late") in ("ok", "conflict")
    else:
        assert labels(world) == ["initial", "good", "other"]
        assert outcome(world, "late") == "stale_fence"


def test_a_call_does_not_take_the_lock_back_from_another_of_its_own_process() -> None:
    """Both calls have one owner and one connection, and neither names an update."""

    async def attack(world: World) -> None:
        one = world.frontends()[0]
        await begin(world, one, 1, "good")
        late = Late(one)
        first = begin(world, one, 2, "late")
        await late.on_its_way.wait()
        await until(lambda: world.server.value(world.subjects.state, LOCK).value is None)  # type: ignore[union-attr]
        sealed = at_seal(one)
        second = begin(world, one, 3, "other")
        await sealed.wait()
        late.arrives.set()
        await asyncio.wait([first, second])

    world = live(attack)
    assert outcome(world, "other") == "ok", "of the lock's holder"
    assert outcome(world, "late") == "stale_fence"
    assert labels(world) == ["initial", "good", "other"]


@pytest.mark.parametrize("pushed", [False, True])
def test_a_decision_that_arrives_after_the_workers_gave_up_is_refused(pushed: bool) -> None:
    """No call takes the lock that its coordinator has lost: the workers bar it before they drop what it has staged."""

    async def attack(world: World) -> None:
        one = trainer(world)
        await begin(world, one, 1, "good")
        late = Late(one)
        first = begin(world, one, 2, "late", pushed)
        await late.on_its_way.wait()
        await until(lambda: not staged(world))
        late.arrives.set()
        await asyncio.wait([first])
        assert labels(world) == ["initial", "good"]
        await begin(world, world.frontends()[0], 3, "next")

    world = live(attack)
    assert outcome(world, "late") == "stale_fence"
    assert outcome(world, "next") == "ok"


def test_a_decision_that_arrives_after_it_was_reported_as_failed_is_refused() -> None:
    """Its answer did not come in time, and the update has ended."""

    async def attack(world: World) -> None:
        one = trainer(world)
        await begin(world, one, 1, "good")
        bus: Any = one.client.bus
        put, late = bus.put, []

        async def timing_out(*write: Any, **conditions: Any) -> int:
            if write[1] == RECORD and json.loads(write[2])["made"]["label"] == "late":
                late.append((write, conditions))
                raise BusUnreachable("it has not answered")
            return int(await put(*write, **conditions))

        bus.put = timing_out
        await begin(world, one, 2, "late")
        assert outcome(world, "late") == "bus_unreachable"
        write, conditions = late[0]
        with pytest.raises(WrongSequence):
            await put(*write, **conditions)

    assert labels(live(attack)) == ["initial", "good"]


def test_a_repeated_update_survives_the_death_of_its_first_coordinator() -> None:
    """A worker has just barred the dead coordinator, and is about to drop what that one has staged, when the next one
    asks it to prepare the same update."""
    asked: list[str] = []

    async def attack(world: World) -> None:
        one = trainer(world)
        await begin(world, one, 1, "good")
        late = Late(one)
        begin(world, one, 2, "late")
        await late.on_its_way.wait()
        one.process.kill()

        async def asked_again(bus: Any, bucket: Any, entry: Any, fence: int) -> bool:
            barred = await bar(bus, bucket, entry, fence)
            if not asked:
                _, worker = next(world.live_workers())
                staging = worker.updates.staged
                assert staging is not None
                await worker.updates.prepare(staging.request, fence + 100)
                asked.append(product.instance_id(worker))
            return barred

        with mock.patch("worker.reconcile.coordinator_watch.bar", asked_again):
            await until(lambda: asked)
            await asyncio.sleep(0.1)  # the worker looks again after half a second
            assert staged(world) == [late.update_id]
            await until(lambda: not staged(world))  # the next coordinator is gone too
        await begin(world, world.frontends()[0], 3, "next")

    assert labels(live(attack, workers=1)) == ["initial", "good", "next"]


def test_a_worker_that_looks_for_the_coordinator_before_does_not_bar_the_next_one() -> None:
    """Between its look at the lock and its look at the record the next coordinator has come, and prepares here."""
    looked: list[str] = []

    async def attack(world: World) -> None:
        one, two = trainer(world), world.frontends()[0]
        await begin(world, one, 1, "good")
        first = Late(one)
        begin(world, one, 2, "late")
        await first.on_its_way.wait()
        one.process.kill()
        await until(lambda: world.server.value(world.subjects.state, LOCK).value is None)  # type: ignore[union-attr]
        late = Late(two)

        async def meanwhile(bus: Any, bucket: Any) -> Any:
            if not looked:
                looked.append(bus.name)
                begin(world, two, 3, "late")
                await late.on_its_way.wait()
            return await read_session(bus, bucket)

        with mock.patch("worker.reconcile.coordinator_watch.read_session", meanwhile):
            await late.on_its_way.wait()
            await asyncio.sleep(0.1)  # the worker continues, and looks again after half a second
            late.arrives.set()
            await late.arrived.wait()
        await until(lambda: labels(world)[-1] == "late")

    world = live(attack, workers=1)
    assert labels(world) == ["initial", "good", "late"]
    assert stored(world).made.digest == model_digest(world.models[3])


def test_a_decision_that_comes_while_a_worker_is_about_to_give_up_keeps_what_is_staged() -> None:
    """It comes between the worker's look at the record and its bar, and the worker has not heard of it."""
    looked: list[str] = []

    async def attack(world: World) -> None:
        one, server = trainer(world), world.server
        await begin(world, one, 1, "good")
        late = Late(one)
        first = begin(world, one, 2, "late", pushed=True)
        await late.on_its_way.wait()
        _, worker = next(world.live_workers())
        bus: Any = worker.bus
        get, deliver = bus.get, server.deliver

        def unheard(source: Any, subscription: Any, message: Any) -> None:
            if subscription.conn is not bus.conn or message.subject != world.subjects.state.feed(RECORD):
                deliver(source, subscription, message)

        def giving_up(waiting_for: str | None) -> CoordinatedUpdate | None:
            looked.extend(["it gives up"] if (found := given_up(waiting_for)) is not None else [])
            return found

        async def in_between(bucket: Any, key: str) -> Any:
            if key == RECORD and looked and not late.arrived.is_set():
                server.deliver = unheard  # type: ignore[method-assign]
                late.arrives.set()
                await late.arrived.wait()
            return await get(bucket, key)

        given_up = worker.core.given_up
        worker.core.given_up = giving_up  # type: ignore[method-assign]
        bus.get = in_between
        await late.arrived.wait()
        await asyncio.sleep(0.1)  # the worker would look again after half a second
        server.deliver = deliver  # type: ignore[method-assign]
        await asyncio.wait([first])

    world = live(attack, workers=1)
    assert looked
    assert outcome(world, "late") == "ok"
    assert labels(world) == ["initial", "good", "late"]


# ---- a store that loses the decision ----


@pytest.mark.parametrize("first", ["workers", "a coordinator that has heard of it", "a coordinator that has not"])
@pytest.mark.parametrize("pushed", [False, True])
def test_the_report_of_a_decision_that_the_store_has_lost_stays_true(first: str, pushed: bool) -> None:
    """The decision is written and the workers hear of it; then the server dies, and its store loses that write. The
    coordinator is connected again before the workers, or after them."""

    async def attack(world: World) -> None:
        one, server = trainer(world), world.server
        await begin(world, one, 1, "good")
        reconnect = server.reconnect
        workers_may, coordinators_may = asyncio.Event(), asyncio.Event()

        def in_turn(conn: Any) -> None:
            is_worker = conn.process is not None and conn.process.name.startswith("worker")
            if (workers_may if is_worker else coordinators_may).is_set():
                reconnect(conn)
            else:
                server.later(LOOK_S, in_turn, conn)

        server.reconnect = in_turn  # type: ignore[method-assign]
        deliver, feed = server.deliver, world.subjects.state.feed(RECORD)

        def to_workers_only(source: Any, subscription: Any, message: Any) -> None:
            by_worker = subscription.conn.process.name.startswith("worker")
            if by_worker or message.subject != feed or first != "a coordinator that has not":
                deliver(source, subscription, message)

        server.deliver = to_workers_only  # type: ignore[method-assign]
        bus: Any = one.client.bus
        put = bus.put

        async def losing(bucket: Any, key: str, value: bytes, **conditions: Any) -> int:
            if key == RECORD and json.loads(value)["made"]["label"] == "v2" and not crashing.is_set():
                crashing.set()
                server.lost_answers = 1.0
                world.loop.create_task(crash(), context=server.context)
            return int(await put(bucket, key, value, **conditions))

        async def crash() -> None:
            await until(lambda: all(str(product.known_to(worker)) == "2 v2" for _, worker in world.live_workers()))
            server.lost_answers = 0.0
            server.kill()
            server.lose_writes(world.subjects.state, 1)
            world.checks.lost_writes(world.subjects.state)
            if first == "a coordinator that has not":  # its seal is newer than what the workers know
                world.checks.forgotten.add(world.checks.decided[-1].key)
            server.start()
            server.deliver = deliver  # type: ignore[method-assign]
            (workers_may if first == "workers" else coordinators_may).set()
            if first == "workers":
                await until(lambda: stored(world).made.label == "v2")
                coordinators_may.set()

        crashing = asyncio.Event()
        bus.put = losing
        await asyncio.wait([begin(world, one, 2, "v2", pushed)])
        workers_may.set()

    world = live(attack)
    if first == "workers":
        assert outcome(world, "v2") == "ok", "they have written it back"
        assert stored(world).made.label == "v2"
    elif first == "a coordinator that has heard of it":
        assert outcome(world, "v2") == "conflict", "it is committed, and no worker is there to serve it yet"
        assert stored(world).made.label == "v2"
    else:
        assert outcome(world, "v2") == "bus_unreachable"
        assert stored(world).made.label == "good", "who knows v2 does not bring it back"


# ---- clocks ----

QUICK_S = 1.0
"""An update of a fleet whose machines have nothing else to do."""


@pytest.mark.parametrize("pushed", [False, True])
@pytest.mark.parametrize("skew_s", [2.0, -2.0, 125.0, -125.0])
def test_clocks_that_differ_change_nothing(skew_s: float, pushed: bool) -> None:
    """The wall clocks of the workers are so far ahead of the coordinators'."""

    async def attack(world: World) -> None:
        for process in world.started.values():
            process.clock.skew_s = skew_s
        one = world.frontends()[0]

        async def steps() -> None:
            began = world.loop.now
            assert await call(world, one, "update_weights", body(world, 1, "v1", pushed), "v1") is not None
            prepared = await call(world, one, "prepare_weights_update", body(world, 2, "v2", pushed), "prepare")
            assert prepared is not None
            assert world.loop.now < began + 2 * QUICK_S
            await asyncio.sleep(5.0)
            assert staged(world) == [prepared["update_id"]] * 2
            began = world.loop.now
            complete = {"update_id": prepared["update_id"]}
            reply = await call(world, one, "complete_weights_update", complete, "v2")
            assert reply is not None
            assert reply["excluded"] == []
            assert world.loop.now < began + QUICK_S

        await one.process.spawn(steps())

    world = live(attack)
    assert labels(world) == ["initial", "v1", "v2"]


# ---- a living coordinator's connection breaks ----


@pytest.mark.parametrize("op", ["pause", "update_weights"])
def test_a_coordinator_whose_connection_broke_during_a_long_prepare_keeps_its_lock(op: str) -> None:
    async def attack(world: World) -> None:
        one, two = trainer(world), world.frontends()[0]
        await begin(world, one, 1, "good")
        pushed = body(world, 2, "long", pushed=True)
        pushed["transport"]["push"] = "long"
        first = one.process.spawn(call(world, one, "update_weights", pushed, "long"))
        await until(lambda: len(staged(world)) == 2)
        one.process.cut_off(one.client.bus)  # type: ignore[arg-type]
        await asyncio.sleep(2.0)  # by then a dead process would be known to be dead
        theirs = {"mode": "keep"} if op == "pause" else body(world, 3, "theirs")
        await two.process.spawn(call(world, two, op, theirs, "theirs"))
        world.sources.pushes["long"] = "sent"
        await asyncio.wait([first])

    world = live(attack)
    assert outcome(world, "theirs") == "locked"
    assert outcome(world, "long") == "ok"


def test_a_version_that_all_workers_fail_goes_back_whenever_the_next_coordinator_comes() -> None:
    """Its coordinator dies before it has judged the scores, and the workers have dropped the weights by then: they
    fetch them again, which takes as long as their source is away."""

    async def life(world: World) -> None:
        by = world.frontends()[0]
        path = str(world.models[1])
        failed = by.process.spawn(call(world, by, "update_weights", failing(world), "failed"))
        await until(lambda: len(world.checks.scored_at) == 2)
        by.process.kill()
        trainer(world).process.kill()
        await asyncio.sleep(0.1)
        world.sources.gone.add(path)
        await until(lambda: all("behind" in product.closed(worker) for _, worker in world.live_workers()))
        world.start_frontend()
        await until(lambda: labels(world)[-1] == "initial" and len(labels(world)) == 3)
        world.sources.gone.clear()
        del failed

    world = live(life)
    assert labels(world) == ["initial", "failed", "initial"]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_version_goes_back_though_all_workers_begin_anew_before_the_next_coordinator_comes(workers: int) -> None:
    """No process knows a score any more: the next coordinator waits for new ones."""

    async def life(world: World) -> None:
        by = world.frontends()[0]
        failed = by.process.spawn(call(world, by, "update_weights", failing(world), "failed"))
        await until(lambda: len(world.checks.scored_at) == workers)
        by.process.kill()
        trainer(world).process.kill()
        path = str(world.models[1])
        world.sources.gone.add(path)
        for process, _ in list(world.live_workers()):
            process.kill()
        for instance_id in list(world.started):
            world.start_worker(instance_id)
        world.start_frontend()
        await asyncio.sleep(10.0)
        world.sources.gone.clear()
        await until(lambda: labels(world)[-1] == "initial" and len(labels(world)) == 3)
        del failed

    world = live(life, workers=workers)
    assert labels(world) == ["initial", "failed", "initial"]


def failing(world: World) -> dict[str, Any]:
    """An update with another model's values, which every worker fails."""
    expected = [list(vector) for vector in product.vectors_of("another", tuple(map(tuple, CANARY)))]
    update = body(world, 1, "failed")
    return {**update, "policy": {**PHASES, "canary": {"sequences": CANARY, "expected": expected}}}
