"""Cases that kill, stop and bring back any process of a fleet in the middle of an update."""

from __future__ import annotations

import asyncio
import random
import signal
import sys
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import pytest_asyncio

from rl_plane.protocol.record import LEASE_MARGIN_S, SERVING_LEASE_S
from tests.kill.checkpoints import Wrong, check
from tests.kill.fleet import ANSWER_S, POLL_S, SEED, Answer, RealFleet
from tests.kill.held import RECEIVE
from worker.exit_codes import ENGINE_DEAD

SERVED_S = 20.0
"""The bound in seconds until each client gets tokens again, and until a worker that has lost a node has ended."""
OUTAGE_S = SERVING_LEASE_S + LEASE_MARGIN_S + 1.5
"""The seconds that a nats-server stays stopped: longer than every lease and than what clients take for a slow
answer."""
SHORT_OUTAGE_S = 2.5


Engine = Literal["fake", "hf", "vllm", "sglang", "vllm-nodes", "sglang-nodes"]
"""`…-nodes`: the engine is over two nodes, and what is killed or stopped is on the second one."""
Fault = Literal["kill", "stop"]
Victim = Literal["worker", "engine", "coordinator", "nats"]
"""The process that is killed or stopped. `engine`: one of the processes of a worker's engine."""
DECIDE = "decide"
"""A point at which no worker stands: some milliseconds after all have prepared."""
DECIDE_S = 0.015
"""From the last answer to the gate."""
HEAL = "heal"
"""No update's: the worker was killed, and its next process receives what is committed."""
LOAD = "load"
"""The point at which the first tensor has overwritten the served weights: `staging: none`."""
ENGINE_POINTS = (
    RECEIVE,
    LOAD,
    "prepare_update.after",
    "gate.after",
    "commit_update.before",
    "commit_update.after",
    "open.before",
)
"""The points of an update at which a vLLM or SGLang worker has something to lose."""

SWAPPED = ("commit_update.after", "open.before")
"""The points at which all nodes of a worker have the new weights."""

KILL_MARKS = [
    pytest.mark.skipif(sys.platform != "linux", reason="relies on PR_SET_PDEATHSIG"),
    pytest.mark.asyncio(loop_scope="module"),
]
ENGINE_MARKS = [
    *KILL_MARKS,
    pytest.mark.engines("vllm", "sglang"),
    pytest.mark.alone,
    pytest.mark.kills,
    pytest.mark.timeout(900),
]


@dataclass(frozen=True, slots=True)
class Case:
    engine: Engine
    fault: Fault
    victim: Victim
    point: str
    """A point of `tests/support/phase_hooks.py`; or RECEIVE, LOAD, DECIDE or HEAL."""
    child: str = ""
    """The beginning of the name of the engine process that is the victim, after the engine's name."""

    def __str__(self) -> str:
        return f"{self.engine}-{self.fault}-{self.child or self.victim}-{self.point}"

    @property
    def on_node(self) -> bool:
        return self.engine.endswith("-nodes")

    @property
    def held_at(self) -> str:
        return {DECIDE: "prepare_update.after", LOAD: RECEIVE}.get(self.point, self.point)

    @property
    def decided(self) -> bool | None:
        """The decision is written before the gate. None: who knows?"""
        prepared = not self.point.startswith("prepare_update") and self.point not in (RECEIVE, LOAD)
        # A worker whose engine is dead may have answered before it notices, and so may the head of a dead node.
        late = self.victim == "engine" or self.on_node
        return None if self.point == DECIDE or (late and not prepared) else prepared

    @property
    def of_a_worker(self) -> bool:
        return self.victim in ("worker", "engine")

    @property
    def backend(self) -> str:
        return "held" if self.point in (RECEIVE, LOAD, HEAL) else "filesystem"


