"""The disturbances of the fleet during a soak: a schedule that follows from the seed, and the class that carries it
out."""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from tests.soak.checker import Fault
from tests.soak.fleet import EXCUSE_S, Answer, SoakFleet
from tests.soak.load import Floors
from tests.soak.models import BAD, Weights

GAP_S = (1.5, 4.5)
"""The seconds from one step to the next."""
READY_S = 240.0
"""The bound in seconds until all processes are back, before the next is killed. A worker that starts imports torch and
its engine on busy cores."""
KILL_AFTER_S = 0.3
"""The most seconds from the beginning of an update to a death in it."""
BACK_OFF_S = 0.2
"""The seconds between two looks, and between two tries of a call."""
FIRST_ADAPTERS = ("a", "b")
"""`a` is always there, `b` comes and goes."""

Kind = Literal["update", "adapter", "unload", "rollback", "bad", "kill_worker", "kill_frontend"]
DECK: tuple[tuple[Kind, dict[str, Any]], ...] = (
    ("update", {"policy": {"pause_mode": "keep"}}),
    ("update", {"policy": {"pause_mode": "keep", "barrier": "rolling"}}),
    ("update", {"policy": {"pause_mode": "wait"}}),
    ("update", {"policy": {"pause_mode": "abort"}}),
    ("update", {"policy": {"pause_mode": "keep", "staging": "none"}}),
    ("update", {"policy": {"on_prepare_failure": "exclude"}, "kills": "worker"}),
    ("update", {"policy": {"pause_mode": "keep"}, "kills": "frontend"}),
    ("adapter", {"name": "a"}),
    ("adapter", {"name": "b"}),
    ("unload", {"name": "b"}),
    ("rollback", {}),
    ("bad", {}),
    ("kill_worker", {}),
    ("kill_frontend", {}),
)
"""The kinds of steps. Each is drawn once before any is drawn again."""
NEEDED = frozenset({"update keep", "kill_worker", "kill_frontend"})
"""The steps without which a soak shows little. On a slow machine each is still carried out once, after the time of the
soak."""


@dataclass(frozen=True, slots=True)
class Step:
    at_s: float
    """The earliest time of the step in seconds from the start. An earlier step that takes longer delays it."""
    kind: Kind
    options: dict[str, Any]
    choice: float
    """A number from 0 to 1 that chooses the worker, the frontend or the version."""

    @property
    def name(self) -> str:
        parts = [str(value) for value in self.options.get("policy", {}).values()]
        if "kills" in self.options:
            parts.append(f"kills a {self.options['kills']}")
        return " ".join([self.kind, *parts, self.options.get("name", "")]).strip()


def schedule(seed: int, seconds: float, adapters: bool) -> list[Step]:
    """Returns the steps of a soak. Equal arguments give equal steps."""
    chance = random.Random(f"schedule {seed}")
    cards = [card for card in DECK if adapters or card[0] not in ("adapter", "unload")]
    steps: list[Step] = []
    at_s = 0.0
    while True:
        for kind, options in chance.sample(cards, len(cards)):
            at_s += chance.uniform(*GAP_S)
            if at_s >= seconds:
                return steps
            steps.append(Step(at_s, kind, options, chance.random()))


@dataclass(slots=True)
class Abort:
    """A step that ends choices before they are complete."""

    adapter: str | None
    """The adapter whose choices it ends; None: all choices."""
    until: float = float("inf")


def one_of(choices: Sequence[str], choice: float) -> str:
    return choices[min(int(choice * len(choices)), len(choices) - 1)]


