"""Reward and embedding models of the `hf` engine in a real fleet, held against plain transformers."""

from __future__ import annotations

import asyncio
import base64
import math
from array import array
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from rl_plane.protocol.pooling import unpacked
from tests.support.fleet_updates import all_serve, update_of
from tests.support.frontend_process import error_of, frontend, post
from tests.support.hf_fleet import HEAL_S, START_S
from tests.support.pooling_models import INPUTS, embedding_of, logits_of, make_classifier
from worker.engines.common.tokenizing import load_tokenizer
from worker.testing.tiny_model import make_tiny_model

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Plane

pytestmark = pytest.mark.slow


def near(wanted: Any) -> Any:
    return pytest.approx(wanted, abs=1e-5, rel=1e-4)


async def spawn(plane: Plane, model: Path, task: str, count: int = 1, **options: Any) -> list[str]:
    started = [plane.spawn(ready=False, engine="hf", model=model, task=task, **options) for _ in range(count)]
    return [(await asyncio.to_thread(one.wait_ready, START_S)).instance_id for one in started]


async def logits(http: httpx.AsyncClient, inputs: list[list[int]], **more: Any) -> dict[str, Any]:
    reply: dict[str, Any] = await post(http, "/classify", input=inputs, use_activation=False, **more)
    return reply


@pytest.mark.timeout(300)
async def test_each_reply_of_a_reward_model_is_of_the_version_that_it_names(plane: Plane) -> None:
    """Every reply is of exactly one version, which it names, whatever the fleet does meanwhile."""
    models = [make_classifier(plane.tmp / "weights" / f"reward{seed}", seed) for seed in range(3)]
    wanted = [[logits_of(model, prompt) for prompt in INPUTS] for model in models]
    client = await plane.client()
    ids = await spawn(plane, models[0], "classify", 2)
    async with frontend(plane, admission_wait_s=HEAL_S) as http:
        reply = await logits(http, INPUTS)
        assert [row["probs"] for row in reply["data"]] == [near(one) for one in wanted[0]]
        assert reply["usage"]["prompt_tokens"] == sum(map(len, INPUTS))
        assert reply["nvext"]["weight_version"]["sequence"] == 0
        for mode in ("keep", "abort", "wait"):
            await client.run("pause", {"mode": mode})
            waiting = asyncio.create_task(logits(http, INPUTS[:1]))
            await client.run("resume", {})
            assert (await waiting)["data"][0]["probs"] == near(wanted[0][0])
        seen: dict[int, int] = {}
        stop = asyncio.Event()

        async def ask_on() -> None:
            while not stop.is_set():
                got = await logits(http, INPUTS * 2)
                version = got["nvext"]["weight_version"]
                of = version["sequence"] % 3
                assert [row["probs"] for row in got["data"]] == [near(one) for one in wanted[of] * 2]
                seen[version["sequence"]] = seen.get(version["sequence"], 0) + 1

        asking = [asyncio.create_task(ask_on()) for _ in range(2)]
        digests = []
        for number in range(1, 4):
            barrier = "rolling" if number == 2 else "strict"
            staging = "none" if number == 3 else "host"
            body = update_of(models[number % 3], f"v{number}", barrier=barrier, staging=staging)
            digests.append((await client.run("update_weights", body))["version"]["digest"])
            await plane.until(lambda number=number: seen.get(number), HEAL_S)
        # A worker dies in the middle: its inputs are computed by the other one.
        doomed = next(one for one in plane.spawned if one.instance_id == ids[0])
        doomed.kill()
        before = dict(seen)
        await plane.until(lambda: seen[3] > before[3] + 2 or any(task.done() for task in asking), HEAL_S)
        (again,) = await spawn(plane, models[0], "classify", instance_id=ids[0])
        await plane.until(lambda: all_serve(client, "v3"), HEAL_S)
        reply = await logits(http, INPUTS, nvext={"instance_id": again})
        assert [row["probs"] for row in reply["data"]] == [near(one) for one in wanted[0]]
        assert reply["nvext"]["weight_version"]["digest"] == digests[2]
        stop.set()
        await asyncio.gather(*asking)
        # The other forms of a reward.
        text = await post(http, "/classify", input="good")
        (probability,) = text["data"][0]["probs"]
        raw = (await post(http, "/classify", text="good"))["embedding"]
        assert probability == near(1 / (1 + math.exp(-raw[0])))
        assert (await post(http, "/v1/embeddings", input="good"))["data"][0]["embedding"] == near(raw)
        many = await post(http, "/classify", input_ids=INPUTS)
        assert [row["embedding"] for row in many] == [near(one) for one in wanted[0]]
        assert {row["meta_info"]["weight_version"] for row in many} == {"v3"}
        score = await post(http, "/score", text_1="go", text_2=["od", "od!"], use_activation=False)
        pair = load_tokenizer(models[0]).encode("go", "od")
        assert score["data"][0]["score"] == near(logits_of(models[0], pair)[0])
        talk = [{"role": "user", "content": "hi"}]
        whole = "<|im_start|>user\nhi<|im_end|>\n"
        told = [(await post(http, "/classify", **one))["data"] for one in ({"messages": talk}, {"input": whole})]
        assert told[0] == told[1]
        # Wrong kinds.
        refused = error_of(await http.post("/v1/completions", json={"prompt": "hi"}), 501)
        assert (refused["field"], "--task generate" in refused["fix"]) == ("model", True)
        error_of(await http.post("/classify", json={"input": "hi", "model": "another"}), 404)
        assert error_of(await http.post("/classify", json={"input": [[5], [600]]}), 400)["field"] == "input.1"
        assert error_of(await http.post("/classify", json={"input": [5] * 600}), 400)["field"] == "input"
        described = (await client.call(again, "describe", {})).body
        assert (described["task"], described["dimension"]) == ("classify", 1)


