"""The conformance suite of pooling engines (`CanPool`): the checks of an engine for a reward or an embedding model.

`check_pooling` runs them on an engine whose options have the `task`. `POOLING_CHECKS` are for pytest, as `CHECKS` of
`worker.testing.engine_contract`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_plane._util.extras import import_error
from rl_plane.errors import EngineFailed, InvalidRequest, Unsupported
from rl_plane.protocol.generation import GenerateDelta, GenerateRequest
from rl_plane.protocol.pooling import TASKS, Pooling, task_field, unpacked

try:
    from worker.engines.base import EngineFactory, EngineOptions
    from worker.engines.capabilities import CanPool, require
    from worker.testing.engine_contract import (
        BOUND_S,
        CANCELLED_MODES,
        Check,
        EngineUnderTest,
        bounded,
        cancel_pause,
        checksum,
        describes_itself,
        idle,
        refused,
        run_checks,
    )
except ModuleNotFoundError as error:
    raise import_error(error, "worker.testing.pooling_contract", "worker") from None

NEAR = 1e-5
"""The largest difference between two computations of one input."""


def own_task(at: EngineUnderTest) -> Any:
    """The one task that the engine does not name as missing."""
    served = [task for task in TASKS if not at.lacks(f"generate:{task_field(task)}")]
    assert len(served) == 1, f"a pooling engine names every task but its own in `lacks`: it has {served}"
    assert served != ["generate"], "a pooling model makes no tokens"
    return served[0]


def pooling_request(at: EngineUnderTest, prompt: list[int] | None = None, **more: Any) -> GenerateRequest:
    pooling = Pooling(task=own_task(at), **more)
    return at.request(1, prompt_token_ids=prompt or list(at.prompt), pooling=pooling)


async def deltas_of(at: EngineUnderTest, request: GenerateRequest) -> list[GenerateDelta]:
    return [delta async for delta in require(at.engine, CanPool).pool(request)]


async def pooled(at: EngineUnderTest) -> tuple[list[float], GenerateDelta]:
    """The vector of the prompt, and its delta."""
    deltas = await bounded(deltas_of(at, pooling_request(at)))
    assert len(deltas) == 1, "a vector comes in one delta"
    (delta,) = deltas
    assert delta.pooled is not None
    assert not delta.token_ids
    assert delta.finish_reason not in (None, "abort")
    return unpacked(delta.pooled), delta


async def waiting(at: EngineUnderTest) -> tuple[str, asyncio.Task[list[GenerateDelta]]]:
    """A request that a paused engine has: its id, and the task that reads it."""
    request = pooling_request(at)
    reading = asyncio.create_task(deltas_of(at, request))
    async with asyncio.timeout(BOUND_S):
        while not sum(at.engine.load()) and not reading.done():  # noqa: ASYNC110 - no event tells of a request
            await asyncio.sleep(0.01)
    for _ in range(3):
        await bounded(at.engine.liveness())
    assert not reading.done(), "a paused engine computes nothing"
    return request.id, reading


def is_near(one: list[float], other: list[float]) -> bool:
    return all(abs(a - b) < NEAR for a, b in zip(one, other, strict=True))


async def pools(at: EngineUnderTest) -> None:
    """One delta brings a vector of the described size, with the version of its weights. Tokens are refused."""
    assert at.info.dimension is not None
    if own_task(at) == "classify":
        assert len(at.info.labels) == at.info.dimension, "a classifier names each label"
    numbers, delta = await pooled(at)
    assert len(numbers) == at.info.dimension
    assert all(map(math.isfinite, numbers))
    if own_task(at) == "embed":
        assert abs(math.hypot(*numbers) - 1) < NEAR, "an embedding has the length 1"
    assert delta.prompt_token_ids == list(at.prompt)
    if at.info.witnesses:
        (span,) = delta.spans
        assert (span.start, span.end, span.sequence) == (0, 1, at.sequence)
    assert is_near((await pooled(at))[0], numbers), "one input has one vector"
    error = await refused(anext(at.engine.generate(at.request())), Unsupported)
    assert error.facts["field"] == "model"


async def refuses_bad_inputs(at: EngineUnderTest) -> None:
    """A bad input is an InvalidRequest that names the field and the fix."""
    for field, request in {
        "prompt_token_ids": pooling_request(at, [at.info.vocab_size]),
        "prompt": pooling_request(at, [5] * (at.info.max_model_len + 1)),
        "dimensions": pooling_request(at, dimensions=(at.info.dimension or 0) + 1),
    }.items():
        error = await refused(deltas_of(at, request), InvalidRequest)
        assert error.facts["field"] == field
        assert error.facts["fix"]
    await idle(at)


async def pauses_and_aborts(at: EngineUnderTest) -> None:
    """A paused engine computes nothing. A request ends without a vector if it is aborted, or if its reader has left."""
    numbers, _ = await pooled(at)
    await bounded(at.engine.pause("keep", False))
    _, resumed = await waiting(at)
    await bounded(at.engine.resume())
    (delta,) = await bounded(resumed)
    assert is_near(unpacked(delta.pooled or b""), numbers)
    await bounded(at.engine.pause("keep", False))
    request_id, aborted = await waiting(at)
    assert await bounded(at.engine.abort([request_id])) == 1
    (delta,) = await bounded(aborted)
    assert (delta.finish_reason, delta.pooled) == ("abort", None)
    _, left = await waiting(at)
    left.cancel()
    await asyncio.wait([left], timeout=BOUND_S)
    await idle(at)
    _, ended = await waiting(at)
    await bounded(at.engine.pause("abort", True))
    assert [delta.finish_reason for delta in await bounded(ended)] == ["abort"]
    await bounded(at.engine.resume())


async def cancelled_pauses_leave_it_running(at: EngineUnderTest) -> None:
    """A deadline may cancel a pause that has begun. The engine then runs as before."""
    for mode in CANCELLED_MODES:
        await cancel_pause(at, mode)
        await pooled(at)


async def swaps_weights(at: EngineUnderTest) -> None:
    """Other weights make another vector under their own label, also for a request that has waited over the swap."""
    (before, _), sums = await pooled(at), await checksum(at)
    await bounded(at.engine.pause("keep", False))
    _, over = await waiting(at)
    version = at.version(at.other)
    await bounded(at.engine.swap(await at.stage(at.other), version))
    await bounded(at.engine.resume())
    (delta,) = await bounded(over)
    after, _ = await pooled(at)
    assert not is_near(after, before), "other weights make another vector"
    assert is_near(unpacked(delta.pooled or b""), after), "one version computes the whole vector"
    if at.info.witnesses:
        assert [span.digest for span in delta.spans] == [version.digest]
    assert not sums or await checksum(at) != sums
    await at.swap(at.model)
    assert is_near((await pooled(at))[0], before), "no state of other weights is left"


async def ends_requests_at_its_end(at: EngineUnderTest) -> None:
    """`close` ends the requests. The engine is dead then, so this check comes last."""
    await bounded(at.engine.pause("keep", False))
    _, reading = await waiting(at)
    await bounded(at.engine.close())
    try:
        assert [delta.finish_reason for delta in await bounded(reading)] in (["abort"], ["error"])
    except EngineFailed:
        pass  # EngineDied is one
    await refused(at.engine.liveness(), EngineFailed)


POOLING_CHECKS: Mapping[str, Check] = {
    check.__name__: check
    for check in (
        describes_itself,
        pools,
        refuses_bad_inputs,
        pauses_and_aborts,
        cancelled_pauses_leave_it_running,
        swaps_weights,
        ends_requests_at_its_end,
    )
}
"""The checks of a started engine, by name, in their order."""


async def check_pooling(build: EngineFactory, options: EngineOptions, other: Path, **more: Any) -> None:
    """Runs all checks on one engine. `options.task` is `classify` or `embed`. `more`: fields of EngineUnderTest."""
    async with EngineUnderTest.started(build, options, other, **more) as under_test:
        await run_checks(POOLING_CHECKS, under_test)
