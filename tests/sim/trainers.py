"""What trainers and operators ask of the fleet, and how long they may have to wait."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from rl_plane.errors import PlaneError
from tests.sim.checks import CALL, CallRecord
from tests.sim.world import Coordinator, World

UPDATE_BOUND_S = 240.0
CHANGE_BOUND_S = 150.0
READ_BOUND_S = 20.0
"""I5: the time-outs of a call's phases and its retries, added up. What its own process stood still is not counted."""
UNSTAGED_INVALID = True
ADAPTERS = ("red", "blue")
PHASES = {"prepare_timeout_s": 20.0, "commit_timeout_s": 20.0}
READS = ("state", "workers", "weight_version", "updates", "ready", "describe")
UPDATES = (
    "new_run",
    "update_weights",
    "complete_weights_update",
    "prepare_weights_update",
    "abort_weights_update",
)


async def call(
    world: World, by: Coordinator, op: str, body: Mapping[str, Any], name: str = "", request_id: str = ""
) -> dict[str, Any] | None:
    """The reply; None for an error, which is told to the checks."""
    record = CallRecord(by.process, op, dict(body), name, world.loop.now, len(world.checks.decided))
    record.shared = bool(request_id)
    world.calls.append(record)
    CALL.set(record)
    stood_still = by.process.stood_still_s
    bound_s = UPDATE_BOUND_S if op in UPDATES else READ_BOUND_S if op in READS else CHANGE_BOUND_S
    try:
        async with asyncio.timeout(bound_s + 60.0):
            reply = await by.run(op, dict(body), request_id)
        outcome, facts = "ok", reply
    except TimeoutError:
        world.checks.fail("I5", f"{op} {name} does not end")
        return None
    except PlaneError as error:
        outcome, facts = error.code, error.facts
        world.say(f"{op} {name}: {error.code} {error.message[:100]}")
    except Exception as error:
        world.checks.fail("I5", f"{op} {name} ends with {type(error).__name__}: {error}")
        return None
    took_s = world.loop.now - record.began_at - (by.process.stood_still_s - stood_still)
    if took_s > bound_s:
        world.checks.fail("I5", f"{op} {name} took {took_s:.1f} s")
    world.checks.answered(record, outcome, facts)
    if outcome != "ok":
        world.refused += op in UPDATES
        return None
    world.committed += op in ("update_weights", "complete_weights_update")
    if op not in READS:
        world.say(f"{op} {name}: ok" + (f", excluded {reply['excluded']}" if reply.get("excluded") else ""))
    return reply


