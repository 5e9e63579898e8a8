"""Mixtures of experts on SGLang: after every update the engine computes what transformers does, and the numeric canary
finds an engine that does not, SGLang or hf."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import pytest_asyncio

from rl_plane.client import RlClient
from rl_plane.errors import CanaryFailed, NotAdmitted
from rl_plane.protocol.canary import ACROSS_KINDS
from tests.support import moe_scenarios, weight_faults
from tests.support.cores import bound_cores
from tests.support.faults import StatusLog, Stream
from tests.support.fleet_updates import all_serve, update_of
from tests.support.frontend_process import frontend
from tests.support.moe import MOE_TOLERANCE, greedy_gap
from tests.support.moe_fleet import HEAL_S, PROMPT, START_S, MoeFleet, canary_of, client, proven
from worker.reconcile.numerics import NOT_SCORED

if TYPE_CHECKING:
    from tests.conftest import Plane

__all__ = ["client"]

pytestmark = [pytest.mark.engines("sglang"), pytest.mark.timeout(600)]

ENDLESS = 1500
"""More tokens than a stream makes in a test."""


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("qwen", 1, ("sglang", "hf")), id="qwen-tp1"),
        pytest.param(("glm", 2, ("sglang",)), id="glm-tp2"),
        pytest.param(("glm", 1, ("sglang", "hf")), id="glm-tp1"),
        pytest.param(("qwen", 2, ("sglang",)), id="qwen-tp2"),
    ],
)
def fleet(make_plane: Callable[[], Plane], request: pytest.FixtureRequest) -> Iterator[MoeFleet]:
    model, tp, engines = request.param
    arguments: dict[str, dict[str, Any]] = {"sglang": {"max_lora_rank": 8, "tp_size": tp}, "hf": {}}
    with bound_cores(tp) as patched:
        plane = make_plane()
        found = MoeFleet(plane, model, {})
        weight_faults.install(plane.tmp / "site")
        patched.setenv("PYTHONPATH", str(plane.tmp / "site"), prepend=os.pathsep)
        started = {
            engine: plane.spawn(ready=False, engine=engine, model=found.base(1), **arguments[engine])
            for engine in engines
        }
        found.ids = {engine: one.wait_ready(START_S).instance_id for engine, one in started.items()}
        yield found
    plane.kill_all()


@pytest_asyncio.fixture
async def http(fleet: MoeFleet) -> AsyncIterator[httpx.AsyncClient]:
    async with frontend(fleet.plane, admission_wait_s=HEAL_S) as http:
        yield http


# The first test needs a fleet that has just started.
test_every_update_forth_and_back_is_exact = moe_scenarios.every_update_forth_and_back_is_exact
test_a_cast_rounds_nothing_that_an_engine_keeps = moe_scenarios.a_cast_rounds_nothing_that_an_engine_keeps
test_a_published_version_is_exact = moe_scenarios.a_published_version_is_exact
test_adapters_of_the_attention_are_exact = moe_scenarios.adapters_of_the_attention_are_exact

FAULTS = [
    pytest.param("sglang", "w2_weight", -1.0, id="sglang-flipped"),
    pytest.param("sglang", "input_layernorm", 1.5, id="sglang-scaled"),
    pytest.param("hf", "o_proj", -1.0, id="hf-flipped"),
    pytest.param("hf", "input_layernorm", 1.5, id="hf-scaled"),
]
"""Engine, tensor, factor: after the next swap the engine's last rank has wrong weights."""


def fault_of(fleet: MoeFleet, engine: str, tensor: str, factor: float) -> dict[str, Any]:
    """The call that arms it. With two ranks only the last one computes with wrong weights."""
    if engine not in fleet.ids:
        pytest.skip("this fleet has no such worker")
    rank = 0 if len(fleet.ids) > 1 else 1
    fault = weight_faults.fault(engine, tensor, factor, rank=rank)
    return {**fault, "workers": [fleet.ids[engine]]}


async def nothing_wrong_came(fleet: MoeFleet, stream: Stream) -> None:
    """The stream has continued elsewhere, and has tokens of the first version alone."""
    with pytest.raises(NotAdmitted):
        await stream.end()
    assert [span["version"] for span in stream.spans] == ["one"]
    assert greedy_gap(fleet.base(1), PROMPT, stream.tokens) < 2 * MOE_TOLERANCE