async def run_case(fleet: RealFleet, case: Case) -> None:
    chance = random.Random(f"{SEED} {case}")
    if case.point == HEAL:
        await _run_healing(fleet, case, chance)
        return
    coordinator, other = chance.sample(fleet.frontends, 2)
    worker = chance.choice(fleet.worker_ids) if len(set(fleet.models.workers)) == 1 else fleet.worker_ids[0]
    policy = _policy(case, chance)
    # A rolling update comes to one worker after another.
    held = fleet.worker_ids if "barrier" not in policy and chance.random() < 0.5 else [worker]
    place = fleet.node if case.on_node else worker
    if case.on_node and case.held_at == RECEIVE:
        held = [place]
    before = (await fleet.whole())["version"]
    weights = await fleet.checkpoint()
    label = f"{fleet.updates}-{case}"
    fleet.updates += 1
    body = {
        "transport": {"backend": case.backend, "path": str(weights.path)},
        "version": label,
        "policy": policy,
    }
    key = uuid.uuid4().hex
    victim = {"worker": place, "engine": place, "coordinator": coordinator, "nats": "nats"}[case.victim]
    fleet.note(f"== {case}: {victim} at sequence {before['sequence']}, held {held}, {coordinator}, {policy}")

    fleet.ended.clear()
    fleet.hold(case.held_at, held, key)
    update = None
    fleet.rollouts.rolling = "barrier" in policy
    try:
        update = await fleet.begun(case.held_at, held, lambda: fleet.update(coordinator, body, key))
        if case.point == DECIDE:
            fleet.release()
            await asyncio.sleep(chance.uniform(0.0, DECIDE_S))
        answer = await _strike(fleet, case, victim, update, chance, lambda: fleet.clear_answer(other, body, key))
        told = f"the first answer was: {await _ended(update)}"
        # Only its coordinator's trouble may cost the caller the answer, only that and a lost NATS a clear one.
        check(case.victim == "coordinator" or update.result().status is not None, told)
        check(not case.of_a_worker or update.result().clear, told)
        fleet.note(f"{told}; at last: {answer}")
        if case.fault == "kill":
            await fleet.gone()
            if case.on_node:
                await _head_ended(fleet, worker)
        after = (await fleet.whole())["version"]
    finally:
        fleet.release()
        if update is not None:
            update.cancel()
    await _check_outcome(fleet, case, before, after, [update.result(), answer], policy, worker)
    outcomes = await fleet.outcome_of(key)
    check(outcomes == ["committed" if answer.version else "aborted"], f"the history tells {outcomes}: {answer}")
    if not answer.version:  # an undone update blocks no later one
        again = await fleet.clear_answer(other, {**body, "version": f"{label}-again"}, uuid.uuid4().hex)
        check(again.status == 200, f"the update after it: {again}")
        after = (await fleet.whole())["version"]
    expected = (before["sequence"] + 1, weights.digest)
    check((after["sequence"], after["digest"]) == expected, f"{after} is not {expected}")
    await _check_served(fleet)


async def _run_healing(fleet: RealFleet, case: Case, chance: random.Random) -> None:
    frontend, worker = chance.choice(fleet.frontends), fleet.worker_ids[0]
    place = fleet.node if case.on_node else worker
    weights = await fleet.checkpoint()
    if weights == fleet.own:  # then it has nothing to receive
        weights = await fleet.checkpoint()
    body = {
        "transport": {"backend": case.backend, "path": str(weights.path)},
        "version": f"{fleet.updates}-{case}",
    }
    fleet.updates += 1
    answer = await fleet.clear_answer(frontend, body, uuid.uuid4().hex)
    check(answer.status == 200, f"the update: {answer}")
    committed = (await fleet.whole())["version"]
    fleet.note(f"== {case}: {worker} at sequence {committed['sequence']}")
    fleet.hold(RECEIVE, [place], "")
    try:
        fleet.kill(place)
        await fleet.gone()
        await fleet.started_to(RECEIVE, place)
        if case.victim == "engine":
            fleet.kill_engine(place, case.child)
        else:
            fleet.kill(place)
        await fleet.gone()  # also while it receives
    finally:
        fleet.release()
    after = (await fleet.whole())["version"]
    due = ENGINE_DEAD if case.victim == "engine" else -signal.SIGKILL
    check(fleet.ended[place] == due, f"{place} has ended with {fleet.ended[place]}")
    check(not case.on_node or fleet.ended[worker] == ENGINE_DEAD, f"{worker}: {fleet.ended[worker]}")
    check((after, after["digest"]) == (committed, weights.digest), f"{after} is not {committed}")
    await _check_served(fleet)


