"""Mixtures of experts on vLLM: after every update the engine computes what transformers does, and the numeric canary
finds an engine that does not."""

from __future__ import annotations

import httpx
import pytest

from rl_plane.client import RlClient
from rl_plane.errors import CanaryFailed, NotAdmitted
from tests.support import moe_scenarios, weight_faults
from tests.support.faults import StatusLog, Stream
from tests.support.fleet_updates import all_serve, update_of
from tests.support.moe import MOE_TOLERANCE, greedy_gap
from tests.support.moe_fleet import HEAL_S, PROMPT, TOKENS, MoeFleet, canary_of, client, fleet, http, proven
from worker.reconcile.numerics import NOT_SCORED

__all__ = ["client", "fleet", "http"]

pytestmark = [pytest.mark.engines("vllm"), pytest.mark.timeout(600)]

ENDLESS = 1500
"""More tokens than a stream makes in a test."""


# The first test needs a fleet that has just started.
test_every_update_forth_and_back_is_exact = moe_scenarios.every_update_forth_and_back_is_exact
test_a_cast_rounds_nothing_that_an_engine_keeps = moe_scenarios.a_cast_rounds_nothing_that_an_engine_keeps
test_a_published_version_is_exact = moe_scenarios.a_published_version_is_exact
test_adapters_of_the_attention_are_exact = moe_scenarios.adapters_of_the_attention_are_exact


@pytest.mark.parametrize(("tensor", "factor"), [("w2_weight", -1.0), ("input_layernorm", 1.5)])
async def test_wrong_weights_in_one_rank_are_never_served(
    fleet: MoeFleet, client: RlClient, http: httpx.AsyncClient, tensor: str, factor: float
) -> None:
    """A flipped tensor, and a wrong scale, in the last rank. Where another worker is right, the wrong one is excluded
    and heals. Where no worker is right, the fleet goes back."""
    one, two = fleet.base(1), fleet.base(2)
    await client.run("update_weights", update_of(one, "one"))
    faulty, rank = fleet.ids["vllm"], 0 if len(fleet.ids) > 1 else 1
    fault = weight_faults.fault("vllm", tensor, factor, rank=rank)
    await client.run("init_transport", {**fault, "workers": [faulty]})
    statuses = await StatusLog.follow(client)
    stream = Stream(client, faulty, PROMPT, ENDLESS, temperature=0.0, ignore_eos=True)
    await stream.until(tokens=2)
    body = update_of(two, "two", canary=canary_of(two))
    if len(fleet.ids) > 1:
        reply = await client.run("update_weights", body)
        assert reply["excluded"] == [faulty]
        (error,) = [row["error"] for row in reply["workers"] if row["instance_id"] == faulty]
    else:
        with pytest.raises(CanaryFailed) as caught:
            await client.run("update_weights", body)
        error = {"code": "numerics", "canary": caught.value.facts["canary"]}
    assert error["code"] == "numerics"
    assert error["canary"]["difference"] > 0.05
    with pytest.raises(NotAdmitted):
        await stream.end()
    reasons = [reason for event in statuses.of(faulty) for reason in event["admission"]["reasons"]]
    assert any(reason.startswith("numerics: ") and reason != f"numerics: {NOT_SCORED}" for reason in reasons)
    assert [span["version"] for span in stream.spans] == ["one"]
    assert greedy_gap(one, PROMPT, stream.tokens) < 2 * MOE_TOLERANCE
    label, base = ("two", two) if len(fleet.ids) > 1 else ("one", one)
    await fleet.plane.until(lambda: all_serve(client, label), HEAL_S)
    await proven(http, fleet, label, base)
    await client.run("destroy_transport", {"backend": weight_faults.BACKEND, "workers": [faulty]})


async def test_an_engine_that_is_wrong_after_every_swap_stays_closed(
    fleet: MoeFleet, client: RlClient, http: httpx.AsyncClient
) -> None:
    """It heals once its fault is gone and it is enabled again."""
    if len(fleet.ids) == 1:
        pytest.skip("another worker must be right")
    one, two, faulty = fleet.base(1), fleet.base(2), fleet.ids["vllm"]
    await client.run("update_weights", update_of(one, "one"))
    always = weight_faults.fault("vllm", "w2_weight", -1.0, swaps=1000)
    await client.run("init_transport", {**always, "workers": [faulty]})
    reply = await client.run("update_weights", update_of(two, "two", canary=canary_of(two)))
    assert reply["excluded"] == [faulty]
    with pytest.raises(NotAdmitted):
        await Stream(client, faulty, PROMPT, TOKENS).end()
    never = weight_faults.fault("vllm", "w2_weight", -1.0, swaps=0)
    await client.run("init_transport", {**never, "workers": [faulty]})
    await client.run("enable", {"workers": [faulty]})
    await fleet.plane.until(lambda: all_serve(client, "two"), HEAL_S)
    await proven(http, fleet, "two", two)
