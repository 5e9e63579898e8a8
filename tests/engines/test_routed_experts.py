"""The rows of routed experts of the engines equal those of plain transformers, on every route."""

from __future__ import annotations

import asyncio
import io
from base64 import b64decode
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import pytest
import pytest_asyncio

from frontend.completions.reply_choice import Choice
from frontend.routing.progress import GenerationProgress
from rl_plane.errors import EngineFailed
from rl_plane.protocol.generation import GenerateDelta, GenerateRequest
from rl_plane.protocol.routed_experts import RoutedExperts, as_int32, as_npy, width_of
from rl_plane.protocol.token_batching import joined, merged
from tests.support.frontend_process import ask, error_of, events_of, frontend
from tests.support.moe import LAYERS, TOP_K, check_experts, make_moe_model
from tests.support.sent_parts import sent_parts
from tests.support.streaming_client import Streaming, ready
from worker.engines.common.spans import Label
from worker.engines.vllm.streams import Streams
from worker.generation_service import MAX_ROUTED_ALONE, MAX_ROUTED_BESIDE

if TYPE_CHECKING:
    from tests.conftest import Plane

pytestmark = [pytest.mark.slow, pytest.mark.parallel]

START_S = 240.0
PROMPT = list(range(3, 60))
"""More than a block of a cache: the second request finds some of it there."""
TOKENS = 12
LONG = 800
"""Tokens of a choice that is still running when its worker is killed."""


def rows_of(first: int, count: int, width: Any = 1) -> RoutedExperts:
    data = np.arange(first * 6, (first + count) * 6).astype(f"<u{width}").tobytes()
    return RoutedExperts(layers=3, top_k=2, width=width, data=data)


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("count", [1, 7, 1000])
def test_both_encodings_are_those_of_numpy(width: int, count: int) -> None:
    rows = rows_of(0, count, width)
    expected = np.frombuffer(rows.data, f"<u{width}").reshape(count, 3, 2)
    (read,) = arrays(rows)
    assert read.dtype == expected.dtype
    assert (read == expected).all()
    plain = np.frombuffer(b64decode(as_int32(rows) or ""), "<i4")
    assert (plain == expected.reshape(-1)).all()
    kept = io.BytesIO()
    np.save(kept, expected)
    assert len(kept.getvalue()) == len(rows.npy())
    assert (width_of(256), width_of(257)) == (1, 2)


def arrays(*found: RoutedExperts | None) -> list[Any]:
    return [np.load(io.BytesIO(b64decode(as_npy(one) or ""))) for one in found]


class VllmOutput:
    """Stands in for vLLM's front end and for its queue of one request, which has one output: the last."""

    errored = False

    def __init__(self, rows: Any) -> None:
        choice = {"token_ids": [5], "finish_reason": "length", "routed_experts": rows, "weight_versions": None}
        self._output = SimpleNamespace(outputs=[SimpleNamespace(**choice, logprobs=None)], finished=True)
        self.output_processor = SimpleNamespace(external_req_ids={})

    async def add_request(self, *request: Any, **more: Any) -> VllmOutput:
        return self

    def put(self, output: Any) -> None:
        pass

    def get_nowait(self) -> Any:
        return self._output


@pytest.mark.engines("vllm")
@pytest.mark.parametrize("rows", [np.arange(24, dtype=np.uint16).reshape(4, 3, 2), None])
async def test_vllms_rows_are_taken_as_they_are(rows: Any) -> None:
    process: Any = SimpleNamespace(llm=VllmOutput(rows), translated=lambda error: error)
    streams = Streams(process, frozenset(), lambda name, adapter: Label(None))
    request = GenerateRequest(id="x", prompt_token_ids=[1], max_tokens=4, routed_experts=True)
    (piece,) = [piece async for piece in streams.run(request, [1], None)]
    if rows is None:
        assert piece.routed is None
    else:
        (read,) = arrays(piece.routed)
        assert read.dtype == rows.dtype
        assert (read == rows).all()


def test_parts_of_two_models_are_no_reply() -> None:
    other = RoutedExperts(layers=2, top_k=3, width=1, data=bytes(6))
    with pytest.raises(EngineFailed, match="two shapes"):
        RoutedExperts.joined([rows_of(0, 1), other])
    assert RoutedExperts.joined([None, None]) is None


