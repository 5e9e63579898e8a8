"""One engine on two nodes, which are two processes here, each with its own part of the model: a fleet sees one worker.

The tests of one engine share its starts, and run in order: each one leaves a worker that serves.
"""

from __future__ import annotations

import asyncio
import os
import platform
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from rl_plane.client import RlClient
from rl_plane.errors import InvalidWeights
from rl_plane.publish import WeightPublisher
from tests.conftest import Plane, Spawned, lives
from tests.support import each_transport
from tests.support.cores import bound_cores
from tests.support.faults import Stream
from tests.support.fleet_updates import update_of
from tests.support.free_port import free_port
from tests.support.mixed_fleet import (
    ARGUMENTS,
    END_S,
    ENDLESS,
    HEAL_S,
    PROMPT,
    START_S,
    Mixed,
    client,
    http,
    proven,
    seed_of,
    standing,
    witnessed,
)
from worker.engines.common.shared_names import mapped_files, names_of
from worker.exit_codes import ENGINE_DEAD, OK
from worker.testing.tiny_model import make_tiny_model, make_witness_model

__all__ = ["client", "http"]

pytestmark = [pytest.mark.timeout(900)]

PARTS: dict[str, tuple[str, dict[str, Any]]] = {
    "vllm": ("vllm", {"tensor_parallel_size": 2}),
    "sglang": ("sglang", {"tp_size": 2}),
    "pipeline": ("sglang", {"pp_size": 2}),
}
"""Engine, and how its model is divided between the nodes."""
RANK = {"vllm": "VLLM::Worker", "sglang": "sglang::scheduler"}
"""The begin of the names of the processes that have the model."""
LOST_S = 20.0
"""Seconds until the loss of a node is noticed, on a busy machine."""


STREAMS = 4
"""Requests at once, so that each batch of a pipeline has some. Together they make at most ENDLESS tokens."""
LONG = 200
"""Tokens of a stream that a pause waits for."""
LONG_PROMPT = 1000
"""Times that a long prompt has PROMPT."""
PAUSES = 16
"""Each comes a round trip later than the one before, so some meet a prompt that is being computed."""


SHAPE = {"intermediate_size": 1024}
"""Makes the model large enough for a relay."""


class Nodes(Mixed):
    """A fleet of one worker, whose engine has two nodes."""

    parts: dict[str, Any]
    head: Spawned
    node: Spawned

    def base(self, seed: int) -> Path:
        return make_witness_model(self.plane.tmp / "weights" / f"witness{seed}", seed, "bfloat16", **SHAPE)

    def tiny(self, seed: int) -> Path:
        return make_tiny_model(self.plane.tmp / "weights" / f"tiny{seed}", seed, "bfloat16", **SHAPE)

    def start(self) -> None:
        """Starts both nodes, with the same instance id each time."""
        (engine,) = self.ids
        address = f"127.0.0.1:{free_port()}"
        self.node, self.head = (
            self.plane.spawn(
                ready=False,
                instance_id=self.ids[engine],
                engine=engine,
                model=self.first,
                nodes={"count": 2, "rank": rank, "address": address, "wait_s": START_S},
                weight_urls=[self.plane.weight_server.url],
                **ARGUMENTS[engine],
                **self.parts,
            )
            for rank in (1, 0)
        )
        for one in (self.head, self.node):
            one.wait_ready(START_S)

    def rank_of(self, one: Spawned) -> psutil.Process:
        (engine,) = self.ids
        family = psutil.Process(one.process.pid).children(recursive=True)
        (found,) = [child for child in family if child.name().startswith(RANK[engine])]
        return found

    def family(self) -> list[psutil.Process]:
        heads = [psutil.Process(one.process.pid) for one in (self.head, self.node)]
        return [*heads, *(child for one in heads for child in one.children(recursive=True))]

    async def end_within(self, bound_s: float, *ones: Spawned) -> list[int]:
        async with asyncio.timeout(bound_s):
            return [await asyncio.to_thread(one.process.wait) for one in ones]


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=pytest.mark.engines(PARTS[name][0])) for name in PARTS]
)
def mixed(make_plane: Callable[[], Plane], request: pytest.FixtureRequest) -> Iterator[Nodes]:
    with bound_cores() as patched:
        (engine, parts), plane = PARTS[request.param], make_plane()
        first = make_witness_model(plane.tmp / "weights" / "witness1", 1, "bfloat16", **SHAPE)
        patched.setenv("VLLM_HOST_IP", "127.0.0.1")
        patched.setenv("TMPDIR", str(plane.tmp))
        found = Nodes(plane, first, {engine: "0123456789abcdef"})
        found.parts = parts
        found.start()
        yield found
    plane.kill_all()


