"""The fake engine keeps the whole contract of an EngineAdapter."""

from __future__ import annotations

import asyncio
import itertools
import random
from contextlib import aclosing
from pathlib import Path
from typing import Any, cast

import pytest

from rl_plane.errors import EngineFailed, InvalidRequest, InvalidWeights
from rl_plane.protocol.generation import MAX_PROMPT_LOGPROBS, GenerateRequest
from rl_plane.protocol.versions import TensorSpec
from tests.sim.virtual_loop import VirtualLoop
from tests.support.fake_runs import (
    PROMPT,
    ask,
    base,
    drain,
    new,
    receive,
    reception,
    stage,
    started,
    tokens,
    until,
    version,
)
from worker.engines.base import EngineAdapter, EngineFactory, EngineOptions
from worker.engines.fake.adapter import (
    build,
    fake_logprob,
    fake_prompt_logprobs,
    fake_token,
    make_fake_model,
)
from worker.receive.staging import model_digest

__all__ = ["base", "new"]


# life and options


async def test_the_fake_engine_describes_itself_and_closes_twice(base: Path) -> None:
    factory: EngineFactory = build
    engine: EngineAdapter = factory(EngineOptions(base))
    info = await engine.start()
    assert (info.engine, info.model, info.dtype, info.device, info.world_size) == (
        "fake",
        "base",
        "float32",
        "cpu",
        1,
    )
    assert (info.vocab_size, info.max_model_len) == (512, 4096)
    assert set(info.lacks) == {"generate:routed_experts", "generate:structured_output"}
    assert engine.receiver.weight_spec() == {f"layers.{i}.weight": TensorSpec("F32", (256,)) for i in range(4)}
    await engine.liveness()
    assert await engine.flush_cache()
    await engine.close()
    await engine.close()


async def test_a_closed_engine_refuses_every_call(base: Path) -> None:
    engine = build(EngineOptions(base))
    await engine.close()  # at any time
    with pytest.raises(EngineFailed, match="closed"):
        await engine.start()
    for call in (
        engine.liveness(),
        engine.pause("keep", False),
        engine.resume(),
        engine.flush_cache(),
        engine.check_weights("checksum"),
        engine.release_memory(["weights", "kv_cache"]),
        drain(engine.generate(ask())),
    ):
        with pytest.raises(EngineFailed, match="not running"):
            await call
    with pytest.raises(EngineFailed):
        engine.receiver.weight_spec()


