"""Updates that a trainer pushes, in one call or in several: prepare, feed, name, complete, abort."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.sim import product
from tests.sim.calls import UPDATE_BOUND_S, call
from tests.sim.sources import digest_of
from tests.sim.world import Coordinator, World

PHASES = {"prepare_timeout_s": 20.0, "commit_timeout_s": 20.0}
CANARY = [[5, 17, 33, 4], [9, 8, 7]]


class Sessions:
    def __init__(self, world: World, canary: bool) -> None:
        """`canary`: the trainers give values of their own."""
        self.world = world
        self.wrong: dict[str, str] = {}
        """Update -> why it can't be accepted."""
        self._canary = canary
        self._steps = 0

    async def ask(
        self, by: Coordinator, op: str, body: dict[str, Any], name: str, request_id: str = ""
    ) -> dict[str, Any] | None:
        return await call(self.world, by, op, body, name, request_id, self.wrong.get(name, ""))

    def body(self) -> tuple[str, dict[str, Any]]:
        world, rng = self.world, self.world.rng
        self._steps += 1
        name = f"step_{self._steps}"
        good = rng.random() < 0.9
        path = rng.choice(world.good_models) if good else world.models[-1]
        self.wrong[name] = "" if good else "the model has other tensors"
        policy: dict[str, Any] = dict(PHASES)
        if rng.random() < 0.4:
            policy["on_prepare_failure"] = "exclude"
        if rng.random() < 0.5:
            policy["keep_staged"] = True
        if rng.random() < 0.2:
            policy["pause_mode"] = rng.choice(["wait", "abort"])
        if self._canary and good:
            self._with_canary(policy, digest_of(path))
        body = {"transport": {"backend": "filesystem", "path": str(path)}, "version": name, "policy": policy}
        return name, body

    def _with_canary(self, policy: dict[str, Any], digest: str) -> None:
        """Adds the values of the trainer's own model, or of another model if the trainer is at fault."""
        rng = self.world.rng
        policy["on_canary_failure"] = rng.choice(["rollback", "rollback", "exclude", "warn"])
        chance = rng.random()
        if chance < 0.1:
            policy["canary"] = "off"
        elif chance < 0.7:
            computed = digest if chance < 0.55 else f"another than {digest}"
            sequences = tuple(map(tuple, CANARY))
            expected = [list(vector) for vector in product.vectors_of(computed, sequences)]
            policy["canary"] = {"sequences": CANARY, "expected": expected}

    # ---- what is pushed ----

    def pushed(self, body: dict[str, Any], name: str) -> None:
        """The workers are to listen for it."""
        body["transport"] |= {"backend": "gloo", "push": name}

    def pushed_now(self, body: dict[str, Any], name: str) -> None:
        self.pushed(body, name)
        delay_s = self.world.rng.choice([0.0, 0.02, 0.5])
        self.world.server.later(delay_s, self.push, name)

    def push(self, name: str) -> None:
        """The trainer sends it all, unless it dies on the way."""
        world = self.world
        broken = world.rng.random() < 0.1
        if broken:
            world.sources.failed = True
            world.say(f"{name}: its trainer dies while it sends")
        world.sources.pushes[name] = "broken" if broken else "sent"

    async def _session(self, by: Coordinator) -> None:
        """Prepare, then perhaps name it, then complete or abort through any coordinator, or neither."""
        rng = self.world.rng
        name, body = self.body()
        listens = rng.random() < 0.5
        if listens:
            self.pushed(body, name)
        reply = await self.ask(by, "prepare_weights_update", body, name)
        if reply is None:
            return
        await asyncio.sleep(rng.choice([0.0, 0.3, 3.0]))
        if listens and rng.random() < 0.9:
            self.push(name)
        if rng.random() < 0.2:
            await self._by_anybody(by, "label_weights_update", {**_id(reply), "version": name}, name)
        end = rng.choice(["complete_weights_update", "complete_weights_update", "abort_weights_update", ""])
        if end:
            await self._by_anybody(by, end, _id(reply), name)

    async def _in_parts(self, by: Coordinator) -> None:
        """Part by part: each is a call, through any coordinator."""
        world, rng = self.world, self.world.rng
        name, body = self.body()
        body["transport"] |= {"backend": "gloo", "group": "g", "in_parts": True}
        reply = await self.ask(by, "prepare_weights_update", body, name)
        if reply is None:
            return
        tensors = world.tensors
        if rng.random() < 0.1:
            tensors = tensors[:-1]
            self.wrong[name] = "a tensor did not come"
        for tensor, spec in tensors:
            part = {"names": [tensor], "dtypes": [spec.dtype], "shapes": [list(spec.shape)], "timeout_s": 5.0}
            if await self._by_anybody(by, "receive_weights_part", {**_id(reply), **part}, name) is None:
                return
            await asyncio.sleep(rng.choice([0.0, 0.0, 0.5]))
        end = rng.choice(["complete_weights_update"] * 3 + ["abort_weights_update"])
        await self._by_anybody(by, end, _id(reply), name)

    async def _by_anybody(
        self, by: Coordinator, op: str, body: dict[str, Any], name: str
    ) -> dict[str, Any] | None:
        """None also where that one dies."""
        alive = self.world.alive()
        other = self.world.rng.choice(alive) if self.world.rng.random() < 0.7 and alive else by
        task = other.process.spawn(self.ask(other, op, body, name))
        await asyncio.wait([task], timeout=UPDATE_BOUND_S)
        reply: dict[str, Any] | None = task.result() if task.done() and not task.cancelled() else None
        return reply


def _id(reply: dict[str, Any]) -> dict[str, Any]:
    return {"update_id": reply["update_id"]}