class Trainers:
    """They know what a trainer of this run may: labels that were given, fingerprints that were read."""

    def __init__(self, world: World, kinds: frozenset[str]) -> None:
        self.world = world
        self.kinds = [kind for kind in KINDS if kind in kinds]
        self._steps = 0
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

    def body(self) -> tuple[str, dict[str, Any]]:
        world, rng = self.world, self.world.rng
        self._steps += 1
        name = f"step_{self._steps}"
        good = rng.random() < 0.9
        path = rng.choice(world.models[1:-1]) if good else world.models[-1]
        policy: dict[str, Any] = dict(PHASES)
        if rng.random() < 0.4:
            policy["on_prepare_failure"] = "exclude"
        if rng.random() < 0.5:
            policy["keep_staged"] = True
        if rng.random() < 0.2:
            policy["pause_mode"] = rng.choice(["wait", "abort"])
        body = {"transport": {"backend": "filesystem", "path": str(path)}, "version": name, "policy": policy}
        return name, body

    async def _update(self, by: Coordinator) -> None:
        name, body = self.body()
        if await call(self.world, by, "update_weights", body, name) is not None:
            self._labels.append(name)

    async def _twice(self, by: Coordinator) -> None:
        """The same update, asked for by way of two coordinators under one id."""
        world = self.world
        name, body = self.body()
        request_id = f"id-{name}"
        other = world.rng.choice(world.alive())
        second = other.process.spawn(self._again(other, name, body, request_id))
        await call(world, by, "update_weights", body, name, request_id)
        del second

    async def _again(self, by: Coordinator, name: str, body: dict[str, Any], request_id: str) -> None:
        await asyncio.sleep(self.world.rng.choice([0.0, 0.01, 0.5, 4.0]))
        await call(self.world, by, "update_weights", body, name, request_id)

    async def _pinned(self, by: Coordinator) -> None:
        """To the fleet as it is, or as it was once."""
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
        await call(self.world, by, "update_weights", body, name)

    async def _deltas(self, by: Coordinator) -> None:
        """One after another, each on top of what the trainer takes for the committed version: what it was just told,
        or what it was told before."""
        world, rng = self.world, self.world.rng
        for _ in range(rng.choice([1, 3])):
            reply = await call(world, by, "state", {})
            if reply is not None and reply["version"] is not None and rng.random() < 0.9:
                self._base = reply["version"]["digest"]
            ways = sorted(digest for base, digest in world.deltas if base == self._base)
            if not ways:
                return
            name, body = self.body()
            digest = rng.choice(ways)
            body["transport"]["path"] = str(world.deltas[self._base, digest])
            if rng.random() < 0.1:  # it is not what it says
                digest = rng.choice(ways)
            body |= {"encoding": "delta", "base": self._base, "digest": digest}
            if rng.random() < 0.2:
                body["policy"]["barrier"] = "rolling"
            if await call(world, by, "update_weights", body, name) is not None:
                self._labels.append(name)
            await asyncio.sleep(rng.choice([0.0, 0.5, 5.0]))

    async def _unstaged(self, by: Coordinator) -> None:
        name, body = self.body()
        if not UNSTAGED_INVALID:
            body["transport"]["path"] = str(self.world.rng.choice(self.world.models[1:-1]))
        body["policy"] |= {"staging": "none", "keep_staged": False}
        await call(self.world, by, "update_weights", body, name)

    async def _lora(self, by: Coordinator) -> None:
        world, rng = self.world, self.world.rng
        name, body = self.body()
        op = rng.choice(["load", "load", "swap", "swap", "unload"])
        body["target"] = {"kind": "lora", "op": op, "name": rng.choice(ADAPTERS)}
        body["transport"] = {"backend": "filesystem", "path": str(rng.choice(world.adapters))}
        if op == "unload":
            del body["transport"]
        if rng.random() < 0.2:
            body["policy"]["barrier"] = "rolling"
        await call(world, by, "update_weights", body, name)

    async def _drop_adapters(self, by: Coordinator) -> None:
        name, body = self.body()
        body["target"] = {"kind": "base", "adapters": "drop"}
        await call(self.world, by, "update_weights", body, name)

    async def _new_run(self, by: Coordinator) -> None:
        await call(self.world, by, "new_run", {})

    async def _keep_pause(self, by: Coordinator) -> None:
        name, body = self.body()
        body["policy"]["keep_pause"] = True
        await call(self.world, by, "update_weights", body, name)

    async def _rollback(self, by: Coordinator) -> None:
        self._steps += 1
        name = f"back_{self._steps}"
        body = {"rollback": {"label": self.world.rng.choice(self._labels)}, "version": name, "policy": PHASES}
        await call(self.world, by, "update_weights", body, name)

    async def _session(self, by: Coordinator) -> None:
        """Prepare, then complete or abort by way of anybody, or neither."""
        world, rng = self.world, self.world.rng
        name, body = self.body()
        if rng.random() < 0.5:  # they listen, and complete waits for what they get
            body["transport"]["backend"] = "gloo"
        reply = await call(world, by, "prepare_weights_update", body, name)
        if reply is None:
            return
        await asyncio.sleep(rng.choice([0.0, 0.3, 3.0]))
        alive = world.alive()
        other = rng.choice(alive) if rng.random() < 0.7 and alive else by
        end = rng.choice(["complete_weights_update", "complete_weights_update", "abort_weights_update", ""])
        if end:
            work = call(world, other, end, {"update_id": reply["update_id"]}, name)
            await asyncio.wait([other.process.spawn(work)], timeout=UPDATE_BOUND_S)

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
        if rng.random() < 0.5:  # as trainers do that share the GPU: the KV cache comes back last
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
        await call(world, by, "abort_weights_update", {})
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
    "pause",
    "disable",
    "memory",
    "small",
    "read",
)
"""What a run's trainers may do beside plain updates."""
