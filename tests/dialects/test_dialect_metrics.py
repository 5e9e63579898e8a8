"""The metrics by which prime-rl and stock dashboards read the load of engines, from a facade for a fleet."""

from __future__ import annotations

from typing import TYPE_CHECKING

import httpx

from tests.support.dialect_facade import PROMPT, facade, fine
from tests.support.metrics_pages import values
from tests.support.prime_rl_metrics import EngineLoadSample, InferenceMetricsCollector
from tests.support.streaming_client import Streaming

if TYPE_CHECKING:
    from tests.conftest import Plane


async def page(http: httpx.AsyncClient) -> dict[str, float]:
    response = await http.get("/metrics")
    assert response.status_code == 200, response.text
    return values(response.text)


async def test_prime_rls_collector_sees_every_engine(plane: Plane) -> None:
    workers = [plane.spawn(token_delay_s=0.01), plane.spawn(token_delay_s=0.01)]
    seen: list[list[EngineLoadSample]] = []
    async with facade(plane) as http:
        assert fine(await http.get("/v1/rl/ready", params={"wait_s": 30}))
        collector = InferenceMetricsCollector([http], on_load=seen.append)
        assert await collector.probe(attempts=1)
        assert [one.engine_id for one in seen[-1]] == [
            f"server0.{instance_id}" for instance_id in sorted(one.instance_id for one in workers)
        ]
        # The fake engine has no KV cache, so the page shows no number of one.
        assert {(one.kv_capacity_tokens, one.kv_usage, one.preemptions_delta) for one in seen[-1]} == {
            (None, 0.0, 0)
        }
        assert {one.max_model_len for one in seen[-1]} == {4096}
        pinned = {"nvext": {"instance_id": workers[0].instance_id}}
        async with Streaming(http, prompt_token_ids=PROMPT, max_tokens=4000, **pinned) as stream:
            await stream.until(lambda stream: len(stream.tokens) >= 5)

            async def runs() -> bool:
                await collector.collect_and_log()
                running = {one.engine_id.partition(".")[2]: one.running for one in seen[-1]}
                return running == {workers[0].instance_id: 1, workers[1].instance_id: 0}

            await plane.until(runs)

        async def counted() -> bool:
            found = await page(http)
            series = f'{{engine="{workers[0].instance_id}",model_name="seed0"}}'
            return (
                found["vllm:prompt_tokens_total" + series] == len(PROMPT)
                and found["vllm:generation_tokens_total" + series] >= 5
                and found["vllm:num_requests_running" + series] == 0
            )

        await plane.until(counted)


async def test_the_names_belong_to_the_dialects(plane: Plane) -> None:
    plane.spawn()
    for dialects, wanted in (((), set()), (("sglang",), {"sglang"}), (("vllm", "prime-rl"), {"vllm"})):
        async with facade(plane, dialects=dialects) as http:
            assert (await http.get("/v1/rl/ready", params={"wait_s": 30})).status_code == 200
            found = {name.partition(":")[0] for name in await page(http) if ":" in name.partition("{")[0]}
            assert found == wanted