async def test_both_nodes_are_one_worker(mixed: Nodes, client: RlClient, http: httpx.AsyncClient) -> None:
    (row,) = (await client.run("workers"))["workers"]
    assert [(node["node_rank"], node["pid"], node["ranks"]) for node in row["nodes"]] == [
        (0, mixed.head.process.pid, [0]),
        (1, mixed.node.process.pid, [1]),
    ]
    (state,) = (await client.run("describe"))["workers"]
    assert (state["world_size"], state["tp_size"] * state["pp_size"]) == (2, 2)
    await proven(http, mixed, "initial", mixed.first)


async def test_an_update_reaches_both_nodes_or_neither(
    mixed: Nodes, client: RlClient, http: httpx.AsyncClient
) -> None:
    await client.run("update_weights", update_of(mixed.tiny(1), "one"))
    await proven(http, mixed, "one", mixed.tiny(1))
    with pytest.raises(InvalidWeights):
        await client.run("update_weights", {**update_of(mixed.tiny(2)), "digest": "blake3:" + "0" * 64})
    await proven(http, mixed, "one", mixed.tiny(1))
    await client.run("update_weights", update_of(mixed.tiny(2), "two", staging="none"))
    await proven(http, mixed, "two", mixed.tiny(2))
    (row,) = (await client.run("check_weights", {"action": "checksum"}))["workers"]
    assert len({rank["checksum"] for rank in row["ranks"]}) == 2


@pytest.mark.parametrize("backend", each_transport.BACKENDS)
async def test_each_transport_brings_weights_and_adapters(
    mixed: Nodes, client: RlClient, http: httpx.AsyncClient, backend: str
) -> None:
    await each_transport.bring(mixed, client, http, backend)


