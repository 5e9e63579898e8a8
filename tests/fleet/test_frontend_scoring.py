"""Scored and echoed prompts over real worker processes with the fake engine."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from frontend.completions.call import GenerationCall
from frontend.completions.completion_routes import OPENAI
from frontend.main import Frontend
from frontend.routing.attempts import Accepted
from frontend.routing.engine_client import Event
from frontend.server.options import FrontendOptions
from rl_plane.errors import InvalidRequest
from rl_plane.protocol.generation import MAX_PROMPT_TOPS, GenerateDelta
from rl_plane.protocol.prompt_tops import PromptTops
from rl_plane.protocol.versions import WeightVersion
from tests.support.frontend_process import PROMPT, ask, error_of, events_of, http, tokens_under, update
from tests.support.openai_plans import completion
from worker.engines.fake.adapter import fake_logprob, fake_prompt_logprobs

__all__ = ["http"]

if TYPE_CHECKING:
    from tests.conftest import Plane

pytestmark = [pytest.mark.slow, pytest.mark.parallel]

VLLM, SGLANG = "/inference/v1/generate", "/generate"
TEXTS = [f" t{token}" for token in PROMPT]


def rows_under(digest: str, prompt: list[int], count: int) -> list[dict[str, Any] | None]:
    """The fake engine's likeliest tokens are the prompt's own, and the tokens that follow it in the vocabulary."""
    return [
        None
        if value is None
        else {
            str(token + place): {
                "logprob": pytest.approx(value - place),
                "rank": place + 1,
                "decoded_token": f" t{token + place}",
            }
            for place in range(max(1, count))
        }
        for token, value in zip(prompt, fake_prompt_logprobs(digest, prompt), strict=True)
    ]


async def test_every_route_gives_the_likeliest_tokens_of_a_prompt(plane: Plane, http: httpx.AsyncClient) -> None:
    plane.spawn()
    digest = (await update(plane, 1))["digest"]
    other = [*PROMPT, 9]
    reply = await ask(http, prompt_token_ids=None, prompt=[PROMPT, other], n=2, max_tokens=1, prompt_logprobs=5)
    expected = [rows_under(digest, PROMPT, 5)] * 2 + [rows_under(digest, other, 5)] * 2
    assert [choice["prompt_logprobs"] for choice in reply["choices"]] == expected
    sampling = {"max_tokens": 1, "prompt_logprobs": 5, "n": 2}
    generated = (await http.post(VLLM, json={"token_ids": PROMPT, "sampling_params": sampling})).json()
    assert generated["prompt_logprobs"] == expected[0]
    message = {"messages": [], "prompt_token_ids": PROMPT, "max_tokens": 1, "prompt_logprobs": 5}
    assert (await http.post("/v1/chat/completions", json=message)).json()["prompt_logprobs"] == expected[0]
    body: dict[str, Any] = {"input_ids": other, "return_logprob": True, "logprob_start_len": 1}
    body |= {"top_logprobs_num": 2, "sampling_params": {"max_new_tokens": 0}}
    meta = (await http.post(SGLANG, json=body)).json()["meta_info"]
    scored = fake_prompt_logprobs(digest, other)
    assert meta["input_top_logprobs"] == [
        None,
        *(
            [[pytest.approx((scored[place] or 0.0) - number), other[place] + number, None] for number in range(2)]
            for place in (2, 3)
        ),
    ]


async def test_the_likeliest_tokens_of_a_long_prompt_come_up_to_their_bound(
    plane: Plane, http: httpx.AsyncClient
) -> None:
    """They take 20 messages, and the largest reply of one call."""
    plane.spawn(max_model_len=20000, vocab_size=100_000)
    digest = (await update(plane, 1))["digest"]
    prompt = [3 + number % 90_000 for number in range(16384)]
    reply = await ask(http, prompt_token_ids=prompt, prompt_logprobs=64, max_tokens=1)
    rows = reply["choices"][0]["prompt_logprobs"]
    assert (len(rows), rows[0], rows[-1]) == (len(prompt), None, rows_under(digest, prompt, 64)[-1])
    assert all(len(row) == 64 for row in rows[1:])
    longer = {"prompt_token_ids": [*prompt, 5], "prompt_logprobs": 64}
    assert error_of(await http.post("/v1/completions", json=longer), 400)["param"] == "prompt_logprobs"
    # An estimate is too low for a text of one token to a byte. The worker counts.
    text = {"prompt": "\u00e9" * 10_000, "prompt_logprobs": 64, "max_tokens": 1}
    error = error_of(await http.post("/v1/completions", json=text), 400)
    assert (error["param"], "1280000" in error["message"]) == ("prompt_logprobs", True)
    # Two texts pass both, and the frontend counts them together.
    texts = {**text, "prompt": ["\u00e9" * 5_000] * 2}
    error = error_of(await http.post("/v1/completions", json=texts), 400)
    assert error["param"] == "prompt_logprobs"


async def test_a_number_beyond_an_engines_limit_goes_to_another_or_is_refused(
    plane: Plane, http: httpx.AsyncClient
) -> None:
    narrow, wide = plane.spawn(max_prompt_top_logprobs=2), plane.spawn(max_prompt_top_logprobs=8)
    for _ in range(4):
        (choice,) = (await ask(http, prompt_logprobs=8, max_tokens=1))["choices"]
        assert choice["instance_id"] == wide.instance_id
    pinned = {"nvext": {"instance_id": narrow.instance_id}}
    assert (await ask(http, prompt_logprobs=2, max_tokens=1, **pinned))["choices"]
    for body, most in (({"prompt_logprobs": 3, **pinned}, 2), ({"prompt_logprobs": 9}, 8)):
        error = error_of(await http.post("/v1/completions", json={"prompt_token_ids": PROMPT, **body}), 400)
        assert (error["code"], error["param"], error["limit"]) == ("invalid_request", "prompt_logprobs", most)
        assert str(most) in error["fix"]
    sampling = {"prompt_logprobs": 9}
    response = await http.post(VLLM, json={"token_ids": PROMPT, "sampling_params": sampling})
    assert error_of(response, 400)["param"] == "sampling_params.prompt_logprobs"
    echoed = {"prompt_token_ids": PROMPT, "echo": True, "logprobs": 9}
    assert error_of(await http.post("/v1/completions", json=echoed), 400)["param"] == "logprobs"


WRONG = """
import worker.engines.fake.adapter as fake
honest = fake.FakeEngine.generate
async def wrong(self, request):
    async for delta in honest(self, request):
        tops = delta.prompt_tops and CHANGED
        yield delta.model_copy(update={"prompt_tops": tops})
