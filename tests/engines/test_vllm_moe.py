"""Mixtures of experts on vLLM: after every update the engine computes what transformers does, and the numeric canary
finds an engine that does not."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import pytest_asyncio

pytest.importorskip("torch")
pytest.importorskip("peft")

from safetensors.torch import load_file, save_file

from rl_plane.client import RlClient
from rl_plane.errors import CanaryFailed, InvalidWeights, NotAdmitted
from rl_plane.publish import WeightPublisher
from tests.fleet.test_frontend_generation import ask, frontend
from tests.fleet.test_updates import all_serve, update_of
from tests.support import weight_faults
from tests.support.each_transport import Shelf
from tests.support.faults import Stream, Told
from tests.support.moe import MOE_TOLERANCE, float32_logprobs, greedy_gap, make_glm_moe, make_qwen_moe
from worker.reconcile.numerics import NOT_SCORED
from worker.testing.tiny_adapter import make_tiny_adapter

if TYPE_CHECKING:
    from tests.conftest import Plane

pytestmark = [pytest.mark.engines("vllm"), pytest.mark.alone, pytest.mark.timeout(600)]

START_S = 240.0
HEAL_S = 90.0
PROMPT = list(range(3, 11))
TOKENS = 12
SEQUENCES = [list(range(first, first + 32)) for first in (30, 130, 230)]
"""Of the canary. They reach all experts."""
ENDLESS = 1500
"""More tokens than a stream makes in a test."""
ATTENTION = ("q_proj", "v_proj", "o_proj")
ADAPTER_STD = 0.05
"""The standard deviation of an adapter's weights. Their effect is more than ten times the tolerance."""
MAKERS = {"qwen": make_qwen_moe, "glm": make_glm_moe}


@dataclass
class MoeFleet:
    plane: Plane
    model: str
    ids: dict[str, str]
    """Engine → instance id."""

    def base(self, seed: int, dtype: str = "bfloat16") -> Path:
        path = self.plane.tmp / "weights" / f"{self.model}{seed}-{dtype}"
        return path if path.exists() else MAKERS[self.model](path, seed, dtype)

    def stepped(self) -> Path:
        """The second version with the routers of the first one, and with one of its experts."""
        path = self.plane.tmp / "weights" / "stepped"
        if not path.exists():
            shutil.copytree(self.base(2), path)
            changed = {
                name: tensor
                for name, tensor in load_file(self.base(1) / "model.safetensors").items()
                if ".mlp.gate." in name or ".experts.1." in name
            }
            tensors = load_file(path / "model.safetensors") | changed
            save_file(tensors, path / "model.safetensors", {"format": "pt"})
        return path

    def adapter(self, seed: int) -> Path:
        path = self.plane.tmp / "weights" / f"adapter{seed}"
        return make_tiny_adapter(self.base(1), path, seed, targets=ATTENTION, std=ADAPTER_STD)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("qwen", 1, ("vllm", "hf")), id="qwen-tp1"),
        pytest.param(("glm", 2, ("vllm",)), id="glm-tp2"),
        pytest.param(("glm", 1, ("vllm", "hf")), id="glm-tp1"),
        pytest.param(("qwen", 2, ("vllm",)), id="qwen-tp2"),
    ],
)
def fleet(make_plane: Callable[[], Plane], request: pytest.FixtureRequest) -> Iterator[MoeFleet]:
    model, tp, engines = request.param
    if len(os.sched_getaffinity(0)) < tp:
        pytest.skip("two ranks need two cores")
    plane = make_plane()
    found = MoeFleet(plane, model, {})
    arguments: dict[str, dict[str, Any]] = {
        "vllm": {"max_lora_rank": 8, "max_model_len": 2048, "tensor_parallel_size": tp},
        "hf": {},
    }
    with pytest.MonkeyPatch.context() as patched:
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
async def client(fleet: MoeFleet) -> AsyncIterator[RlClient]:
    client = await RlClient.connect(fleet.plane.url, fleet.plane.namespace, fleet.plane.component)
    yield client
    await client.close()


@pytest_asyncio.fixture
async def http(fleet: MoeFleet) -> AsyncIterator[httpx.AsyncClient]:
    async with frontend(fleet.plane, admission_wait_s=HEAL_S) as http:
        yield http


async def proven(
    http: httpx.AsyncClient, fleet: MoeFleet, label: str, base: Path, adapter: tuple[str, Path] | None = None
) -> None:
    """The logprobs of every engine's tokens, and of its prompt, are those of transformers in float32."""
    name, path = adapter if adapter is not None else (None, None)
    for engine, instance_id in fleet.ids.items():
        body: dict[str, Any] = {
            "prompt_token_ids": PROMPT,
            "max_tokens": TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "logprobs": 1,
            "nvext": {"instance_id": instance_id},
        }
        (choice,) = (await ask(http, **body, **({"model": name} if name else {})))["choices"]
        (span,) = choice["weight_versions"]
        assert (span["version"], span["end"]) == (label, TOKENS), engine
        expected = await asyncio.to_thread(float32_logprobs, base, PROMPT + choice["token_ids"], path)
        found = choice["logprobs"]["token_logprobs"]
        assert found == pytest.approx(expected[-TOKENS:], abs=MOE_TOLERANCE), (engine, label)
        if path is not None:
            plain = float32_logprobs(base, PROMPT + choice["token_ids"])[-TOKENS:]
            off = max(abs(one - other) for one, other in zip(expected[-TOKENS:], plain, strict=True))
            assert off > 10 * MOE_TOLERANCE, "the tolerance tells the adapter"


def canary_of(base: Path) -> dict[str, Any]:
    return {"sequences": SEQUENCES, "expected": [float32_logprobs(base, tokens) for tokens in SEQUENCES]}


async def checksums(client: RlClient) -> dict[str, list[str]]:
    """Those of the ranks of each worker."""
    rows = (await client.run("check_weights", {"action": "checksum"}))["workers"]
    return {row["instance_id"]: [rank["checksum"] for rank in row["ranks"]] for row in rows}


async def test_every_update_forth_and_back_is_exact(
    fleet: MoeFleet, client: RlClient, http: httpx.AsyncClient
) -> None:
    """By files and over the served weights; the last version is the directory that the fleet has started from. Every
    byte of it is then as it was at the start."""
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


async def test_a_cast_rounds_nothing_that_an_engine_keeps(
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
async def test_what_a_publisher_sends_is_exact(
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


async def test_adapters_of_the_attention(fleet: MoeFleet, client: RlClient, http: httpx.AsyncClient) -> None:
    one, two = fleet.base(1), fleet.base(2)
    await client.run("update_weights", update_of(one, "one"))
    for seed in (1, 2):
        await client.run("load_lora_adapter", {"lora_name": "style", "lora_path": str(fleet.adapter(seed))})
        await proven(http, fleet, "one", one, ("style", fleet.adapter(seed)))
        await proven(http, fleet, "one", one)
    await client.run("update_weights", update_of(two, "two"))
    await proven(http, fleet, "two", two, ("style", fleet.adapter(2)))
    await client.run("unload_lora_adapter", {"lora_name": "style"})
    await proven(http, fleet, "two", two)


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
    told = await Told.follow(client)
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
    reasons = [reason for event in told.of(faulty) for reason in event["admission"]["reasons"]]
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