@dataclass(slots=True)
class Chaos:
    fleet: SoakFleet
    weights: Weights
    floors: Floors
    adapters: bool
    faults: list[Fault] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    """The number of steps, by kind and outcome."""
    made: int = 0
    """The number of base versions sent so far."""
    made_adapters: int = 0
    _aborts: list[Abort] = field(default_factory=list)

    def aborts(self, adapter: str | None, since: float) -> bool:
        """Returns True if choices of this adapter were aborted after `since`, or just before it."""
        return any(one.adapter in (None, adapter) and one.until + EXCUSE_S > since for one in self._aborts)

    async def first(self) -> None:
        """Loads the adapters that the load needs from its beginning."""
        for name in FIRST_ADAPTERS if self.adapters else ():
            await self._adapter(Step(0.0, "adapter", {"name": name}, 0.0))

    async def run(self, steps: Sequence[Step], seconds: float) -> None:
        """Takes as many steps as there is time for, and every step in NEEDED. On a slow machine each death takes long
        to recover from."""
        start = time.monotonic()
        missing = {step.name for step in steps} & NEEDED
        for step in steps:
            if time.monotonic() >= start + seconds and step.name not in missing:
                continue
            missing.discard(step.name)
            await asyncio.sleep(max(0.0, start + step.at_s - time.monotonic()))
            self.fleet.note(f"== {step.name}")
            with self.noted(step):
                answer = await self.take(step)
            words = answer.code if answer is not None else "done"
            self.fleet.note(f"{step.name}: {answer or words}")
            self.outcomes[f"{step.name}: {words}"] += 1
            await self.fleet.learn_committed()

    async def take(self, step: Step) -> Answer | None:
        """Takes one step. Returns the fleet's answer; None if the step asks for none."""
        do: dict[Kind, Callable[[Step], Awaitable[Answer | None]]] = {
            "update": self._update,
            "adapter": self._adapter,
            "unload": self._unload,
            "rollback": self._rollback,
            "bad": self._bad,
            "kill_worker": self._kill_worker,
            "kill_frontend": self._kill_frontend,
        }
        return await do[step.kind](step)

    @contextmanager
    def noted(self, step: Step) -> Iterator[None]:
        """Records the step if it aborts choices."""
        names: list[str | None] = []
        if step.options.get("policy", {}).get("pause_mode") == "abort":
            names = [None]
        elif step.kind == "unload":
            names = [step.options["name"]]
        notes = [Abort(name) for name in names]
        self._aborts += notes
        try:
            yield
        finally:
            for one in notes:
                one.until = time.monotonic()

    # ---- updates ----

    async def _update(self, step: Step) -> Answer:
        self.made += 1
        body = self._body(self.weights.base(self.made), f"base-{self.made}", step)
        kills = step.options.get("kills")
        if kills is None:
            return await self._call(step, "update_weights", body)
        await self._ready()
        coordinator = one_of(self.fleet.frontends, step.choice)
        update = asyncio.create_task(self._call(step, "update_weights", body, coordinator))
        await asyncio.sleep(step.choice * KILL_AFTER_S)
        self.fleet.kill(one_of(self.fleet.worker_ids, step.choice) if kills == "worker" else coordinator)
        return await update

    async def _adapter(self, step: Step) -> Answer:
        self.made_adapters += 1
        name = step.options["name"]
        state = await self.fleet.call(self._frontend(step), "state")
        op = "swap" if name in state.body.get("adapters", {}) else "load"
        body = self._body(self.weights.adapter(self.made_adapters), f"{name}-{self.made_adapters}", step)
        body["target"] = {"kind": "lora", "op": op, "name": name}
        return await self._call(step, "update_weights", body, name=name)

    async def _unload(self, step: Step) -> Answer:
        body = {"target": {"kind": "lora", "op": "unload", "name": step.options["name"]}}
        return await self._call(step, "update_weights", body, may=frozenset({"not_found", "invalid_request"}))

    async def _rollback(self, step: Step) -> Answer:
        """Rolls back to one of the versions of the base before the last one."""
        bases = sorted(version[1] for name, version in self.fleet.committed if name is None)
        wanted = bases[int(step.choice * (len(bases) - 1))]
        return await self._call(step, "update_weights", {"rollback": {"sequence": wanted}})

    async def _bad(self, step: Step) -> Answer:
        """Publishes a bad checkpoint. The fleet refuses it, and nothing changes."""
        before = await self.fleet.call(self._frontend(step), "state?min_workers=0")
        body = self._body(self.weights.bad(one_of(BAD, step.choice)), "bad", step)
        answer = await self.fleet.call(self._frontend(step), "update_weights", body)
        after = await self.fleet.call(self._frontend(step), "state?min_workers=0")
        if answer.status not in (400, 409):
            self._fault("a bad checkpoint", str(answer))
        for key in ("version", "adapters"):
            if before.body.get(key) != after.body.get(key):
                self._fault("a bad checkpoint", f"{key} was {before.body.get(key)}, and is {after.body.get(key)}")
        return answer

    def _body(self, path: Any, label: str, step: Step) -> dict[str, Any]:
        return {
            "transport": {"backend": "filesystem", "path": str(path)},
            "version": label,
            "policy": step.options.get("policy", {}),
        }

    async def _call(
        self,
        step: Step,
        op: str,
        body: dict[str, Any],
        frontend: str | None = None,
        name: str | None = None,
        may: frozenset[str] = frozenset(),
    ) -> Answer:
        """Makes a call with an id of its own. Repeats it until the answer is clear; only deaths may delay that."""
        began = time.monotonic()
        key = uuid.uuid4().hex
        frontend = frontend or self._frontend(step)
        while True:
            answer = await self.fleet.call(frontend, op, body, key)
            if answer.status is not None and answer.code not in ("locked", "unavailable", "outcome_unknown"):
                break
            if time.monotonic() - began > READY_S:
                self._fault(step.name, f"no clear answer within {READY_S:g} s: {answer}")
                break
            await asyncio.sleep(BACK_OFF_S)
            frontend = self._frontend(step)
        killed = self.fleet.was_down(None, began) or any(
            self.fleet.was_down(number, began) for number in range(len(self.fleet.frontends))
        )
        if answer.status == 200 and body.get("target", {}).get("op") != "unload":
            self.floors.raise_to(name, answer.body["version"]["sequence"])
        elif answer.status != 200 and answer.code not in may and not killed:
            self._fault(step.name, f"it failed, and no process was killed: {answer}")
        return answer

    def _frontend(self, step: Step) -> str:
        living = [name for name in self.fleet.frontends if not self.fleet.is_down(name)]
        return one_of(living, step.choice)

    # ---- deaths ----

    async def _kill_worker(self, step: Step) -> None:
        await self._ready()
        self.fleet.kill(one_of(self.fleet.worker_ids, step.choice))

    async def _kill_frontend(self, step: Step) -> None:
        await self._ready()
        self.fleet.kill(one_of(self.fleet.frontends, step.choice))

    async def _ready(self) -> None:
        """Waits until the whole fleet is ready, so that the next victim is never the last live process."""
        count, give_up = len(self.fleet.worker_ids), time.monotonic() + READY_S
        while True:
            answers = [await self.fleet.call(name, f"ready?min_workers={count}") for name in self.fleet.frontends]
            missing = [str(answer) for answer in answers if answer.status != 200]
            if not missing and not any(map(self.fleet.is_down, self.fleet.frontends)):
                return
            if time.monotonic() > give_up:
                self._fault("not ready", f"some processes did not return within {READY_S:g} s: {missing}")
                return
            await asyncio.sleep(BACK_OFF_S)

    def _fault(self, kind: str, words: str) -> None:
        self.faults.append(Fault(kind, "", "", "", words))