async def test_closing_ends_what_runs(base: Path) -> None:
    engine = await started(base)
    stream = engine.generate(ask(max_tokens=100))
    await anext(stream)
    await engine.close()
    (last,) = await drain(stream)
    assert last.finish_reason == "error"
    assert last.spans[0].end == 1


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("speed", "1"),
        ("token_delay_s", "-1"),
        ("token_delay_s", "nan"),
        ("token_delay_s", "inf"),
        ("token_delay_s", "1e9"),
        ("token_delay_s", "soon"),
        ("vocab_size", "3"),
        ("vocab_size", "1e3"),
        ("vocab_size", "²"),
        ("vocab_size", "9" * 5000),
        ("max_model_len", "0"),
        ("fail_stage", "maybe"),
    ],
)
def test_a_bad_engine_argument_is_named_with_a_fix(base: Path, key: str, value: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        build(EngineOptions(base, extra={key: value}))
    assert caught.value.facts["field"] == f"engine_arg.{key}"
    assert caught.value.facts["fix"]


def test_a_bad_dtype_or_device_is_refused_by_its_field(base: Path) -> None:
    for field, options in (
        ("dtype", EngineOptions(base, dtype="int4")),
        ("device", EngineOptions(base, device="cuda")),
    ):
        with pytest.raises(InvalidRequest) as caught:
            build(options)
        assert caught.value.facts["field"] == field


async def test_a_missing_or_damaged_model_is_refused(tmp_path: Path, base: Path) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await build(EngineOptions(tmp_path / "absent")).start()
    assert caught.value.facts["field"] == "model"
    (base / "model.safetensors").write_bytes((base / "model.safetensors").read_bytes() + b"!")
    with pytest.raises(InvalidWeights, match="trailing"):
        await build(EngineOptions(base)).start()


async def test_a_configured_dtype_asks_for_a_cast(base: Path, new: Path) -> None:
    engine = build(EngineOptions(base, dtype="bfloat16", weight_roots=(new,)))
    info = await engine.start()
    assert info.dtype == "bfloat16"
    with pytest.raises(InvalidWeights) as caught:
        stage(engine, new)
    assert caught.value.facts["field"] == "cast"
    _, reply = receive(engine, reception(new, cast=True))
    assert reply == {"digest": model_digest(new), "tensors": 4, "bytes": 4096, "refetchable": True}


def test_a_fake_model_depends_on_its_seed_and_checks_its_size(tmp_path: Path) -> None:
    one = make_fake_model(tmp_path / "1", 7, tensors=2, nbytes=8)
    assert sorted(path.name for path in one.iterdir()) == ["config.json", "model.safetensors"]
    assert model_digest(one) == model_digest(make_fake_model(tmp_path / "2", 7, tensors=2, nbytes=8))
    assert model_digest(one) != model_digest(make_fake_model(tmp_path / "3", 8, tensors=2, nbytes=8))
    for bad in ({"tensors": 0}, {"nbytes": 0}, {"nbytes": 6}):
        with pytest.raises(ValueError, match="fake model"):
            make_fake_model(tmp_path / "4", 1, **bad)


# generation


async def test_tokens_depend_on_the_weights(base: Path) -> None:
    engine = await started(base)
    deltas = await drain(engine.generate(ask(max_tokens=8, logprobs=True)))
    digest = model_digest(base)
    assert tokens(deltas) == [fake_token(digest, PROMPT, i) for i in range(8)]
    assert all(3 <= token < 512 for token in tokens(deltas))
    assert [delta.logprobs for delta in deltas] == [[fake_logprob(digest, PROMPT, i)] for i in range(8)]
    assert all(-4 <= fake_logprob(digest, PROMPT, i) < 0 for i in range(100))
    assert deltas[0].prompt_token_ids == PROMPT
    assert all(delta.prompt_token_ids is None for delta in deltas[1:])
    assert [delta.finish_reason for delta in deltas] == [None] * 7 + ["length"]
    assert [len(delta.spans) for delta in deltas] == [1, *[0] * 6, 1]
    assert "".join(delta.text for delta in deltas) == "".join(f" t{token}" for token in tokens(deltas))
    assert engine.load() == (0, 0)


async def test_prompt_logprobs_depend_on_the_weights_of_the_first_token(base: Path, new: Path) -> None:
    engine = await started(base)
    await engine.pause("keep", False)
    task = asyncio.create_task(drain(engine.generate(ask(max_tokens=3, prompt_logprobs=True))))
    await until(lambda: engine.load() == (0, 1))
    await engine.swap(stage(engine, new), version(1, new))
    await engine.resume()
    first, *rest = await task
    assert first.prompt_logprobs == fake_prompt_logprobs(model_digest(new), PROMPT)
    assert all(delta.prompt_logprobs is None for delta in rest)
    told = fake_prompt_logprobs(model_digest(base), PROMPT)
    assert (len(told), told[0]) == (len(PROMPT), None)
    assert told != first.prompt_logprobs
    assert told[:2] == fake_prompt_logprobs(model_digest(base), PROMPT[:2])


async def test_more_prompt_logprobs_than_a_message_takes_are_refused(base: Path) -> None:
    engine = await started(base, max_model_len="70000")
    most = [5] * MAX_PROMPT_LOGPROBS
    (delta,) = await drain(engine.generate(ask(prompt_token_ids=most, max_tokens=1, prompt_logprobs=True)))
    assert len(delta.prompt_logprobs or []) == len(most)
    with pytest.raises(InvalidRequest) as caught:
        await drain(engine.generate(ask(prompt_token_ids=[*most, 5], max_tokens=1, prompt_logprobs=True)))
    assert caught.value.facts["field"] == "prompt_logprobs"
    await drain(engine.generate(ask(prompt_token_ids=[*most, 5], max_tokens=1)))


def test_the_token_depends_on_all_that_it_should(base: Path, new: Path) -> None:
    def sequence(digest: str, prompt: list[int], start: int = 0) -> list[int]:
        return [fake_token(digest, prompt, start + i, 1 << 30) for i in range(4)]

    first = sequence(model_digest(base), PROMPT)
    assert first != sequence(model_digest(new), PROMPT)
    assert first != sequence(model_digest(base), [5, 6])
    assert first[1:] == sequence(model_digest(base), PROMPT, 1)[:3]
    assert len(set(first)) == 4
    assert fake_token("blake3:00", [0], 0, 4) == 3


async def test_text_and_messages_become_the_same_tokens(base: Path) -> None:
    engine = await started(base)
    text = await drain(engine.generate(ask(prompt="aé", max_tokens=1)))
    assert text[0].prompt_token_ids == [byte + 3 for byte in "aé".encode()]
    messages = [
        {"role": "user", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "é"}]},
    ]
    chat = await drain(engine.generate(ask(messages=messages, max_tokens=1)))
    assert chat[0].prompt_token_ids == text[0].prompt_token_ids
    small = await started(base, vocab_size="10")
    (delta,) = await drain(small.generate(ask(prompt="\xff\0", max_tokens=1)))
    assert all(3 <= token < 10 for token in delta.prompt_token_ids or [0])


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"prompt_token_ids": None}, "prompt"),
        ({"prompt_token_ids": [5], "prompt": "x"}, "prompt"),
        ({"prompt": "x", "messages": []}, "messages"),
        ({"prompt_token_ids": [512]}, "prompt_token_ids"),
        ({"prompt": ""}, "prompt"),
        ({"messages": []}, "prompt"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content"),
        ({"prompt_token_ids": [5], "max_tokens": 4096}, "max_tokens"),
        ({"prompt_token_ids": [5], "stop_token_ids": [512]}, "stop_token_ids"),
        ({"prompt_token_ids": [5], "logit_bias": {"512": 1.0}}, "logit_bias"),
        ({"prompt_token_ids": [5], "allowed_token_ids": [512]}, "allowed_token_ids"),
        ({"prompt_token_ids": [5], "bad_words_token_ids": [[5, 512]]}, "bad_words_token_ids"),
        ({"prompt_token_ids": [5], "bad_words_token_ids": [[5] * 1025]}, "bad_words_token_ids"),
        ({"prompt_token_ids": [5], "min_tokens": 17}, "min_tokens"),
        ({"prompt_token_ids": [5], "min_tokens": 1, "stop_token_ids": list(range(97))}, "stop_token_ids"),
        (
            {"prompt_token_ids": [5], "allowed_token_ids": [5], "bad_words_token_ids": [[6, 5]]},
            "bad_words_token_ids",
        ),
        (
            {"prompt_token_ids": [5], "allowed_token_ids": [5, 6], "bad_words_token_ids": [[7, 5, 5], [5, 6]]},
            "bad_words_token_ids",
        ),
        (
            {"prompt_token_ids": [5], "allowed_token_ids": [5], "stop_token_ids": [5], "min_tokens": 1},
            "allowed_token_ids",
        ),
    ],
)
async def test_a_bad_request_names_its_field_and_leaves_no_load(
    base: Path, fields: dict[str, Any], field: str
) -> None:
    engine = await started(base)
    with pytest.raises(InvalidRequest) as caught:
        await drain(engine.generate(GenerateRequest(id="r", **fields)))
    assert caught.value.facts["field"] == field
    assert caught.value.facts["fix"]
    assert engine.load() == (0, 0)
    assert len(await drain(engine.generate(ask(max_tokens=2)))) == 2


