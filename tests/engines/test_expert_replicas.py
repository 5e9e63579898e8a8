"""Replicas of a mixture of experts in one vLLM worker. They compute the experts together, so all of them step at once:
also when one has no request, and around every pause, score and swap. A CPU does this over a stand-in (see
`tests/support/experts_over_gloo.py`)."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator

import httpx
import psutil
import pytest

from rl_plane.client import RlClient
from rl_plane.errors import PlaneError
from tests.conftest import Plane, lives
from tests.support import experts_over_gloo, moe_scenarios
from tests.support.faults import Stream
from tests.support.fleet_updates import update_of
from tests.support.moe import MOE_TOLERANCE, QWEN_CONTEXT, greedy_gap
from tests.support.moe_fleet import PROMPT, MoeFleet, canary_of, client, http, moe_fleet, proven
from worker.engines.common.shared_names import mapped_files, names_of
from worker.exit_codes import ENGINE_DEAD

__all__ = ["client", "http"]

pytestmark = [pytest.mark.engines("vllm"), pytest.mark.alone, pytest.mark.timeout(600)]

REPLICAS = 2
ENDLESS = QWEN_CONTEXT - len(PROMPT)
"""The most tokens that a stream can make. Each test waits for what it needs, and ends its streams itself."""
PLACES = 4
"""Requests that run at once on a replica."""
END_S = 60.0


@pytest.fixture(
    scope="module",
    params=[pytest.param("false", id="tensor-parallel"), pytest.param("true", id="expert-parallel")],
)
def fleet(make_plane: Callable[[], Plane], request: pytest.FixtureRequest) -> Iterator[MoeFleet]:
    """`tensor-parallel`: each replica has a part of every expert."""
    with moe_fleet(
        make_plane(),
        "qwen",
        ("vllm",),
        REPLICAS,
        install=experts_over_gloo.install,
        data_parallel_size=REPLICAS,
        enable_expert_parallel=request.param,
        max_num_seqs=PLACES,
        max_model_len=QWEN_CONTEXT,
    ) as found:
        yield found


# The first test needs a fleet that has just started.
test_every_update_forth_and_back_is_exact = moe_scenarios.every_update_forth_and_back_is_exact
test_adapters_of_the_attention_are_exact = moe_scenarios.adapters_of_the_attention_are_exact


def stream_of(fleet: MoeFleet, client: RlClient) -> Stream:
    return Stream(client, fleet.ids["vllm"], PROMPT, ENDLESS, temperature=0.0, ignore_eos=True)


@pytest.mark.parametrize(
    ("busy", "kv"), [(1, "recompute"), (1, "keep"), (3, "recompute"), (3, "keep"), (7, "keep")]
)
async def test_requests_continue_over_an_update_of_all_replicas(
    fleet: MoeFleet, client: RlClient, http: httpx.AsyncClient, busy: int, kv: str
) -> None:
    """All replicas pause, swap, score the canary's 3 sequences and continue. 1: one replica is idle. 3: the replicas
    have 2 and 3 places for the sequences, and so make another number of steps. 7: one replica has no place."""
    one, two = fleet.base(1), fleet.base(2)
    await client.run("update_weights", update_of(one, "one"))
    streams = [stream_of(fleet, client) for _ in range(busy)]
    for stream in streams:
        await stream.until(tokens=5)
    reply = await client.run("update_weights", update_of(two, "two", kv=kv, canary=canary_of(two)))
    assert reply["excluded"] == []
    for stream in streams:
        before = len(stream.tokens)
        await stream.until(tokens=before + 20, spans=2)
        first, second = (span["version"] for span in stream.spans)
        assert (first, second) == ("one", "two")
        turn = stream.spans[1]["start"]
        assert greedy_gap(one, PROMPT, stream.tokens[:turn]) < 2 * MOE_TOLERANCE
        if kv == "recompute":
            assert greedy_gap(two, PROMPT + stream.tokens[:turn], stream.tokens[turn:]) < 2 * MOE_TOLERANCE
    await proven(http, fleet, "two", two)
    assert await client.run("abort_requests", {})
    for stream in streams:
        assert (await stream.end()).finish_reason == "abort"


async def test_a_drain_with_an_idle_replica_waits_for_the_busy_replica(
    fleet: MoeFleet, client: RlClient, http: httpx.AsyncClient
) -> None:
    await client.run("update_weights", update_of(fleet.base(1), "one"))
    stream = stream_of(fleet, client)
    await stream.until(tokens=5)
    draining = asyncio.create_task(client.run("pause", {"mode": "wait"}))
    await stream.until(tokens=len(stream.tokens) + 20)
    assert not draining.done(), "a request runs"
    late = stream_of(fleet, client)
    stream.stop()
    async with asyncio.timeout(END_S):
        await draining
    assert not late.tokens
    await client.run("resume", {})
    await late.until(tokens=20)
    late.stop()
    await proven(http, fleet, "one", fleet.base(1))


async def test_a_killed_process_takes_all_others_with_it(
    fleet: MoeFleet, client: RlClient, request: pytest.FixtureRequest
) -> None:
    """A rank of one replica, for which the other replica then waits, or the worker. The last test: it ends the
    fleet."""
    worker = fleet.plane.spawned[-1]
    family = psutil.Process(worker.process.pid).children(recursive=True)
    shared = mapped_files(one.pid for one in family)
    stream = stream_of(fleet, client)
    await stream.until(tokens=5)
    if request.node.callspec.params["fleet"] == "true":
        os.kill(worker.process.pid, signal.SIGKILL)
        stream.stop()
    else:
        (rank,) = [one for one in family if one.name().startswith("VLLM::Worker_DP1")]
        os.kill(rank.pid, signal.SIGKILL)
        with pytest.raises(PlaneError):
            await stream.end()
        assert await asyncio.to_thread(worker.process.wait, END_S) == ENGINE_DEAD
        assert " of replica 1 has ended" in worker.log.read_text()
    await fleet.plane.until(lambda: not any(map(lives, family)))
    assert shared
    assert not names_of(shared)
