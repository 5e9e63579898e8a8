"""Scenarios of mixtures of experts that hold on every engine. A test file gives them a fleet."""

from __future__ import annotations

import asyncio
import json
import shutil

import httpx
import pytest

from rl_plane.client import RlClient
from rl_plane.errors import InvalidWeights, PlaneError
from rl_plane.protocol.versions import ADAPTER_CONFIG_NAME
from rl_plane.publish import WeightPublisher
from tests.support.each_transport import Shelf
from tests.support.fleet_updates import all_serve, update_of
from tests.support.moe_fleet import HEAL_S, MoeFleet, canary_of, proven


async def checksums(client: RlClient) -> dict[str, list[str]]:
    """The checksums of the ranks of each worker."""
    rows = (await client.run("check_weights", {"action": "checksum"}))["workers"]
    return {row["instance_id"]: [rank["checksum"] for rank in row["ranks"]] for row in rows}


async def every_update_forth_and_back_is_exact(fleet: MoeFleet, client: RlClient, http: httpx.AsyncClient) -> None:
    """Updates come by files and over the served weights. The last version is the directory that the fleet has started
    from: then every byte is as it was at the start."""
    one, two = fleet.base(1), fleet.base(2)
    await proven(http, fleet, "initial", one)
    before = await checksums(client)
    for label, base, policy in (
        ("two", two, {}),
        ("one", one, {}),
        ("two in place", two, {"staging": "none"}),
        ("one in place", one, {"staging": "none"}),
    ):
        reply = await client.run("update_weights", update_of(base, label, **policy, canary=canary_of(base)))
        assert reply["excluded"] == []
        assert reply["canary"]["against"] == "trainer"
        await proven(http, fleet, label, base)
        assert (await checksums(client) == before) == (base == one)
    await client.run("check_weights", {"action": "reset_tensors"})
    await fleet.plane.until(lambda: all_serve(client, label), HEAL_S)
    await proven(http, fleet, label, base)


async def a_cast_rounds_nothing_that_an_engine_keeps(
    fleet: MoeFleet, client: RlClient, http: httpx.AsyncClient
) -> None:
    """A trainer in float32. The biases of GLM's routers would choose other experts if they were rounded."""
    wide = fleet.base(2, "float32")
    with pytest.raises(InvalidWeights) as caught:
        await client.run("update_weights", update_of(wide, "wide"))
    assert caught.value.facts["field"] == "cast"
    await client.run("update_weights", {**update_of(wide, "wide"), "cast": True})
    await proven(http, fleet, "wide", wide)
    await client.run("update_weights", update_of(fleet.base(1), "one"))


@pytest.mark.parametrize("backend", ["ipc", "gloo"])
async def a_published_version_is_exact(
    fleet: MoeFleet, client: RlClient, http: httpx.AsyncClient, backend: str
) -> None:
    """A full version, and a delta that changes routers and an expert."""
    plane, shelf = fleet.plane, Shelf(fleet.base(2))
    publisher = WeightPublisher(
        shelf,
        plane.url,
        namespace=plane.namespace,
        component=plane.component,
        workers=len(fleet.ids),
        transport=backend,
        encoding="delta",
    )
    try:
        for directory, encoding in ((fleet.base(2), "full"), (fleet.stepped(), "delta")):
            shelf.directory, label = directory, f"{backend} {encoding}"
            await publisher.publish_async(label)
            (last, *_) = (await client.run("updates"))["updates"]
            assert (last["label"], last["transport"]["backend"], last["encoding"]) == (label, backend, encoding)
            await proven(http, fleet, label, directory)
    finally:
        await asyncio.to_thread(publisher.close)


async def adapters_of_the_attention_are_exact(fleet: MoeFleet, client: RlClient, http: httpx.AsyncClient) -> None:
    one, two = fleet.base(1), fleet.base(2)
    await client.run("update_weights", update_of(one, "one"))
    for seed in (1, 2):
        await client.run("load_lora_adapter", {"lora_name": "style", "lora_path": str(fleet.adapter(seed))})
        await proven(http, fleet, "one", one, ("style", fleet.adapter(seed)))
        await proven(http, fleet, "one", one)
    await client.run("update_weights", update_of(two, "two"))
    await proven(http, fleet, "two", two, ("style", fleet.adapter(2)))
    # One engine of the fleet can't compute these. They are refused by name, and nothing has changed.
    refused = {"use_dora": True, "target_parameters": ["mlp.experts.down_proj"], "modules_to_save": ["lm_head"]}
    for key, value in refused.items():
        bad = shutil.copytree(fleet.adapter(2), fleet.adapter(2).with_name(key), dirs_exist_ok=True)
        config = json.loads((bad / ADAPTER_CONFIG_NAME).read_text())
        (bad / ADAPTER_CONFIG_NAME).write_text(json.dumps(config | {key: value}))
        with pytest.raises(PlaneError) as caught:
            await client.run("load_lora_adapter", {"lora_name": "style", "lora_path": str(bad)})
        assert key in str(caught.value.to_wire()), caught.value
    await proven(http, fleet, "two", two, ("style", fleet.adapter(2)))
    await client.run("unload_lora_adapter", {"lora_name": "style"})
    await proven(http, fleet, "two", two)