async def test_the_longest_request_that_fits_is_completed(base: Path) -> None:
    engine = await started(base, max_model_len="8")
    assert len(await drain(engine.generate(ask(max_tokens=5)))) == 5


async def test_the_tokens_of_a_reply_include_its_stop_token(base: Path) -> None:
    engine = await started(base)
    all_tokens = tokens(await drain(engine.generate(ask(max_tokens=6))))
    stop = all_tokens[2]
    deltas = await drain(engine.generate(ask(max_tokens=6, stop_token_ids=[stop])))
    assert tokens(deltas) == all_tokens[: all_tokens.index(stop) + 1]
    assert deltas[-1].finish_reason == "stop"
    assert deltas[-1].spans[-1].end == len(tokens(deltas))


async def test_a_request_allows_and_bars_tokens(base: Path) -> None:
    engine = await started(base)

    async def made(**fields: Any) -> list[int]:
        return tokens(await drain(engine.generate(ask(max_tokens=20, **fields))))

    free = await made()
    assert await made(cache_salt="pepper", bad_words_token_ids=[[free[0], free[0]]]) == free
    assert set(await made(allowed_token_ids=[7, 8])) == {7, 8}
    assert set(await made(logit_bias={"9": 1.0, "10": 0.5})) == {9}
    assert free[0] not in await made(logit_bias={str(free[0]): -100.0})
    pairs = await made(allowed_token_ids=[7, 8], bad_words_token_ids=[[7, 7], [8, 8]])
    assert all(one != other for one, other in itertools.pairwise(pairs))
    stopped = await made(stop_token_ids=[free[2]], min_tokens=4)
    assert free[2] not in stopped[:4]
    assert stopped[:2] == free[:2]


