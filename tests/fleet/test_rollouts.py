"""Parked rollouts continue under the next weights, on a fleet of real models."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from rl_plane import Gathered, Rollout, gather_enough

if TYPE_CHECKING:
    from tests.conftest import Plane

STARTED = 6
"""Tokens of each long one when the short ones have ended."""
SHORT, LONG = 4, 600


def keys(rollouts: list[Rollout]) -> list[Any]:
    return [one.key for one in rollouts]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("op", ["pause", "abort_requests"])
async def test_parked_rollouts_continue_under_the_next_weights(plane: Plane, op: str) -> None:
    from tests.support import reference
    from tests.support.fleet_updates import update_of
    from tests.support.frontend_process import frontend
    from tests.support.hf_fleet import START_S, Witnesses, chain

    witnesses = Witnesses(plane)
    client = await plane.client()
    workers = [plane.spawn(ready=False, engine="hf", model=witnesses.first) for _ in range(2)]
    await asyncio.to_thread(lambda: [one.wait_ready(START_S) for one in workers])
    before = (await client.run("weight_version"))["version"]
    async with frontend(plane, admission_wait_s=30) as http:

        async def call(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
            response = await http.post("/v1/completions", json=body)
            return response.status_code, response.json()

        async def stop() -> None:
            await plane.until(long_ones_run)
            await client.run(op, {"mode": "abort"} if op == "pause" else {})

        async def long_ones_run() -> bool:
            rows = (await client.call_all("state")).rows
            return sum(int(row.body["running"]) for row in rows) == 4

        async def gathered(rollouts: list[Rollout], enough: int) -> Gathered:
            return await gather_enough(rollouts, call, stop, enough=enough, timeout_s=60)

        rollouts = [
            Rollout([5, 6, 7 + number], LONG if number % 2 else SHORT, {"temperature": 0}, key=number)
            for number in range(8)
        ]
        got = await gathered(rollouts, 4)
        assert (sorted(keys(got.finished)), sorted(keys(got.parked)), got.failed) == (
            [0, 2, 4, 6],
            [1, 3, 5, 7],
            [],
        )
        parts = {one.key: len(one.token_ids) for one in got.parked}
        after = (await client.run("update_weights", update_of(witnesses.base(2), "two")))["version"]
        if op == "pause":
            await client.run("resume", {})
        rest = await gathered(got.parked, 4)
    assert (rest.parked, rest.failed) == ([], [])
    for one in [*got.finished, *rest.finished]:
        first = parts.get(one.key, one.max_tokens)
        tokens = chain(one.prompt_token_ids[-1], first, 1)
        tokens += chain([one.prompt_token_ids[-1], *tokens][-1], one.max_tokens - first, 2)
        assert (list(one.token_ids), one.finish_reason) == (tokens, "length")
        ends = [(before, 0, first), (after, first, one.max_tokens)]
        assert [(span["version"], span["sequence"], span["digest"], span["start"], span["end"]) for span in
                one.weight_versions] == [
            (version["label"], version["sequence"], version["digest"], start, end)
            for version, start, end in ends if end > start
        ]  # fmt: skip
        assert (one.instances[0]["start"], one.instances[-1]["end"]) == (0, one.max_tokens)
        assert {maker["instance_id"] for maker in one.instances} <= {worker.instance_id for worker in workers}
    assert any(0 < count < LONG for count in parts.values())
    one = max(rest.finished, key=lambda each: parts[each.key])
    first = parts[one.key]
    made, prompt = list(one.token_ids), list(one.prompt_token_ids)
    due = reference.logprobs_of(witnesses.first, prompt, made[:first])[0]
    due += reference.logprobs_of(witnesses.base(2), [*prompt, *made[:first]], made[first:])[0]
    assert one.logprobs == pytest.approx(due, abs=1e-3)