async def test_many_rows_go_ahead_in_messages_that_are_not_too_long() -> None:
    rows = rows_of(0, 2 * MAX_ROUTED_ALONE // 6)
    few = rows_of(0, MAX_ROUTED_BESIDE // 6)
    batch = [GenerateDelta(token_ids=[1], routed_experts=rows), GenerateDelta(token_ids=[2], routed_experts=few)]
    *ahead, last = await sent_parts(merged(batch))
    assert (last.token_ids, last.routed_experts) == ([1, 2], None)
    assert all(
        part.is_ahead and len(part.model_dump()["routed_experts"]["data"]) <= MAX_ROUTED_ALONE for part in ahead
    )
    together = RoutedExperts.joined(part.routed_experts for part in ahead)
    assert together == RoutedExperts.joined([rows, few])
    (whole,) = await sent_parts(batch[1])
    assert whole == batch[1]


async def test_rows_that_went_ahead_take_nothing_of_their_tokens_with_them() -> None:
    """A reader finds them together."""
    rows = rows_of(0, 2 * MAX_ROUTED_ALONE // 6)
    sent = GenerateDelta(
        token_ids=[1, 2],
        logprobs=[-1.0, -2.0],
        top_logprobs=[[(1, -1.0)], [(2, -2.0)]],
        prompt_token_ids=[5],
        prompt_logprobs=[None],
        finish_reason="length",
        routed_experts=rows,
    )
    (read,) = joined(await sent_parts(sent))
    assert read == sent


@pytest.mark.parametrize("ahead", [0, 2])
def test_another_worker_continues_where_the_rows_ended(ahead: int) -> None:
    """`ahead`: rows of tokens that were lost with their worker."""
    progress, choice = (
        GenerationProgress(GenerateRequest(id="x", prompt_token_ids=[5, 6, 7], max_tokens=9)),
        Choice(0),
    )
    progress.rest()
    first = GenerateDelta(token_ids=[1, 2], prompt_token_ids=[5, 6, 7], routed_experts=rows_of(0, 4))
    lost = [GenerateDelta(token_ids=[], routed_experts=rows_of(90, ahead))] if ahead else []
    for delta in (first, *lost):
        progress.take(progress.shifted(delta))
        choice.take(delta)
    assert progress.rest().prompt_token_ids == [5, 6, 7, 1, 2]
    choice.take(accepted(2))
    for start, count, tokens in ((0, 3, []), (3, 2, [3]), (5, 1, [4])):
        delta = progress.shifted(GenerateDelta(token_ids=tokens, routed_experts=rows_of(start, count)))
        progress.take(delta)
        choice.take(delta)
    assert choice.routed_experts == rows_of(0, 6)


def accepted(at: int) -> Any:
    from frontend.routing.attempts import Accepted
    from rl_plane.protocol.versions import WeightVersion

    return Accepted("b" * 16, "i", WeightVersion(run="r", sequence=0, label="initial", digest="blake3:0"), at)


# ---- the engines ----


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_moe_model(tmp_path_factory.mktemp("moe") / "moe", dense=[1])


@pytest_asyncio.fixture
async def http(plane: Plane) -> AsyncIterator[httpx.AsyncClient]:
    async with frontend(plane, admission_wait_s=30.0) as client:
        yield client


async def spawned(plane: Plane, model: Path, *engines: dict[str, Any]) -> list[Any]:
    (plane.tmp / "weights").mkdir()
    started = [plane.spawn(ready=False, model=model, **engine) for engine in engines]
    for one in started:
        await asyncio.to_thread(one.wait_ready, START_S)
    await ready(plane, len(started))
    return started


def greedily(**more: Any) -> dict[str, Any]:
    asked = {"prompt_token_ids": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    return {**asked, "return_token_ids": True, "return_routed_experts": True, **more}


def check(model: Path, tokens: list[int], read: Callable[[], Any]) -> None:
    check_experts(model, (PROMPT + tokens)[:-1], read())


def npy(text: str) -> Callable[[], Any]:
    return lambda: np.load(io.BytesIO(b64decode(text)))


async def every_route(http: httpx.AsyncClient, model: Path, instance_id: str) -> None:
    pinned: dict[str, Any] = {"nvext": {"instance_id": instance_id}}
    (choice,) = (await ask(http, **greedily(), **pinned))["choices"]
    tokens = choice["token_ids"]
    assert len(tokens) == TOKENS
    check(model, tokens, npy(choice["routed_experts"]))
    inside = {"nvext": {**pinned["nvext"], "return_routed_experts": True}}
    reply = await ask(http, **greedily(n=2, return_routed_experts=False), **inside)
    for one in reply["choices"]:
        assert one["token_ids"] == tokens
        check(model, tokens, npy(one["routed_experts"]))
    async with Streaming(http, **greedily(), **pinned) as stream:
        await stream.end()
    assert (stream.error, stream.tokens) == (None, tokens)
    check(model, tokens, npy(stream.last["routed_experts"]))
    plain = await ask(http, **greedily(return_routed_experts=False), **pinned)
    assert "routed_experts" not in plain["choices"][0]


async def test_hf_returns_routed_experts_on_every_route(
    plane: Plane, http: httpx.AsyncClient, model: Path
) -> None:
    (worker,) = await spawned(plane, model, {"engine": "hf", "max_batch_tokens": 40})
    await every_route(http, model, worker.instance_id)
    chat = greedily(messages=[], stream=True)
    events = events_of((await http.post("/v1/chat/completions", json=chat)).text)[:-1]
    made = [token for event in events for token in event["choices"][0]["token_ids"]]
    check(model, made, npy(events[-1]["choices"][0]["routed_experts"]))
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}}
    for stream in (False, True):
        asked = {**body, "return_routed_experts": True, "stream": stream}
        response = await http.post("/inference/v1/generate", json=asked)
        last = (events_of(response.text)[-2] if stream else response.json())["choices"][0]
        check(model, made, npy(last["routed_experts"]))
    sampling = {"max_new_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    for stream in (False, True):
        asked = {
            "input_ids": PROMPT,
            "sampling_params": sampling,
            "return_routed_experts": True,
            "stream": stream,
        }
        response = await http.post("/generate", json=asked)
        meta = (events_of(response.text)[-2] if stream else response.json())["meta_info"]
        ids = np.frombuffer(b64decode(meta["routed_experts"]), "<i4")
        check(model, made, lambda ids=ids: ids.reshape(-1, LAYERS, TOP_K))  # type: ignore[misc]
    # A stop string cuts the rows with the tokens.
    text = (await http.post("/detokenize", json={"tokens": made[:4]})).json()["prompt"]
    (choice,) = (await ask(http, **greedily(stop=[text], skip_special_tokens=False)))["choices"]
    stopped = choice["token_ids"]  # bytes that are no letter are shown once it is sure
    assert (choice["finish_reason"], stopped) == ("stop", made[: len(stopped)])
    assert len(stopped) < TOKENS
    check(model, stopped, npy(choice["routed_experts"]))


async def test_a_killed_worker_costs_no_row(plane: Plane, http: httpx.AsyncClient, model: Path) -> None:
    workers = await spawned(plane, model, {"engine": "hf"}, {"engine": "hf"})
    async with Streaming(http, **greedily(max_tokens=LONG, migrate=True)) as stream:
        await stream.until(lambda stream: len(stream.tokens) >= 10)
        next(one for one in workers if one.instance_id == stream.last["instance_id"]).kill()
        await stream.end()
    assert stream.error is None
    assert (len(stream.tokens), len(stream.last["instances"])) == (LONG, 2)
    check(model, stream.tokens, npy(stream.last["routed_experts"]))


@pytest.mark.engines("sglang")
@pytest.mark.timeout(400)
async def test_sglang_returns_routed_experts_on_every_route(plane: Plane, http: httpx.AsyncClient) -> None:
    # To SGLang each layer of such a model has experts.
    model = make_moe_model(plane.tmp / "moe", dense=[])
    arguments = {"engine": "sglang", "context_length": 2048, "enable_return_routed_experts": "true"}
    (worker,) = await spawned(plane, model, arguments)
    await every_route(http, model, worker.instance_id)
    for field, more in (("stop", {"stop": ["a"]}), ("stop_token_ids", {"stop_token_ids": [9]})):
        refused = await http.post("/v1/completions", json=greedily(**more))
        assert error_of(refused, 501)["field"] == field
    # Beside an engine that can, the request is that one's.
    able = plane.spawn(ready=False, engine="hf", model=model)
    await asyncio.to_thread(able.wait_ready, START_S)
    await ready(plane, 2)
    for more in ({"stop": ["no such text"]}, {"stop_token_ids": [9]}):
        for _ in range(3):
            reply = await ask(http, **greedily(**more))
            (choice,) = reply["choices"]
            assert choice["instance_id"] == able.instance_id
            check(model, choice["token_ids"], npy(choice["routed_experts"]))


async def test_a_model_without_experts_refuses_by_name(plane: Plane, http: httpx.AsyncClient) -> None:
    plane.spawn()
    for body, field in (
        ({"return_routed_experts": True}, "return_routed_experts"),
        ({"nvext": {"return_routed_experts": True}}, "return_routed_experts"),
    ):
        error = error_of(await http.post("/v1/completions", json={"prompt_token_ids": [5], **body}), 501)
        assert error["field"] == field
        assert "no experts" in error["message"]