@pytest.mark.parametrize(("engine", "tensor", "factor"), FAULTS)
async def test_wrong_weights_are_never_served(
    fleet: MoeFleet, client: RlClient, http: httpx.AsyncClient, engine: str, tensor: str, factor: float
) -> None:
    """If another worker gives the trainer's values, the wrong one is excluded and heals. If no worker does, the fleet
    returns to the version before."""
    one, two = fleet.base(1), fleet.base(2)
    await client.run("update_weights", update_of(one, "one"))
    await client.run("init_transport", fault_of(fleet, engine, tensor, factor))
    faulty, statuses = fleet.ids[engine], await StatusLog.follow(client)
    stream = Stream(client, faulty, PROMPT, ENDLESS, temperature=0.0, ignore_eos=True)
    await stream.until(tokens=2)
    body = update_of(two, "two", canary=canary_of(two))
    if len(fleet.ids) > 1:
        reply = await client.run("update_weights", body)
        assert reply["excluded"] == [faulty]
        (error,) = [row["error"] for row in reply["workers"] if row["instance_id"] == faulty]
        canary, label, base = error["canary"], "two", two
        assert error["code"] == "numerics"
    else:
        with pytest.raises(CanaryFailed) as caught:
            await client.run("update_weights", body)
        canary, label, base = caught.value.facts["canary"], "one", one
    assert canary["against"] == "trainer"
    assert canary["difference"] > ACROSS_KINDS
    await nothing_wrong_came(fleet, stream)
    reasons = [reason for event in statuses.of(faulty) for reason in event["admission"]["reasons"]]
    assert any(reason.startswith("numerics: ") and reason != f"numerics: {NOT_SCORED}" for reason in reasons)
    await fleet.plane.until(lambda: all_serve(client, label), HEAL_S)
    await proven(http, fleet, label, base)
    await client.run("destroy_transport", {"backend": weight_faults.BACKEND, "workers": [faulty]})


async def test_a_version_that_every_engine_computes_wrongly_goes_back(
    fleet: MoeFleet, client: RlClient, http: httpx.AsyncClient
) -> None:
    if len(fleet.ids) == 1:
        pytest.skip("a fleet of one worker is tested above")
    one, two = fleet.base(1), fleet.base(2)
    await client.run("update_weights", update_of(one, "one"))
    for engine in fleet.ids:
        await client.run("init_transport", fault_of(fleet, engine, "input_layernorm", 1.5))
    with pytest.raises(CanaryFailed) as caught:
        await client.run("update_weights", update_of(two, "two", canary=canary_of(two)))
    told = caught.value.facts["canary"]
    assert (told["action"], told["failed"], told["against"]) == ("rollback", 2, "trainer")
    await fleet.plane.until(lambda: all_serve(client, "one"), HEAL_S)
    await proven(http, fleet, "one", one)
    await client.run("destroy_transport", {"backend": weight_faults.BACKEND})


@pytest.mark.parametrize("engine", ["sglang", "hf"])
async def test_differing_engines_return_to_the_version_before_without_a_reference(
    fleet: MoeFleet, client: RlClient, http: httpx.AsyncClient, engine: str
) -> None:
    """Without the trainer's values, and of a version that was never served."""
    if len(fleet.ids) == 1:
        pytest.skip("this fleet has one worker")
    one, unseen = fleet.base(1), fleet.base(3 if engine == "hf" else 4)
    await client.run("update_weights", update_of(one, "one"))
    await client.run("init_transport", fault_of(fleet, engine, "input_layernorm", 1.5))
    stream = Stream(client, fleet.ids[engine], PROMPT, ENDLESS, temperature=0.0, ignore_eos=True)
    await stream.until(tokens=2)
    with pytest.raises(CanaryFailed, match="engine kinds"):
        await client.run("update_weights", update_of(unseen, "unseen"))
    await nothing_wrong_came(fleet, stream)
    await fleet.plane.until(lambda: all_serve(client, "one"), HEAL_S)
    await proven(http, fleet, "one", one)
    reply = await client.run("update_weights", update_of(unseen, "unseen"))
    assert (reply["excluded"], reply["canary"]["against"]) == ([], "fleet")
    await proven(http, fleet, "unseen", unseen)
    await client.run("destroy_transport", {"backend": weight_faults.BACKEND, "workers": [fleet.ids[engine]]})
