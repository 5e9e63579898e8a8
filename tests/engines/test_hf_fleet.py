"""A fleet of real models: the tokens alone prove which base weights and which adapter each worker serves."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from tests.support.faults import Stream
from tests.support.fleet_updates import all_serve, states, update_of
from tests.support.frontend_process import error_of, frontend
from tests.support.healing import checksum_of, until_behind, until_open
from tests.support.hf_fleet import ENDLESS, HEAL_S, PROMPT, START_S, Witnesses, chain, proven

if TYPE_CHECKING:
    from tests.conftest import Plane

pytestmark = pytest.mark.slow


@pytest.mark.timeout(400)
async def test_each_token_is_right_through_updates_a_failure_and_a_kill(plane: Plane) -> None:
    witnesses = Witnesses(plane)
    client = await plane.client()
    ids = await asyncio.to_thread(witnesses.spawn, 2)
    async with frontend(plane, admission_wait_s=HEAL_S) as http:
        await proven(http, ids, 1)
        # Adapters: loaded, swapped, one more, through both barriers.
        for seed in (1, 2):
            path = str(witnesses.adapter(seed))
            await client.run("load_lora_adapter", {"lora_name": "a", "lora_path": path})
            await proven(http, ids, 1, a=seed)
        rolling = {
            "target": {"kind": "lora", "op": "load", "name": "b"},
            "transport": {"backend": "filesystem", "path": str(witnesses.adapter(3))},
            "policy": {"barrier": "rolling"},
        }
        await client.run("update_weights", rolling)
        await proven(http, ids, 1, a=2, b=3)
        # The base beneath them, staged and in place, while requests run.
        await client.run("update_weights", update_of(witnesses.base(2), "two", barrier="rolling"))
        await proven(http, ids, 2, a=2, b=3)
        plain = Stream(client, ids[0], PROMPT, ENDLESS, temperature=0.0)
        adapted = Stream(client, ids[1], PROMPT, ENDLESS, temperature=0.0, adapter="b")
        await plain.more()
        await adapted.more()
        await client.run("update_weights", update_of(witnesses.base(3), "three", staging="none"))
        await proven(http, ids, 3, a=2, b=3)
        for stream in (plain, adapted):
            await stream.until(spans=2)
            stream.stop()
        change = plain.spans[1]["start"]
        before, after = plain.tokens[:change], plain.tokens[change:]
        assert before == chain(PROMPT[-1], change, 2)
        assert after == chain(before[-1], len(after), 3)
        assert adapted.tokens == chain(PROMPT[-1], len(adapted.tokens), 0, 3)
        assert len({(span["sequence"], span["adapter"]["sequence"]) for span in adapted.spans}) == 2
        # After a failure half-way, all of the memory is resumed.
        body = {**update_of(witnesses.base(4), "four", staging="none"), "digest": "blake3:" + "0" * 64}
        with pytest.raises(Exception, match="blake3"):
            await client.run("update_weights", body)
        await plane.until(lambda: all_serve(client, "three"), HEAL_S)
        await proven(http, ids, 3, a=2, b=3)
        # A process that was killed fetches all of it before it is admitted.
        doomed = next(one for one in plane.spawned if one.instance_id == ids[0])
        doomed.kill()
        (again,) = await asyncio.to_thread(witnesses.spawn, 1, instance_id=ids[0])
        assert again == ids[0]
        await plane.until(lambda: all_serve(client, "three"), HEAL_S)
        await proven(http, ids, 3, a=2, b=3)
        # Gone, and back.
        await client.run("unload_lora_adapter", {"lora_name": "b"})
        await proven(http, ids, 3, a=2)
        back = await client.run("update_weights", {"rollback": {"sequence": 1}})
        await proven(http, ids, 3, a=1)
        assert back["version"]["sequence"] == 7
        drop = {**update_of(witnesses.base(1), "back to one"), "target": {"kind": "base", "adapters": "drop"}}
        await client.run("update_weights", drop)
        await proven(http, ids, 1)
        error_of(await http.post("/v1/completions", json={"prompt": "hi", "model": "a"}), 404)
    assert {state["sequence"] for state in (await states(client)).values()} == {8}


STOPS = """
import time, rl_plane.transports.checkpoint_delivery as delivery
really = delivery.CheckpointDelivery.tensors
def tensors(self, cancelled):
    *most, last = really(self, cancelled)
    yield from most
    Path({folder!r}, "stopped").touch()
    while not Path({folder!r}, "go").exists():
        time.sleep(0.01)
    yield last
delivery.CheckpointDelivery.tensors = tensors
"""
"""Before its last tensor."""


@pytest.mark.timeout(400)
async def test_a_reset_meets_an_overwrite_whose_caller_is_gone(plane: Plane) -> None:
    """The overwrite would end well, with the digest that was committed, and noise would lie over what it wrote."""
    witnesses = Witnesses(plane)
    client = await plane.client()
    patch = STOPS.format(folder=str(plane.tmp))
    started = [
        plane.spawn(ready=False, engine="hf", model=witnesses.first, patch=patch if stops else "")
        for stops in (True, False)
    ]
    slow, good = [(await asyncio.to_thread(one.wait_ready, START_S)).instance_id for one in started]
    policy = {"staging": "none", "on_prepare_failure": "exclude", "prepare_timeout_s": 10.0}
    reply = await client.run("update_weights", update_of(witnesses.base(2), "two", **policy))
    assert reply["excluded"] == [slow]
    assert (plane.tmp / "stopped").exists()
    resetting = asyncio.create_task(client.call(slow, "check_weights", {"action": "reset_tensors"}))

    async def begun() -> bool:
        return "reset_tensors" in await until_behind(plane, client, slow)

    await plane.until(begun)
    (plane.tmp / "go").touch()
    await resetting
    await until_open(plane, client, slow, "two", HEAL_S)
    assert await checksum_of(client, slow) == await checksum_of(client, good), "noise was admitted"
