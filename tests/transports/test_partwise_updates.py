"""Updates whose tensors a trainer announces call by call, in a group that it has formed by itself."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from rl_plane.errors import InvalidRequest, InvalidWeights, PlaneError, UpdateAborted
from tests.support.broadcast_trainer import HOST, BroadcastTrainer, parts_of
from tests.support.broadcast_updates import PARTS, Broadcasts
from tests.support.faults import Stream
from tests.support.fleet_updates import states
from tests.support.frontend_process import frontend
from tests.support.hf_fleet import ENDLESS, HEAL_S, PROMPT, Witnesses, chain, proven

if TYPE_CHECKING:
    from tests.conftest import Plane

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


async def test_parts_reach_two_workers_while_they_generate(plane: Plane) -> None:
    witnesses = Witnesses(plane)
    client = await plane.client()
    ids = await asyncio.to_thread(witnesses.spawn, 2)
    with BroadcastTrainer(plane) as trainer:
        broadcasts = Broadcasts(client, trainer)
        formed = await broadcasts.form(3)
        assert (formed["world_size"], sorted(formed["rank_offsets"].values())) == (3, [1, 2])
        stream = Stream(client, ids[0], PROMPT, ENDLESS, temperature=0.0)
        await stream.more()
        prepared = await broadcasts.prepare()
        assert (prepared["ready"], prepared["digest"]) == (True, None)
        directory = witnesses.base(2)
        parts = parts_of(directory, PARTS)
        missing = sum(len(part["names"]) for part in parts)
        for part in parts:
            await stream.more()
            fed = await broadcasts.feed(directory, part)
            missing -= len(part["names"])
            assert fed["missing"] == missing
            assert (fed["tensors"], [row["status"] for row in fed["workers"]]) == (
                len(part["names"]),
                ["ok", "ok"],
            )
        await stream.more()
        reply = await client.run("complete_weights_update", {"version": "two"})
        assert reply["version"]["label"] == "two"
        assert reply["excluded"] == []
        await stream.until(spans=2)
        stream.stop()
        change = stream.spans[1]["start"]
        assert stream.tokens[:change] == chain(PROMPT[-1], change, 1)
        async with frontend(plane, admission_wait_s=HEAL_S) as http:
            await proven(http, ids, 2)
            # In one bucket for each part, in packed ones, by a second group, and in another dtype.
            directory = witnesses.base(3)
            await broadcasts.push(directory, [{**one, "layout": "flat"} for one in parts_of(directory, 2)])
            await proven(http, ids, 3)
            directory = witnesses.base(1)
            packed = {"layout": "packed", "bucket_bytes": 20_000}
            await broadcasts.push(directory, [{**one, **packed} for one in parts_of(directory, 1)])
            await proven(http, ids, 1)
            directory, first = witnesses.base(2), broadcasts.group
            await broadcasts.form(3)
            parts = [
                {**one, "group": group} for one, group in zip(parts_of(directory, 2), (first, None), strict=True)
            ]
            parts[1].pop("group")
            await broadcasts.push(directory, parts)
            await proven(http, ids, 2)
            directory = witnesses.base(3)
            await broadcasts.push(directory, parts_of(directory, 2, "bfloat16"), cast=True, version="cast")
            await proven(http, ids, 3)
            (entry, *_) = (await client.run("updates"))["updates"]
            assert (entry["transport"], entry["refetchable"], entry["label"]) == (
                {"backend": "gloo"},
                False,
                "cast",
            )


async def test_a_wrong_call_of_an_update_in_parts_is_refused(plane: Plane) -> None:
    witnesses = Witnesses(plane)
    client = await plane.client()
    ids = await asyncio.to_thread(witnesses.spawn, 2)
    directory = witnesses.base(2)
    first, *others = parts_of(directory, PARTS)

    async def refused(work: Any, kind: type[PlaneError], words: str) -> PlaneError:
        with pytest.raises(kind, match=words) as caught:
            await work
        return caught.value

    with BroadcastTrainer(plane) as trainer:
        broadcasts = Broadcasts(client, trainer)
        # Before any rank joins: no worker waits for the trainer, and the trainer for no worker.
        where = {"backend": "gloo", "form": "torch", "group": "g", "master_address": HOST, "master_port": 1}
        wrong: dict[str, Any]
        for wrong, field in (
            ({"world_size": 4}, "world_size"),
            ({}, "world_size"),
            ({"world_size": 3, "rank_offset": 0}, "rank_offset"),
            ({"world_size": 3, "rank_offset": 2}, "world_size"),
        ):
            error = await refused(client.run("init_transport", {**where, **wrong}), InvalidRequest, ".")
            assert error.facts["field"] == field
        error = await refused(broadcasts.prepare(), InvalidRequest, "there is no gloo group|group")
        await broadcasts.form(3)
        await refused(
            client.run("receive_weights_part", first), UpdateAborted, "no update runs, and none is prepared"
        )
        transport = {"backend": "gloo", "group": broadcasts.group, "in_parts": True}
        await refused(client.run("update_weights", {"transport": transport}), InvalidRequest, "several calls")
        lora = {"kind": "lora", "op": "load", "name": "a"}
        await refused(broadcasts.prepare(target=lora), InvalidRequest, "all base weights")
        await broadcasts.prepare(version="kept")
        for wrong in ({"names": []}, {"dtypes": ["pigeon"] * len(first["names"])}, {"layout": "round"}):
            await refused(client.run("receive_weights_part", {**first, **wrong}), InvalidRequest, ".")
        await broadcasts.feed(directory, first)
        error = await refused(client.run("complete_weights_update"), InvalidWeights, "missing")
        assert error.facts["missing"]["count"] == sum(len(one["names"]) for one in others)
        # What the model lacks ends the update, and the group: the trainer is about to send it.
        for wrong, words in (
            ({**first, "names": ["pigeon", *first["names"][1:]]}, "unknown to the model"),
            ({**first, "shapes": [[1], *first["shapes"][1:]]}, "another shape"),
            ({**first, "dtypes": ["bfloat16"] * len(first["names"])}, "another dtype"),
        ):
            await broadcasts.form(3)
            await broadcasts.prepare()
            await refused(client.run("receive_weights_part", wrong), InvalidWeights, words)
            await refused(client.run("receive_weights_part", first), UpdateAborted, "none is prepared")
            await refused(broadcasts.prepare(), PlaneError, "broke")
        await broadcasts.form(3)
        await broadcasts.prepare()
        await broadcasts.feed(directory, first)
        await refused(client.run("receive_weights_part", first), InvalidWeights, "twice")
        # A trainer that does not send what it has announced.
        await broadcasts.form(3)
        await broadcasts.prepare()
        await refused(
            client.run("receive_weights_part", {**first, "timeout_s": 1.0}), UpdateAborted, "did not come"
        )
        # And a trainer that gives up.
        await broadcasts.form(3)
        await broadcasts.prepare()
        await broadcasts.feed(directory, first)
        await client.run("abort_weights_update")
        async with frontend(plane, admission_wait_s=HEAL_S) as http:
            await proven(http, ids, 1)
            await broadcasts.form(3)
            await broadcasts.push(directory, [first, *others])
            await proven(http, ids, 2)
        assert all(state["staged"] is None for state in (await states(client)).values())


async def test_a_destroyed_group_is_refused_and_another_group_works(plane: Plane) -> None:
    witnesses = Witnesses(plane)
    client = await plane.client()
    await asyncio.to_thread(witnesses.spawn, 1)
    with BroadcastTrainer(plane) as trainer:
        broadcasts = Broadcasts(client, trainer)
        await broadcasts.form(2, "stays")
        await broadcasts.form(2, "goes")
        await client.run("destroy_transport", {"backend": "gloo", "group": "goes"})
        with pytest.raises(InvalidRequest, match="this worker has stays"):
            await broadcasts.prepare()
        broadcasts.group = "stays"
        directory = witnesses.base(2)
        assert (await broadcasts.push(directory, parts_of(directory, 1)))["excluded"] == []