def _policy(case: Case, chance: random.Random) -> dict[str, Any]:
    policy = {
        "on_prepare_failure": chance.choice(["abort", "exclude"]),
        "pause_mode": chance.choice(["keep", "keep", "wait", "abort"]),
    }
    kind = chance.choice(["plain", "plain", "plain", "unstaged", "rolling"])
    if kind == "unstaged" or case.point == LOAD:
        policy["staging"] = "none"
    elif kind == "rolling" and not case.point.startswith("gate"):  # which is open from the decision on
        policy["barrier"] = "rolling"
    return policy


async def _ended(update: asyncio.Task[Answer]) -> Answer:
    done, _ = await asyncio.wait([update], timeout=ANSWER_S)
    check(done, f"the update had no answer within {ANSWER_S:g} s")
    return update.result()


async def _strike(
    fleet: RealFleet,
    case: Case,
    victim: str,
    update: asyncio.Task[Answer],
    chance: random.Random,
    repeat: Callable[[], Awaitable[Answer]],
) -> Answer:
    """Carries out the fault and returns the final clear answer. A stopped process continues afterwards."""
    long = chance.random() < 0.8
    if case.fault == "kill":
        if case.victim == "engine":
            fleet.kill_engine(victim, case.child)
        else:
            fleet.kill(victim)
        fleet.release()
        answer = await _ended(update)
        return answer if answer.clear else await repeat()
    with fleet.engine_stopped(victim, case.child) if case.victim == "engine" else fleet.stopped(victim):
        fleet.release()
        if case.of_a_worker:
            await _ended(update)
            if case.on_node:  # the other worker does
                await _check_served(fleet)
            return update.result()
        if case.victim == "coordinator":  # its lease runs out, and another coordinator takes over
            return await repeat()
        await asyncio.sleep(OUTAGE_S if long else SHORT_OUTAGE_S)
    answer = await _ended(update)
    return answer if answer.clear else await repeat()


async def _head_ended(fleet: RealFleet, worker: str) -> None:
    """Waits until the head of a worker that has lost its second node has ended because of that."""
    give_up = time.monotonic() + SERVED_S
    while worker not in fleet.ended:
        check(time.monotonic() < give_up, f"{worker} has lost a node, and runs after {SERVED_S:g} s")
        await asyncio.sleep(POLL_S)
    check(fleet.ended[worker] == ENGINE_DEAD, f"{worker} has lost a node, and ended with {fleet.ended[worker]}")


async def _check_outcome(
    fleet: RealFleet,
    case: Case,
    before: dict[str, Any],
    after: dict[str, Any],
    answers: Sequence[Answer],
    policy: dict[str, Any],
    worker: str,
) -> None:
    first, last = answers
    words = f"{before['sequence']} → {after['sequence']} under {policy}; answers: {first} / {last}"
    check(after["run"] == before["run"], f"another run: {words}")
    for answer in answers:
        if answer.version is not None:
            due = (after["sequence"], after["digest"])
            check((answer.version["sequence"], answer.version["digest"]) == due, f"not what was answered: {words}")
    moved = after["sequence"] - before["sequence"]
    check(moved == (1 if last.version else 0), f"not what was answered at last: {words}")
    check(not (moved and first.code == "update_aborted"), f"called undone, and committed: {words}")
    if case.decided:
        check(moved == 1 and last.status == 200, f"the decision does not stand: {words}")
        # The head of a worker that has swapped may answer before it notices that its second node is lost.
        if case.victim == "worker" and not (case.on_node and case.point in SWAPPED):
            _check_left_out(worker, last)
    elif case.decided is False and case.victim == "worker":
        spared = policy["on_prepare_failure"] == "exclude"
        check(last.status == (200 if spared else 409), f"a worker that could not prepare: {words}")
        if spared:
            _check_left_out(worker, last)


def _check_left_out(worker: str, answer: Answer) -> None:
    """The answer excludes the worker, unless its supervisor has started it again, and it has healed, before that."""
    healed = {row["instance_id"] for row in answer.body["workers"] if row.get("admission", {}).get("open")}
    check(worker in healed.union(answer.body["excluded"]), f"it is neither excluded nor healed: {answer.body}")


