"""The calls of trainers and operators."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.sim.calls import READS, call
from tests.sim.sessions import PHASES, Sessions
from tests.sim.world import Coordinator, World

UNSTAGED_INVALID = True
ADAPTERS = ("red", "blue")


class Trainers(Sessions):
    """They know what a trainer of this run may: labels that were given, fingerprints that were read."""

    def __init__(self, world: World, kinds: frozenset[str], canary: bool = False) -> None:
        super().__init__(world, canary)
        self.kinds = [kind for kind in KINDS if kind in kinds]
        self._labels: list[str] = ["initial"]
        self._pins: list[str] = []
        self._base = ""

    async def something(self, by: Coordinator) -> None:
        """One call, or a sequence of them, by way of `by`."""
        rng = self.world.rng
        kind = "update" if not self.kinds or rng.random() < 0.5 else rng.choice(self.kinds)
        self.world.say(f"{by.process.name}: {kind}")
        await getattr(self, f"_{kind}")(by)

    # ---- updates ----

    async def _update(self, by: Coordinator) -> None:
        name, body = self.body()
        if await self.ask(by, "update_weights", body, name) is not None:
            self._labels.append(name)

    async def _twice(self, by: Coordinator) -> None:
        """Sends one update to two coordinators under one id."""
        world = self.world
        name, body = self.body()
        request_id = f"id-{name}"
        other = world.rng.choice(world.alive())
        second = other.process.spawn(self._again(other, name, body, request_id))
        await self.ask(by, "update_weights", body, name, request_id)
        del second

    async def _again(self, by: Coordinator, name: str, body: dict[str, Any], request_id: str) -> None:
        await asyncio.sleep(self.world.rng.choice([0.0, 0.01, 0.5, 4.0]))
        await self.ask(by, "update_weights", body, name, request_id)

    async def _pinned(self, by: Coordinator) -> None:
        """Pins the call to the present fleet, or to an earlier one."""
        world, rng = self.world, self.world.rng
        reply = await call(world, by, "workers", {})
        if reply is not None:
            self._pins.append(reply["fingerprint"])
        if self._pins:
            await asyncio.sleep(rng.choice([0.0, 1.0]))
            name, body = self.body()
            pin = self._pins[-1] if rng.random() < 0.7 else rng.choice(self._pins)
            await call(world, by, "update_weights", {**body, "fingerprint": pin}, name)

    async def _invalid(self, by: Coordinator) -> None:
        name, body = self.body()
        self.wrong[name] = "it is invalid"
        wrong: dict[str, Any] = self.world.rng.choice(
            [
                {"transport": {"backend": "pigeon"}},
                {"transport": {"backend": "filesystem", "path": "/nowhere"}},
                {"transport": {"backend": "filesystem", "path": str(self.world.models[-1])}},
                {"policy": {"min_ready": 0}},
                {"digest": "blake3:" + "0" * 64},
                {"version": ""},
            ]
        )
        await call(self.world, by, "update_weights", {**body, **wrong}, name)

    async def _rolling(self, by: Coordinator) -> None:
        name, body = self.body()
        body["policy"]["barrier"] = "rolling"
        await self.ask(by, "update_weights", body, name)

    async def _deltas(self, by: Coordinator) -> None:
        """One after another, each on top of what the trainer takes for the committed version: what it has just
        learnt, or what it learnt before."""
        world, rng = self.world, self.world.rng
        for _ in range(rng.choice([1, 3])):
            reply = await call(world, by, "state", {})
            if reply is not None and reply["version"] is not None and rng.random() < 0.9:
                self._base = reply["version"]["digest"]
            ways = sorted(digest for base, digest in world.deltas if base == self._base)
            if not ways:
                return
            name, body = self.body()
            self.wrong[name] = ""
            digest = rng.choice(ways)
            body["transport"]["path"] = str(world.deltas[self._base, digest])
            if rng.random() < 0.1:  # it is not what it says
                told, digest = digest, rng.choice(ways)
                self.wrong[name] = "" if told == digest else "it is a delta of something else"
            body |= {"encoding": "delta", "base": self._base, "digest": digest}
            if rng.random() < 0.2:
                body["policy"]["barrier"] = "rolling"
            if await self.ask(by, "update_weights", body, name) is not None:
                self._labels.append(name)
            await asyncio.sleep(rng.choice([0.0, 0.5, 5.0]))

    async def _unstaged(self, by: Coordinator) -> None:
        name, body = self.body()
        if not UNSTAGED_INVALID:
            body["transport"]["path"] = str(self.world.rng.choice(self.world.good_models))
            self.wrong[name] = ""
        body["policy"] |= {"staging": "none", "keep_staged": False}
        await self.ask(by, "update_weights", body, name)

    async def _lora(self, by: Coordinator) -> None:
        world, rng = self.world, self.world.rng
        name, body = self.body()
        op = rng.choice(["load", "load", "swap", "swap", "unload"])
        body["target"] = {"kind": "lora", "op": op, "name": rng.choice(ADAPTERS)}
        body["transport"] = {"backend": "filesystem", "path": str(rng.choice(world.adapters))}
        body["policy"].pop("canary", None)
        self.wrong[name] = ""
        if op == "unload":
            del body["transport"]
        if rng.random() < 0.2:
            body["policy"]["barrier"] = "rolling"
        await self.ask(by, "update_weights", body, name)

    async def _drop_adapters(self, by: Coordinator) -> None:
        name, body = self.body()
        body["target"] = {"kind": "base", "adapters": "drop"}
        await self.ask(by, "update_weights", body, name)

    async def _new_run(self, by: Coordinator) -> None:
        await call(self.world, by, "new_run", {})

    async def _push(self, by: Coordinator) -> None:
        """Updates in one call: the trainer sends while the call waits."""
        name, body = self.body()
        self.pushed_now(body, name)
        await self.ask(by, "update_weights", body, name)

    async def _keep_pause(self, by: Coordinator) -> None:
        name, body = self.body()
        body["policy"]["keep_pause"] = True
        await self.ask(by, "update_weights", body, name)

    async def _rollback(self, by: Coordinator) -> None:
        self._steps += 1
        name = f"back_{self._steps}"
        body = {"rollback": {"label": self.world.rng.choice(self._labels)}, "version": name, "policy": PHASES}
        await self.ask(by, "update_weights", body, name)

    # ---- what else there is ----

    async def _pause(self, by: Coordinator) -> None:
        world, rng = self.world, self.world.rng
        body = {"mode": rng.choice(["keep", "keep", "wait", "abort"]), "lease_s": rng.choice([2.0, 600.0])}
        await call(world, by, "pause", body)
        if rng.random() < 0.7:
            await asyncio.sleep(rng.uniform(0.0, 2.0))
            await call(world, by, "resume", {})

    async def _disable(self, by: Coordinator) -> None:
        world, rng = self.world, self.world.rng
        members = world.members()
        if members:
            op = rng.choice(["enable", "disable"])
            await call(world, by, op, {"workers": [rng.choice(members)]})

    async def _memory(self, by: Coordinator) -> None:
        world, rng = self.world, self.world.rng
        await call(world, by, "pause", {"mode": "abort", "lease_s": 600.0})
        await call(world, by, "release_memory", {"tags": rng.choice([["weights"], ["kv_cache", "weights"]])})
        await asyncio.sleep(rng.uniform(0.0, 2.0))
        if rng.random() < 0.5:  # as trainers do that share the GPU: the KV cache is resumed last
            await call(world, by, "resume_memory", {"tags": ["weights"]})
            await self._update(by)
        await call(world, by, "resume_memory", {})
        await call(world, by, "resume", {})

    async def _small(self, by: Coordinator) -> None:
        op, body = self.world.rng.choice(
            [
                ("flush_cache", {}),
                ("abort_requests", {}),
                ("check_weights", {"action": "checksum"}),
                ("check_weights", {"action": "reset_tensors"}),
            ]
        )
        await call(self.world, by, op, body)

    async def _read(self, by: Coordinator) -> None:
        await call(self.world, by, self.world.rng.choice(READS), {"wait_s": 1.0})

    # ---- at rest ----

    async def tidy_up(self, by: Coordinator) -> None:
        """An operator undoes whatever was left: from here on every worker should serve."""
        world = self.world
        for _ in range(5):
            await call(world, by, "abort_weights_update", {})
            if not world.session_waits():
                break
            await asyncio.sleep(2.0)  # NATS stands still perhaps
        if members := world.members():
            await self._surely(by, "enable", {"workers": members})
        await self._surely(by, "resume_memory", {})
        await self._surely(by, "resume", {})
        world.desired.tidied = True

    async def _surely(self, by: Coordinator, op: str, body: dict[str, Any]) -> None:
        for _ in range(5):
            if await call(self.world, by, op, body) is not None:
                return
            await asyncio.sleep(2.0)
        self.world.checks.fail("I7", f"at rest, {op} does not succeed")


KINDS = (
    "push",
    "rolling",
    "deltas",
    "deltas",
    "unstaged",
    "lora",
    "lora",
    "drop_adapters",
    "new_run",
    "twice",
    "pinned",
    "invalid",
    "keep_pause",
    "rollback",
    "session",
    "session",
    "in_parts",
    "pause",
    "disable",
    "memory",
    "small",
    "read",
)
"""The kinds of calls that a run's trainers may make beside plain updates."""