@pytest.mark.parametrize("kv", ["keep", "recompute"])
async def test_streams_continue_over_updates(mixed: Nodes, client: RlClient, kv: str) -> None:
    """Each token is that of the weights which its span names. In a pipeline, steps of several batches are under way at
    each moment."""
    await mixed.witnessed(client)
    ((engine, instance_id),) = mixed.ids.items()
    prompts = [[*PROMPT, first] for first in range(STREAMS)]
    asked: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
    streams = [Stream(client, instance_id, prompt, ENDLESS[engine] // STREAMS, **asked) for prompt in prompts]
    seeds = [1]
    for one in streams:
        await one.until(tokens=2)
    for seed in (2, 1, 2, 3):
        await client.run("update_weights", update_of(mixed.base(seed), f"base {seed}", kv=kv))
        seeds.append(seed)
        for one in streams:
            await one.until(spans=len(seeds), tokens=one.spans[-1]["start"] + 2 if one.spans else 2)
    await client.run("abort_requests", {})
    for one, prompt in zip(streams, prompts, strict=True):
        await one.end()
        assert one.finish_reason == "abort"
        assert [seed_of(span["version"]) for span in one.spans] == seeds
        last = prompt[-1]
        for span, seed in zip(one.spans, seeds, strict=True):
            part = one.tokens[span["start"] : span["end"]]
            assert part == witnessed(seed, len(part), last)
            last = part[-1]


async def test_a_pause_stops_a_pipeline_that_computes_a_prompt(mixed: Nodes, client: RlClient) -> None:
    """SGLang takes a pipeline for idle whose only request has just had its first step."""
    if "pp_size" not in mixed.parts:
        pytest.skip("only a pipeline has steps of several batches")
    await mixed.witnessed(client)
    ((_, instance_id),) = mixed.ids.items()
    for number in range(PAUSES):
        prompt = [*PROMPT * LONG_PROMPT, number, PROMPT[-1]]  # no other request's prefix
        stream = Stream(client, instance_id, prompt, 4, temperature=0.0, ignore_eos=True)
        for _ in range(number):
            await client.call(instance_id, "state")
        await client.run("pause", {"mode": "keep"})
        await standing(mixed, client, [stream])
        await client.run("resume", {})
        assert (await stream.end()).tokens == witnessed(1, 4)


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
async def test_no_token_comes_while_it_is_paused(mixed: Nodes, client: RlClient, mode: str) -> None:
    await mixed.witnessed(client)
    ((engine, instance_id),) = mixed.ids.items()
    asked: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
    count = LONG if mode == "wait" else ENDLESS[engine] // STREAMS
    streams = [Stream(client, instance_id, [*PROMPT, first], count, **asked) for first in range(STREAMS)]
    for one in streams:
        await one.until(tokens=2)
    await client.run("pause", {"mode": mode})
    if mode == "keep":
        had = await standing(mixed, client, streams)
        assert all(tokens < count for tokens in had)
        await client.run("resume", {})
        for one, tokens in zip(streams, had, strict=True):
            await one.until(tokens=tokens + 20)
        await client.run("abort_requests", {})
    for one, first in zip(streams, range(STREAMS), strict=True):
        await one.end()
        assert one.finish_reason == ("length" if mode == "wait" else "abort")
        assert one.tokens == witnessed(1, len(one.tokens), first)
    if mode != "keep":
        await client.run("resume", {})
    await mixed.plane.until(partial(_serves, client), HEAL_S)


@pytest.mark.engines("nixl")
async def test_the_second_node_fetches_from_the_first(
    mixed: Nodes, client: RlClient, http: httpx.AsyncClient
) -> None:
    plane, (instance_id,) = mixed.plane, mixed.ids.values()
    where: dict[str, Any] = {"namespace": plane.namespace, "component": plane.component, "workers": 1}
    publisher = WeightPublisher(mixed.base(2), plane.url, transport="nixl", encoding="full", **where)
    try:
        await publisher.publish_async("relayed")
    finally:
        await asyncio.to_thread(publisher.close)
    await proven(http, mixed, "relayed", mixed.base(2))
    last = (await client.run("updates"))["updates"][0]
    taken = {use["source"]: use["bytes"] for use in last["sources"][instance_id]}
    assert taken.keys() == {"trainer", instance_id}
    assert sum(taken.values()) >= 2 * last["model_bytes"]


async def test_weights_and_adapters_come_by_url(mixed: Nodes, client: RlClient, http: httpx.AsyncClient) -> None:
    await each_transport.bring_by_url(mixed, client, http)


async def test_updates_for_one_sglang_server_reach_both_nodes(
    mixed: Nodes, client: RlClient, http: httpx.AsyncClient
) -> None:
    if "vllm" not in mixed.ids:
        pytest.skip("the host agents join a trainer's own group in the same way for both engines")
    await each_transport.bring_call_by_call(mixed, client, http)


@pytest.mark.parametrize("what", ["rank", "worker"])
async def test_a_node_that_hangs_closes_the_worker_until_it_answers(
    mixed: Nodes, client: RlClient, what: str
) -> None:
    """The worker closes, and names the node. Then it serves again."""
    await mixed.witnessed(client)
    ((engine, instance_id),) = mixed.ids.items()
    victim = mixed.rank_of(mixed.node) if what == "rank" else psutil.Process(mixed.node.process.pid)
    stream = Stream(client, instance_id, PROMPT, ENDLESS[engine], temperature=0.0, ignore_eos=True)
    await stream.until(tokens=2)

    async def closed(named: bool) -> bool:
        state = (await client.call(instance_id, "state")).body
        reasons = " ".join(state["admission"]["reasons"])
        return "node rank 1" in reasons if named else reasons == ""

    victim.suspend()
    try:
        await mixed.plane.until(partial(closed, True), LOST_S)
    finally:
        victim.resume()
    await mixed.plane.until(partial(closed, False), LOST_S)
    await stream.until(tokens=len(stream.tokens) + 20)
    stream.stop()
    assert stream.tokens == witnessed(1, len(stream.tokens))


@pytest.mark.parametrize("what", ["rank", "worker"])
async def test_a_killed_node_ends_the_worker_and_both_nodes_start_again(
    mixed: Nodes, client: RlClient, http: httpx.AsyncClient, what: str
) -> None:
    """The worker ends, names the node, and leaves nothing. Both nodes start again and serve what is committed."""
    await mixed.witnessed(client)
    family = mixed.family()
    victim = mixed.rank_of(mixed.node).pid if what == "rank" else mixed.node.process.pid
    os.kill(victim, signal.SIGKILL)
    codes = await mixed.end_within(LOST_S + END_S, mixed.head, mixed.node)
    assert codes == [ENGINE_DEAD, ENGINE_DEAD if what == "rank" else -signal.SIGKILL]
    log = mixed.head.log.read_text(errors="replace")
    assert f"the engine is dead: node rank 1 ({platform.node()}, pid {mixed.node.process.pid})" in log
    await mixed.plane.until(lambda: not any(map(lives, family)))
    await asyncio.to_thread(mixed.start)
    await proven(http, mixed, "base 1", mixed.first)


async def test_a_killed_head_ends_its_node_and_leaves_no_process(
    mixed: Nodes, client: RlClient, http: httpx.AsyncClient
) -> None:
    family = mixed.family()
    shared = mapped_files(one.pid for one in family)
    mixed.head.signal(signal.SIGKILL)
    assert await mixed.end_within(LOST_S + END_S, mixed.node) == [ENGINE_DEAD]
    assert "node rank 0" in mixed.node.log.read_text(errors="replace")
    await mixed.plane.until(lambda: not any(map(lives, family)))
    assert shared
    assert not names_of(shared)
    await asyncio.to_thread(mixed.start)
    await mixed.plane.until(partial(_serves, client), HEAL_S)


async def _serves(client: RlClient) -> bool:
    rows = (await client.run("state"))["workers"]
    return [row.get("ready") for row in rows] == [True]


async def test_sigterm_to_the_head_ends_both_nodes(mixed: Nodes) -> None:
    family = mixed.family()
    mixed.head.signal(signal.SIGTERM)
    assert await mixed.end_within(LOST_S + END_S, mixed.head, mixed.node) == [OK, OK]
    await mixed.plane.until(lambda: not any(map(lives, family)))