@pytest.mark.timeout(300)
async def test_a_classifier_names_its_labels_and_an_embedder_gives_vectors(plane: Plane) -> None:
    path = plane.tmp / "weights" / "labels"
    labels = make_classifier(path, 1, 3, id2label={0: "bad", 1: "fair", 2: "good"}, label2id=None)
    base = make_tiny_model(plane.tmp / "weights" / "base", 1)
    other = make_tiny_model(plane.tmp / "weights" / "other", 2)
    await spawn(plane, labels, "classify")
    async with frontend(plane, admission_wait_s=HEAL_S) as http:
        reply = await post(http, "/v1/classify", input=INPUTS)
        for row, prompt in zip(reply["data"], INPUTS, strict=True):
            powers = [math.exp(one) for one in logits_of(labels, prompt)]
            assert row["probs"] == near([one / sum(powers) for one in powers])
            assert row["label"] == ("bad", "fair", "good")[powers.index(max(powers))]
            assert row["num_classes"] == 3
        error_of(await http.post("/score", json={"text_1": "a", "text_2": "b"}), 501)
        error_of(await http.post("/v1/embeddings", json={"input": "a", "dimensions": 2}), 400)
    for one in plane.spawned:
        one.kill()
    plane.component = "embedders"
    client = await plane.client()
    await spawn(plane, base, "embed")
    async with frontend(plane, admission_wait_s=HEAL_S) as http:
        for model, label in ((base, None), (other, "other")):
            if label is not None:
                await client.run("update_weights", update_of(model, label))
            wanted = [embedding_of(model, prompt) for prompt in INPUTS]
            reply = await post(http, "/v1/embeddings", input=INPUTS)
            assert [row["embedding"] for row in reply["data"]] == [near(one) for one in wanted]
            if label is not None:
                assert reply["nvext"]["weight_version"]["label"] == label
        packed = await post(http, "/v1/embeddings", input=INPUTS, encoding_format="base64")
        numbers = [unpacked(base64.b64decode(row["embedding"])) for row in packed["data"]]
        assert numbers == [near(one) for one in wanted]
        assert array("f", base64.b64decode(packed["data"][0]["embedding"])).tolist() == numbers[0]
        one = await post(http, "/encode", input_ids=INPUTS[0])
        assert one["embedding"] == near(wanted[0])
        scored = await post(http, "/score", queries="hello", documents=["hello", "world"])
        assert scored["data"][0]["score"] == near(1.0)
        assert scored["data"][1]["score"] < 1.0
        assert error_of(await http.post("/classify", json={"input": "hi"}), 501)["field"] == "model"