fake.FakeEngine.generate = wrong
"""


@pytest.mark.parametrize(
    "changed",
    [
        "None",
        "delta.prompt_tops.cut(0, 1)",
        "delta.prompt_tops.model_copy(update={'count': 1})",
        "delta.prompt_tops.model_copy(update={'logprobs': b''})",
    ],
)
async def test_a_worker_that_sends_no_right_rows_is_an_error(
    plane: Plane, http: httpx.AsyncClient, changed: str
) -> None:
    plane.spawn(patch=WRONG.replace("CHANGED", changed))
    body = {"prompt_token_ids": PROMPT, "prompt_logprobs": 2}
    error = error_of(await http.post("/v1/completions", json=body), 500)
    assert "likeliest tokens" in error["message"]
    assert (await ask(http))["choices"]


async def test_only_the_rows_of_the_worker_that_a_choice_ends_on_count(
    plane: Plane,
) -> None:
    """The rows of one choice fit the reply, those of two do not."""
    plane.spawn()
    some = bytes(4 * (MAX_PROMPT_TOPS * 2 // 3))
    rows = GenerateDelta(token_ids=[], prompt_tops=PromptTops(count=1, ranks=some, token_ids=some, logprobs=some))

    class Moved(GenerationCall):
        """The first worker is lost after it has scored the prompt."""

        async def _choice_events(self, index: int) -> AsyncGenerator[Event, None]:
            for instance_id in ("a" * 16, "b" * 16):
                yield Accepted(instance_id, "i", WeightVersion("r", 0, "initial", "blake3:0"))
                yield rows
            yield GenerateDelta(token_ids=[1], text="x", finish_reason="length")

    options = FrontendOptions(plane.url, plane.namespace, plane.component)
    async with Frontend.running(options) as running:
        (component,) = running.components
        await plane.until(component.status.admitted)
        reply = json.loads(await Moved(component.generation, completion(), OPENAI).whole())
        assert (reply["choices"][0]["text"], reply["choices"][0]["instance_id"]) == ("x", "b" * 16)
        with pytest.raises(InvalidRequest, match="likeliest tokens"):
            await Moved(component.generation, completion(n=2), OPENAI).whole()


async def test_an_echoed_prompt_comes_before_the_text_with_its_logprobs(
    plane: Plane, http: httpx.AsyncClient
) -> None:
    plane.spawn()
    digest = (await update(plane, 1))["digest"]
    made = tokens_under(digest, 0, 2)
    scores = [*fake_prompt_logprobs(digest, PROMPT), *(fake_logprob(digest, PROMPT, place) for place in (0, 1))]
    names = [*TEXTS, *(f" t{token}" for token in made)]
    body = {"echo": True, "max_tokens": 2, "n": 2}
    reply = await ask(http, **body, logprobs=3)
    for choice in reply["choices"]:
        assert choice["text"] == "".join(names)
        told = choice["logprobs"]
        assert (told["tokens"], told["token_logprobs"]) == (names, [None, *map(pytest.approx, scores[1:])])
        assert told["text_offset"] == [0, 3, 6, 9, 9 + len(names[3])]
        assert told["top_logprobs"][0] is None
        assert list(told["top_logprobs"][1]) == [" t6", " t7", " t8"]
        assert choice["prompt_logprobs"] == rows_under(digest, PROMPT, 3)
    assert reply["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    *chunks, done = events_of(
        (await http.post("/v1/completions", json={"prompt": PROMPT, **body, "logprobs": 3, "stream": True})).text
    )
    assert done == "[DONE]"
    for index, choice in enumerate(reply["choices"]):
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert "".join(one["text"] for one in mine) == choice["text"]
        for name, values in choice["logprobs"].items():
            assert [value for one in mine for value in one["logprobs"][name]] == values
    plain = await ask(http, **body)
    assert [(one["text"], one["logprobs"]) for one in plain["choices"]] == [("".join(names), None)] * 2
    by_ids = await ask(http, **body, logprobs=0, return_token_ids=True)
    for choice in by_ids["choices"]:
        assert (choice["text"], choice["token_ids"]) == ("".join(names[3:]), made)
        assert choice["logprobs"]["tokens"] == names
    text = await ask(http, prompt_token_ids=None, prompt=["ab", "c"], **body)
    assert [one["text"].count(" t") for one in text["choices"]] == [4, 4, 3, 3]


async def test_a_prompt_alone_is_scored_and_echoed(plane: Plane, http: httpx.AsyncClient) -> None:
    """With `max_tokens: 0` the reply has no new token. An empty span says which weights have scored the prompt."""
    plane.spawn()
    version = await update(plane, 1)
    body = {"echo": True, "max_tokens": 0, "logprobs": 2}
    (choice,) = (reply := await ask(http, **body))["choices"]
    assert (choice["text"], choice["logprobs"]["tokens"]) == ("".join(TEXTS), TEXTS)
    assert choice["finish_reason"] == "length"
    scores = fake_prompt_logprobs(version["digest"], PROMPT)
    assert choice["logprobs"]["token_logprobs"] == [None, *map(pytest.approx, scores[1:])]
    assert reply["usage"]["completion_tokens"] == 0
    (span,) = choice["weight_versions"]
    assert (span["digest"], span["start"], span["end"]) == (version["digest"], 0, 0)
    response = await http.post("/v1/completions", json={"prompt": PROMPT, **body, "stream": True})
    chunk, done = events_of(response.text)
    assert (chunk["choices"][0]["text"], done) == ("".join(TEXTS), "[DONE]")
    assert chunk["choices"][0]["logprobs"] == choice["logprobs"]
    refused = error_of(await http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 0}), 400)
    assert (refused["param"], "echo" in refused["fix"]) == ("max_tokens", True)
