"""Drives the core of a worker by random events, in any order."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from rl_plane.errors import Conflict
from rl_plane.protocol.record import (
    DecisionRecord,
    first_record,
)
from worker.reconcile.instructions import (
    Fetch,
    Relabel,
    Swap,
    Unload,
    Wait,
)
from worker.reconcile.worker_core import MAX_HEAL_RETRY_S

RUN, MODEL = "run-1", "d0"
from tests.support.worker_core_runs import LINE, R0, act, after, first, fresh, gone, hold, reasons, stage, valid  # noqa: E402

# ---- any order ----


class Walk:
    """Drives a worker with a store that may lose writes, coordinators that come and go, and an engine that fails."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.core = fresh()
        self.now = 0.0
        self.written = 1
        self.known = [first_record(MODEL) if seed % 2 else R0]
        self.under_way: Swap | Unload | None = None

    def step(self) -> None:
        rng = self.rng
        self.now += rng.choice([0.0, 0.1, 1.0, 7.0])
        if self.under_way is not None and rng.random() < 0.7:
            swap, self.under_way = self.under_way, None
            if rng.random() < 0.7:
                self.core.swapped(swap, self.now)
            else:
                self.core.swap_failed(swap, "failed", self.now, lost=rng.random() < 0.3)
            return
        actions = [self.decide, self.hear, self.ask_leader, self.coordinate, self.stage, self.tick]
        rng.choice([*actions, self.obey, self.obey, self.commit, self.operate])()

    def decide(self) -> None:
        rng, base = self.rng, self.known[-1].opened()
        kind = rng.choice(["base", "base", "lora", "unload", "same", "run"])
        how = rng.choice(["open", "strict", "rolling"])
        more: dict[str, Any] = {
            "open": how == "open",
            "rolling": how == "rolling",
            "refetchable": rng.random() < 0.8,
        }
        if kind == "run":
            made = first(run=f"run-{rng.randrange(5)}", run_number=base.run_number + rng.choice([0, 1]))
        elif kind == "lora":
            made = after(base, load=rng.choice("ab"), **more)
        elif kind == "unload" and base.adapters:
            made = after(base, unload=rng.choice(sorted(base.adapters)), **more)
        else:
            made = after(base, digest=base.version.digest if kind == "same" else "", **more)
        self.known.append(made)

    def some(self) -> DecisionRecord:
        record = self.known[-1] if self.rng.random() < 0.7 else self.rng.choice(self.known)
        return record.opened() if self.rng.random() < 0.5 else record

    def hear(self) -> None:
        self.written += self.rng.choice([0, 1, 3])
        self.core.learnt(self.some(), self.written, self.now)

    def ask_leader(self) -> None:
        record = self.some() if self.rng.random() < 0.9 else None
        before, mine = self.core.state.lease.until, self.core.record
        lost = self.core.leader_said(record, self.rng.randrange(1, 50), self.now, LINE, self.now)
        if lost is not None:
            assert lost == mine or mine is None
            assert self.core.state.lease.until == before
        else:
            assert self.core.record == record

    def coordinate(self) -> None:
        waiting = self.core.staged.update_id if self.core.staged and self.rng.random() < 0.3 else None
        if gone(self.core, self.rng.randrange(10), self.rng.random() < 0.5, waiting) is not None:
            self.core.is_staged(None)

    def stage(self) -> None:
        if self.rng.random() < 0.2:
            self.core.is_staged(None)
        elif self.under_way is None:
            record = self.known[-1]
            in_place = self.rng.random() < 0.2
            if in_place:
                self.core.overwriting()
            stage(self.core, record, self.rng.randrange(10))

    def tick(self) -> None:
        self.core.ticked(self.now)

    def obey(self) -> None:
        did = self.core.next(self.now)
        if self.under_way is not None:
            return
        if isinstance(did, (Swap, Unload)):
            self.begin(did)
        elif isinstance(did, Fetch) and self.rng.random() < 0.4:
            self.core.fetch_failed("no", self.now)
        else:
            act(self.core, did, self.now)

    def commit(self) -> None:
        if self.under_way is not None:
            return
        try:
            step = self.core.commit_step(self.known[-1])
        except Conflict:
            return
        if isinstance(step, Relabel):
            self.core.relabelled(step.record)
        elif step is not None:
            self.begin(step)

    def begin(self, swap: Swap | Unload) -> None:
        self.core.swapping(swap)
        self.under_way = swap

    def operate(self) -> None:
        state, tag = self.core.state, self.rng.choice(["weights", "kv_cache"])
        match self.rng.randrange(3):
            case 0:
                self.core.enabled()
            case 1:
                state.release([tag])
            case _:
                state.take_back([tag])
        if self.rng.random() < 0.1:
            state.lose_weights("reset")

    def check(self) -> None:
        valid(self.core)
        one = self.core.next(self.now)
        other = self.core.next(self.now)
        if one != other:
            assert isinstance(one, Wait), "what is to be done stays so until something happens"
        valid(self.core)

    def calm(self) -> None:
        """Ends all faults. In bounded time the worker holds the newest version and is open."""
        core, last = self.core, replace(after(self.known[-1].opened()).opened(), adapters={})  # all can be fetched
        self.under_way = None
        core.state.take_back(["weights", "kv_cache"])
        if core.record is not None and core.record.run_number >= last.run_number:
            last = replace(last, run_number=core.record.run_number + 1)
        assert core.leader_said(last, 1000, self.now, LINE, self.now) is None
        given_up = gone(core, 99, False, None)
        if given_up is not None:
            core.is_staged(None)
        for _ in range(10):
            hold(core, self.now)
            self.now += MAX_HEAL_RETRY_S
        assert (reasons(core), core.state.version, core.state.sequence) == ({}, last.version, last.sequence)


@pytest.mark.parametrize("seed", range(300))
def test_after_any_events_a_worker_serves_only_the_committed_weights_and_recovers(seed: int) -> None:
    walk = Walk(seed)
    for _ in range(120):
        walk.step()
        walk.check()
    walk.calm()
