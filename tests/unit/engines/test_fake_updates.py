"""Pauses and new weights of the fake engine."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from rl_plane.errors import EngineFailed, InvalidRequest, NotAdmitted
from tests.support.fake_runs import (
    BOUND_S,
    PROMPT,
    Reader,
    ask,
    base,
    drain,
    new,
    stage,
    started,
    tokens,
    until,
    version,
)
from worker.engines.base import EngineOptions
from worker.engines.fake.adapter import (
    FakeEngine,
    build,
    fake_token,
)
from worker.receive.staging import model_digest

__all__ = ["base", "new"]


async def settle() -> None:
    """Lets every task go as far as it gets without time passing."""
    for _ in range(50):
        await asyncio.sleep(0)


# pausing


async def test_keep_freezes_between_two_tokens(base: Path) -> None:
    engine = await started(base)
    reader = Reader(engine)
    await until(lambda: len(reader.deltas) == 3)
    await engine.pause("keep", False)
    await engine.pause("keep", True)  # idempotent
    late = Reader(engine, "late", 2)
    await settle()
    assert len(reader.deltas) == 3
    assert late.deltas == []
    assert engine.load() == (1, 1)
    await engine.liveness()
    await engine.resume()
    await engine.resume()
    assert (await reader.end()).finish_reason == "length"
    assert (await late.end()).finish_reason == "length"
    assert tokens(reader.deltas) == [fake_token(model_digest(base), PROMPT, i) for i in range(1000)]


async def test_a_pause_right_after_a_resume_yields_no_token(base: Path) -> None:
    """A woken reader must check again before it continues."""
    engine = await started(base)
    reader = Reader(engine)
    await until(lambda: len(reader.deltas) == 1)
    await engine.pause("keep", False)
    await settle()
    await engine.resume()
    await engine.pause("keep", False)
    await settle()
    assert len(reader.deltas) == 1
    await engine.close()
    assert (await reader.end()).finish_reason == "error"


async def test_abort_ends_the_running_and_the_waiting(base: Path) -> None:
    engine = await started(base)
    reader = Reader(engine)
    await until(lambda: len(reader.deltas) == 2)
    await engine.pause("keep", False)
    late = Reader(engine, "late")
    await until(lambda: engine.load() == (1, 1))
    await engine.pause("abort", False)
    assert engine.load() == (0, 0)
    assert (await reader.end()).spans[0].end == 2
    assert (await late.end()).finish_reason == "abort"
    assert late.deltas[0].spans == []
    after = Reader(engine, "after", 1)
    await settle()
    assert after.deltas == []
    await engine.resume()
    await after.end()


async def test_wait_lets_the_running_end(base: Path) -> None:
    engine = await started(base)
    reader = Reader(engine, max_tokens=50)
    await until(lambda: len(reader.deltas) == 1)
    pausing = asyncio.create_task(engine.pause("wait", False))
    await settle()  # the pause has begun
    late = Reader(engine, "late", 1)
    async with asyncio.timeout(BOUND_S):
        await pausing
    assert (await reader.end()).finish_reason == "length"
    await settle()
    assert late.deltas == []
    assert engine.load() == (0, 1)
    await engine.resume()
    await late.end()


async def test_a_wait_ends_on_an_idle_engine_and_after_an_abort(base: Path) -> None:
    engine = await started(base)
    async with asyncio.timeout(BOUND_S):
        await engine.pause("wait", False)
        await engine.resume()
        stream = engine.generate(ask(max_tokens=100))
        await anext(stream)
        pausing = asyncio.create_task(engine.pause("wait", False))
        await settle()
        assert not pausing.done()
        await engine.abort(None)
        await pausing


async def test_wait_after_keep_lets_the_frozen_end(base: Path) -> None:
    engine = await started(base)
    reader = Reader(engine, max_tokens=20)
    await until(lambda: len(reader.deltas) == 2)
    await engine.pause("keep", False)
    async with asyncio.timeout(BOUND_S):
        await engine.pause("wait", False)
    assert (await reader.end()).finish_reason == "length"


async def test_cancelling_a_wait_leaves_things_as_they_were(base: Path) -> None:
    for paused in (False, True):
        engine = await started(base)
        stream = engine.generate(ask(max_tokens=100))
        await anext(stream)
        if paused:
            await engine.pause("keep", False)
        pausing = asyncio.create_task(engine.pause("wait", False))
        await settle()
        pausing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pausing
        reader = Reader(engine, "late", 3)
        await settle()
        assert len(reader.deltas) == (0 if paused else 3)
        await engine.close()
        await reader.task
        await drain(stream)


async def test_a_resume_during_a_wait_counts(base: Path) -> None:
    engine = await started(base)
    stream = engine.generate(ask(max_tokens=3))
    await anext(stream)
    pausing = asyncio.create_task(engine.pause("wait", False))
    await settle()
    await engine.resume()
    async with asyncio.timeout(BOUND_S):
        await pausing
        assert len(await drain(stream)) == 2
        assert len(await drain(engine.generate(ask(max_tokens=3)))) == 3


async def test_a_pause_with_an_unknown_mode_is_refused_and_pauses_nothing(base: Path) -> None:
    engine = await started(base)
    with pytest.raises(InvalidRequest) as caught:
        await engine.pause(cast(Any, "stop"), False)
    assert caught.value.facts["field"] == "mode"
    assert len(await drain(engine.generate(ask(max_tokens=1)))) == 1


# weights


@pytest.mark.parametrize("hold_bytes", ["true", "false"])
async def test_a_swap_in_mid_stream_takes_effect_between_two_tokens(
    base: Path, new: Path, hold_bytes: str
) -> None:
    engine = await started(base, hold_bytes=hold_bytes)
    staged = stage(engine, new)
    reader = Reader(engine, max_tokens=40)
    await until(lambda: len(reader.deltas) == 4)
    await engine.pause("keep", False)
    assert await engine.swap(staged, version(1, new)) is True
    await settle()
    assert len(reader.deltas) == 4  # it stays paused
    await engine.resume()
    last = await reader.end()
    old_digest, new_digest = model_digest(base), model_digest(new)
    assert tokens(reader.deltas) == [fake_token(old_digest if i < 4 else new_digest, PROMPT, i) for i in range(40)]
    assert [(span.sequence, span.digest, span.start, span.end) for span in last.spans] == [
        (0, old_digest, 0, 4),
        (1, new_digest, 4, 40),
    ]


async def test_spans_come_first_with_each_change_and_last(base: Path, new: Path) -> None:
    engine = await started(base)
    staged = stage(engine, new)
    reader = Reader(engine, max_tokens=9)
    await until(lambda: len(reader.deltas) == 4)
    await engine.pause("keep", False)
    await engine.swap(staged, version(1, new))
    await engine.resume()
    await reader.end()
    assert [[(span.start, span.end) for span in delta.spans] for delta in reader.deltas] == [
        [(0, 1)],
        *[[]] * 3,
        [(0, 4), (4, 5)],
        *[[]] * 3,
        [(0, 4), (4, 9)],
    ]


async def test_the_label_does_not_make_the_token(base: Path, new: Path) -> None:
    """Weights other than their label says are seen in the tokens."""
    engine = await started(base)
    engine.set_version(version(1, new))
    (delta,) = await drain(engine.generate(ask(max_tokens=1)))
    assert delta.token_ids == [fake_token(model_digest(base), PROMPT, 0)]
    assert delta.spans[0].digest == model_digest(new)


async def test_without_a_version_no_span_is_guessed(base: Path) -> None:
    engine = build(EngineOptions(base))
    await engine.start()
    stream = engine.generate(ask(max_tokens=3))
    await anext(stream)
    engine.set_version(version(0, base))
    last = (await drain(stream))[-1]
    assert [(span.start, span.end) for span in last.spans] == [(1, 3)]


async def test_swaps_that_are_refused_change_nothing(base: Path, new: Path) -> None:
    engine = await started(base)
    with pytest.raises(EngineFailed, match="paused"):
        await engine.swap(stage(engine, new), version(1, new))
    await engine.pause("keep", False)
    engine.config.fail_swap = True
    refused = stage(engine, new)
    with pytest.raises(EngineFailed, match="fail_swap"):
        await engine.swap(refused, version(1, new))
    engine.config.fail_swap = False
    for used_or_unknown in (refused, "never"):
        with pytest.raises(EngineFailed, match="swapped or discarded"):
            await engine.swap(used_or_unknown, version(1, new))
    await engine.resume()
    (delta,) = await drain(engine.generate(ask(max_tokens=1)))
    assert delta.token_ids == [fake_token(model_digest(base), PROMPT, 0)]
    assert delta.spans[0].sequence == 0
    await engine.pause("keep", False)
    staged = stage(engine, new)
    await engine.swap(staged, version(1, new))
    with pytest.raises(EngineFailed, match="swapped or discarded"):
        await engine.swap(staged, version(1, new))


async def test_discarded_weights_are_gone(base: Path, new: Path) -> None:
    engine = await started(base)
    staged = stage(engine, new)
    await asyncio.to_thread(engine.receiver.discard, staged)
    await asyncio.to_thread(engine.receiver.discard, staged)
    await engine.pause("keep", False)
    with pytest.raises(EngineFailed, match="discarded"):
        await engine.swap(staged, version(1, new))


async def test_discarding_what_was_swapped_in_harms_nothing(base: Path, new: Path) -> None:
    engine = await started(base)
    staged = stage(engine, new)
    await engine.pause("keep", False)
    await engine.swap(staged, version(1, new))
    await asyncio.to_thread(engine.receiver.discard, staged)
    (row,) = await engine.check_weights("checksum")
    assert row["checksum"]
    await engine.resume()
    (delta,) = await drain(engine.generate(ask(max_tokens=1)))
    assert delta.token_ids == [fake_token(model_digest(new), PROMPT, 0)]


async def test_a_swap_cancelled_in_its_delay_changed_nothing(base: Path, new: Path) -> None:
    engine = await started(base, swap_delay_s="3600")
    await engine.pause("keep", False)
    swapping = asyncio.create_task(engine.swap(stage(engine, new), version(1, new)))
    await settle()
    swapping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await swapping
    await engine.resume()
    (delta,) = await drain(engine.generate(ask(max_tokens=1)))
    assert delta.spans[0].sequence == 0


async def test_staging_fails_on_demand_and_ends_if_cancelled(base: Path, new: Path) -> None:
    engine = await started(base, fail_stage="true")
    with pytest.raises(EngineFailed, match="fail_stage"):
        stage(engine, new)
    engine.config.fail_stage = False
    stage(engine, new)
    slow = await started(base, stage_delay_s="3600")
    with pytest.raises(EngineFailed, match="cancelled"):
        stage(slow, new, lambda: True)


async def test_an_engine_with_hung_liveness_still_generates(base: Path) -> None:
    engine = await started(base, hang_liveness="true")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await engine.liveness()
    assert len(await drain(engine.generate(ask(max_tokens=1)))) == 1


@pytest.mark.parametrize("hold_bytes", ["true", "false"])
async def test_check_weights_sees_noise_and_the_restored_weights(base: Path, new: Path, hold_bytes: str) -> None:
    engine, twin = await started(base, hold_bytes=hold_bytes), await started(base)

    async def checksum(of: FakeEngine) -> str:
        (row,) = await of.check_weights("checksum")
        assert row["rank"] == 0
        return str(row["checksum"])

    with pytest.raises(InvalidRequest, match="snapshot"):
        await engine.check_weights("compare")
    first = await checksum(engine)
    assert first == await checksum(twin)
    await engine.check_weights("snapshot")
    assert await engine.check_weights("compare") == [{"rank": 0, "match": True, "mismatches": []}]

    await engine.check_weights("reset_tensors")
    assert await checksum(engine) != first
    (row,) = await engine.check_weights("compare")
    assert row["match"] is False
    assert row["mismatches"] == sorted(engine.receiver.weight_spec())
    (delta,) = await drain(engine.generate(ask(max_tokens=1)))
    assert delta.spans == []  # noise is no version

    await engine.pause("keep", False)
    await engine.swap(stage(engine, base), version(0, base))
    assert await checksum(engine) == first
    assert (await engine.check_weights("compare"))[0]["match"] is True


async def test_the_checksum_sees_every_byte(base: Path) -> None:
    engine = await started(base)
    (before,) = await engine.check_weights("checksum")
    raw = bytearray((base / "model.safetensors").read_bytes())
    raw[-1] ^= 1
    (base / "model.safetensors").write_bytes(raw)
    other = await started(base)
    (after,) = await other.check_weights("checksum")
    assert before != after


async def test_released_memory_stops_work_until_it_is_resumed(base: Path, new: Path) -> None:
    engine = await started(base)
    stream = engine.generate(ask(max_tokens=50))
    await anext(stream)
    with pytest.raises(InvalidRequest, match="requests are running"):
        await engine.release_memory(["kv_cache"])
    await engine.pause("abort", False)
    await drain(stream)
    await engine.release_memory(["weights", "kv_cache"])
    with pytest.raises(NotAdmitted, match="kv_cache, weights"):
        await drain(engine.generate(ask()))
    with pytest.raises(EngineFailed, match="released"):
        await engine.swap(stage(engine, new), version(1, new))
    with pytest.raises(EngineFailed, match="released"):
        await engine.check_weights("checksum")
    await engine.resume_memory(["weights"])
    await engine.swap(stage(engine, new), version(1, new))
    await engine.resume_memory(["weights", "kv_cache"])
    await engine.resume()
    (last,) = await drain(engine.generate(ask(max_tokens=1)))
    assert last.token_ids == [fake_token(model_digest(new), PROMPT, 0)]


async def test_a_process_carries_a_thousand(base: Path, new: Path) -> None:
    """The engines share nothing: one is updated, and the others are not."""
    engines = [build(EngineOptions(base, weight_roots=(base.parent,))) for _ in range(1000)]
    await asyncio.gather(*(engine.start() for engine in engines))
    await engines[7].pause("keep", False)
    await engines[7].swap(stage(engines[7], new), version(1, new))
    await engines[7].resume()
    deltas = await asyncio.gather(*(drain(engine.generate(ask(max_tokens=1))) for engine in engines))
    made = [tokens(each)[0] for each in deltas]
    expected = [fake_token(model_digest(base), PROMPT, 0)] * 1000
    expected[7] = fake_token(model_digest(new), PROMPT, 0)
    assert made == expected
    await asyncio.gather(*(engine.close() for engine in engines))