async def _check_served(fleet: RealFleet) -> None:
    """Everybody gets tokens again, and all tokens that ever came are of what was committed."""
    rollouts = fleet.rollouts
    earlier, give_up = dict(rollouts.answers), time.monotonic() + SERVED_S
    while any(rollouts.answers[client] == count for client, count in earlier.items()) and not rollouts.wrong:
        check(time.monotonic() < give_up, f"clients without tokens: {rollouts.answers}, {rollouts.trouble}")
        await asyncio.sleep(POLL_S)
    await fleet.learn_committed()
    check(not rollouts.wrong, "\n".join(rollouts.wrong[:10]))
    rollouts.check_committed(fleet.committed)


def matrix_fixture(
    cases: Sequence[Case],
    lanes: dict[Engine, int],
    around: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Any:
    """Makes the fixture `matrix` of a module with these cases. It begins at once with all cases that were selected, and
    each test waits for its own. `lanes`: engine → fleets. `around`: surrounds all of them."""

    @pytest_asyncio.fixture(scope="module", loop_scope="module", name="matrix")
    async def fixture(
        request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
    ) -> AsyncIterator[Matrix]:
        names = {item.name for item in request.session.items if item.path == request.path}
        chosen = [case for case in cases if any(name.endswith(f"[{case}]") for name in names)]
        with around():
            matrix = Matrix(chosen, tmp_path_factory.mktemp("kill"), lanes)
            try:
                yield matrix
            finally:
                await matrix.close()
                print(matrix.report())

    return fixture


class Matrix:
    """Runs cases on fleets side by side, each fleet one case after the other: kill, recover, the next one. A fleet in
    which a case went wrong is replaced."""

    def __init__(self, cases: Sequence[Case], tmp: Path, lanes: dict[Engine, int]) -> None:
        """`lanes`: engine → fleets."""
        self.took: dict[Case, float] = {}
        self._told: set[Case] = set()
        self._seen: list[str] = []
        self._tmp = tmp
        loop = asyncio.get_running_loop()
        self._results: dict[Case, asyncio.Future[None]] = {case: loop.create_future() for case in cases}
        self._lanes = []
        self._closing: list[asyncio.Task[None]] = []
        for engine, count in lanes.items():
            own = [case for case in cases if case.engine == engine]
            random.Random(SEED).shuffle(own)  # what follows on what is another thing each time
            for number in range(min(count, len(own))):
                self._lanes.append(asyncio.create_task(self._lane(f"{engine}-{number}", own[number::count])))

    async def result(self, case: Case) -> None:
        """Waits for the result of a case. If a test asks twice, the case failed, and runs again on a fleet of its
        own."""
        if case in self._told:
            self._results[case] = asyncio.get_running_loop().create_future()
            self._lanes.append(asyncio.create_task(self._lane(f"again-{len(self._lanes)}", [case])))
        self._told.add(case)
        await asyncio.shield(self._results[case])

    async def close(self) -> None:
        for lane in self._lanes:
            lane.cancel()
        await asyncio.gather(*self._lanes, return_exceptions=True)
        await asyncio.gather(*self._closing)
        for result in self._results.values():
            result.cancel()

    def report(self) -> str:
        lines = [f"{took_s:6.1f} s  {case}" for case, took_s in self.took.items()]
        return "\n".join([f"KILL_SEED={SEED}", *lines, *self._seen])

    async def _lane(self, name: str, cases: Sequence[Case]) -> None:
        fleet: RealFleet | None = None
        fleets = 0
        try:
            for case in cases:
                start = time.monotonic()
                try:
                    if fleet is None:
                        fleet = RealFleet(name, self._tmp / f"{name}.{fleets}", case.engine)
                        fleets += 1
                        await fleet.start()
                        start = time.monotonic()
                    await run_case(fleet, case)
                    self._results[case].set_result(None)
                except Exception as error:
                    words = f"{case} (KILL_SEED={SEED}): {type(error).__name__}: {error}"
                    tail = fleet.tail(head=f"{fleet.name} ") if fleet is not None else ""
                    self._results[case].set_exception(Wrong(f"{words}\n{tail}\n{words}"))
                    self._close(fleet)
                    fleet = None
                finally:
                    self.took[case] = time.monotonic() - start
        finally:
            self._close(fleet)

    def _close(self, fleet: RealFleet | None) -> None:
        """In a task of its own: a lane that is cancelled doesn't leave half a fleet behind."""
        if fleet is not None:
            self._seen.append(f"{fleet.name}: {fleet.seen()}")
            self._closing.append(asyncio.create_task(fleet.close()))