async def test_a_truncated_prompt_is_its_last_tokens(base: Path) -> None:
    engine = await started(base)
    (delta,) = await drain(
        engine.generate(ask(prompt_token_ids=[9, *PROMPT], truncate_prompt_tokens=3, max_tokens=1))
    )
    assert delta.prompt_token_ids == PROMPT
    assert delta.token_ids == [fake_token(model_digest(base), PROMPT, 0)]
    (text,) = await drain(engine.generate(ask(prompt="abc", truncate_prompt_tokens=1, max_tokens=1)))
    assert text.prompt_token_ids == [ord("c") + 3]


async def test_an_id_is_used_once_at_a_time(base: Path) -> None:
    engine = await started(base)
    async with aclosing(cast(Any, engine.generate(ask(max_tokens=9)))) as stream:
        await anext(stream)
        with pytest.raises(InvalidRequest, match="is running"):
            await drain(engine.generate(ask()))
        assert engine.load() == (1, 0)
    assert engine.load() == (0, 0)  # closing the iterator aborted it
    assert len(await drain(engine.generate(ask(max_tokens=1)))) == 1


async def test_a_token_delay_can_be_aborted(base: Path) -> None:
    engine = await started(base, token_delay_s="3600")
    task = asyncio.create_task(drain(engine.generate(ask())))
    await until(lambda: engine.load() == (1, 0))
    assert await engine.abort(["r", "unknown"]) == 1
    (last,) = await task
    assert (last.finish_reason, last.token_ids, last.prompt_token_ids) == ("abort", [], PROMPT)


def test_each_token_waits_for_its_delay(base: Path) -> None:
    """The time is virtual: an hour passes at once, and only if a timer asks for it."""
    loop = VirtualLoop(random.Random(0))
    made: list[float] = []

    async def generate() -> None:
        engine = await started(base, token_delay_s="3600")
        before = loop.time()
        async for delta in engine.generate(ask(max_tokens=3)):
            made.extend(loop.time() - before for _ in delta.token_ids)
        await engine.close()

    loop.run_until_complete(generate())
    loop.bury([])
    assert made == pytest.approx([3600.0, 7200.0, 10800.0])


async def test_other_tasks_get_their_turn(base: Path) -> None:
    engine = await started(base)
    order: list[str] = []

    async def one(name: str) -> None:
        async for _ in engine.generate(ask(name, max_tokens=3)):
            order.append(name)

    await asyncio.gather(one("x"), one("y"))
    assert order == ["x", "y"] * 3


async def test_abort_ends_the_named_requests_or_all(base: Path) -> None:
    engine = await started(base)
    streams = {name: engine.generate(ask(name, max_tokens=100)) for name in "abc"}
    for stream in streams.values():
        await anext(stream)
    assert await engine.abort(["a"]) == 1
    assert await engine.abort(["a"]) == 0
    assert engine.load() == (2, 0)
    assert await engine.abort(None) == 2
    for stream in streams.values():
        (last,) = await drain(stream)
        assert (last.finish_reason, last.spans[0].start, last.spans[0].end) == ("abort", 0, 1)
    assert await engine.abort(None) == 0
