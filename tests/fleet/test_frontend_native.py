"""vLLM's and SGLang's own generation routes over real worker processes with the fake engine."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from frontend.completions.native_bodies import plan_sglang, plan_vllm
from frontend.completions.plans import Plan, plan_chat, plan_completion
from rl_plane.protocol.generation import ALL_THAT_FITS
from tests.support.frontend_process import (
    PROMPT,
    error_of,
    events_of,
    http,
    next_event,
    post,
    state_of,
    tokens_under,
    update,
)
from worker.engines.fake.adapter import fake_logprob, fake_prompt_logprobs

if TYPE_CHECKING:
    from tests.conftest import Plane

__all__ = ["http"]

VLLM, SGLANG = "/inference/v1/generate", "/generate"
MANY_TOKENS = 4000
"""They take 40 s at 0.01 s for each token, unless their reader leaves."""


async def streamed(http: httpx.AsyncClient, path: str, **body: Any) -> list[Any]:
    response = await http.post(path, json={**body, "stream": True})
    *events, done = events_of(response.text)
    assert done == "[DONE]"
    return events


async def first_events(http: httpx.AsyncClient, path: str, **body: Any) -> list[Any]:
    """The first two events of a stream, which the caller leaves then."""
    async with http.stream("POST", path, json={**body, "stream": True}) as response:
        lines = response.aiter_lines()
        return [await next_event(lines) for _ in range(2)]


async def test_vllms_generate_gives_the_same_tokens_whole_and_streamed(
    plane: Plane, http: httpx.AsyncClient
) -> None:
    worker = plane.spawn(token_delay_s=0.01)
    version = await update(plane, 1)
    digest = version["digest"]
    tokens, made = tokens_under(digest, 0, 4), [fake_logprob(digest, PROMPT, place) for place in range(4)]
    sampling = {"max_tokens": 4, "logprobs": 1, "prompt_logprobs": 0, "n": 2, "min_p": 0.0, "detokenize": False}
    body = {"token_ids": PROMPT, "sampling_params": sampling, "request_id": "mine", "return_token_ids": True}
    reply = await post(http, VLLM, **body)
    assert (reply["request_id"], reply["prompt_token_ids"]) == ("mine", PROMPT)
    for index, choice in enumerate(reply["choices"]):
        assert (choice["index"], choice["token_ids"], choice["finish_reason"]) == (index, tokens, "length")
        rows = choice["logprobs"]["content"]
        assert [row["token_id"] for row in rows] == tokens
        assert [row["logprob"] for row in rows] == pytest.approx(made)
        (span,) = choice["weight_versions"]
        assert (span["version"], span["start"], span["end"]) == ("step_1", 0, 4)
        assert choice["instance_id"] == worker.instance_id
    scored = fake_prompt_logprobs(digest, PROMPT)
    expected = [
        None if value is None else {str(token): {"logprob": value, "rank": 1, "decoded_token": None}}
        for token, value in zip(PROMPT, scored, strict=True)
    ]
    assert reply["prompt_logprobs"] == expected
    *chunks, last = await streamed(http, VLLM, **body, stream_options={"include_usage": True})
    assert (last["choices"], last["usage"]) == ([], reply["usage"])
    assert [chunk["prompt_token_ids"] for chunk in chunks if "prompt_token_ids" in chunk] == [PROMPT]
    assert [chunk["prompt_logprobs"] for chunk in chunks if "prompt_logprobs" in chunk] == [expected]
    for index, whole in enumerate(reply["choices"]):
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert [token for one in mine for token in one["token_ids"]] == tokens
        assert [row for one in mine for row in one["logprobs"]["content"]] == whole["logprobs"]["content"]
        assert mine[-1]["weight_versions"] == whole["weight_versions"]
    # A reply that is far from its end has sent tokens in two events.
    long = {"max_tokens": MANY_TOKENS}
    first, second = [
        event["choices"][0] for event in await first_events(http, VLLM, token_ids=PROMPT, sampling_params=long)
    ]
    assert first["token_ids"]
    assert second["token_ids"]
    begun = [*first["token_ids"], *second["token_ids"]]
    assert len(begun) < MANY_TOKENS
    assert begun == tokens_under(digest, 0, len(begun))
    assert first["finish_reason"] is second["finish_reason"] is None
    stop = await post(http, VLLM, token_ids=PROMPT, sampling_params={"stop_token_ids": [tokens[1]]})
    assert (stop["choices"][0]["token_ids"], stop["choices"][0]["finish_reason"]) == (tokens[:2], "stop")
    assert stop["choices"][0]["logprobs"] is None


async def test_sglangs_generate_gives_the_same_tokens_whole_and_streamed(
    plane: Plane, http: httpx.AsyncClient
) -> None:
    worker = plane.spawn(token_delay_s=0.01)
    digest = (await update(plane, 1))["digest"]
    tokens, made = tokens_under(digest, 0, 4), [fake_logprob(digest, PROMPT, place) for place in range(4)]
    sampling = {"max_new_tokens": 4, "temperature": 1.0, "skip_special_tokens": False, "no_stop_trim": True}
    body = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True, "rid": "mine"}
    reply = await post(http, SGLANG, **body)
    meta = reply["meta_info"]
    assert (reply["output_ids"], reply["text"]) == (tokens, "".join(f" t{token}" for token in tokens))
    assert meta["output_token_logprobs"] == [
        [pytest.approx(one), token, None] for one, token in zip(made, tokens, strict=True)
    ]
    assert (meta["id"], meta["prompt_tokens"], meta["completion_tokens"]) == ("mine", 3, 4)
    assert meta["finish_reason"] == {"type": "length", "length": 4}
    assert (meta["weight_version"], meta["instance_id"]) == ("step_1", worker.instance_id)
    assert meta["input_token_logprobs"] == []
    twice = await asyncio.gather(*(streamed(http, SGLANG, **body) for _ in range(2)))
    assert [events[-1] for events in twice] == [{"index": 0, **reply}] * 2
    events = twice[0]
    assert all(event["output_ids"] == tokens[: len(event["output_ids"])] for event in events)
    assert all(event["meta_info"]["finish_reason"] is None for event in events[:-1])
    # A reply that is far from its end has sent tokens in two events.
    long = {"max_new_tokens": MANY_TOKENS, "temperature": 1.0}
    first, second = await first_events(http, SGLANG, input_ids=PROMPT, sampling_params=long)
    assert 0 < len(first["output_ids"]) < len(second["output_ids"]) < MANY_TOKENS
    assert second["output_ids"] == tokens_under(digest, 0, len(second["output_ids"]))
    assert first["meta_info"]["finish_reason"] is second["meta_info"]["finish_reason"] is None
    scored = await post(http, SGLANG, **body, logprob_start_len=0, return_prompt_token_ids=True)
    rows = zip(fake_prompt_logprobs(digest, PROMPT), PROMPT, strict=True)
    assert scored["meta_info"]["input_token_logprobs"] == [[value, token, None] for value, token in rows]
    assert scored["prompt_token_ids"] == PROMPT
    several = await post(http, SGLANG, text="abc", sampling_params={"n": 2, "max_new_tokens": 1})
    assert [len(one["output_ids"]) for one in several] == [1, 1]
    assert len({one["meta_info"]["id"] for one in several}) == 2
    stop = await post(http, SGLANG, input_ids=PROMPT, sampling_params={"stop_token_ids": [tokens[1]]})
    assert (stop["output_ids"], stop["meta_info"]["finish_reason"]) == (
        tokens[:2],
        {"type": "stop", "matched": tokens[1]},
    )


async def test_a_stop_string_ends_the_tokens_and_is_named_as_the_reason(
    plane: Plane, http: httpx.AsyncClient
) -> None:
    plane.spawn()
    tokens = tokens_under((await update(plane, 1))["digest"], 0, 4)
    stop = f"{tokens[2]}"[:1]
    last = next(place for place, token in enumerate(tokens) if stop in f"{token}")
    text = "".join(f" t{token}" for token in tokens)
    sampling = {"max_tokens": 4, "stop": stop}
    (choice,) = (await post(http, VLLM, token_ids=PROMPT, sampling_params=sampling))["choices"]
    assert (choice["token_ids"], choice["finish_reason"], choice["stop_reason"]) == (
        tokens[: last + 1],
        "stop",
        stop,
    )
    assert (await streamed(http, VLLM, token_ids=PROMPT, sampling_params=sampling))[-1]["choices"][0][
        "stop_reason"
    ] == stop
    for trimmed in (True, False):
        asked = {"max_new_tokens": 4, "stop": ["\x00", stop], "no_stop_trim": not trimmed}
        reply = await post(http, SGLANG, input_ids=PROMPT, sampling_params=asked)
        assert (reply["output_ids"], reply["text"]) == (
            tokens[: last + 1],
            text[: text.index(stop) + (not trimmed)],
        )
        assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}


async def test_every_route_gives_the_likeliest_tokens(plane: Plane, http: httpx.AsyncClient) -> None:
    plane.spawn()
    digest = (await update(plane, 1))["digest"]
    tokens, made = tokens_under(digest, 0, 4), [fake_logprob(digest, PROMPT, place) for place in range(4)]
    # The fake's: the token, then the tokens that follow it in the vocabulary.
    tops = [
        [((token + place) % 512, pytest.approx(value - place)) for place in range(3)]
        for token, value in zip(tokens, made, strict=True)
    ]
    ids = {"prompt_token_ids": PROMPT, "max_tokens": 4, "return_tokens_as_token_ids": True}
    calls: list[tuple[str, dict[str, Any], Any]] = [
        ("/v1/completions", {**ids, "logprobs": 3}, _completions_tops),
        ("/v1/chat/completions", {**ids, "logprobs": True, "top_logprobs": 3}, _chat_tops),
        (VLLM, {"token_ids": PROMPT, "sampling_params": {"max_tokens": 4, "logprobs": 3}}, _vllm_tops),
    ]
    for path, body, read in calls:
        assert read((await post(http, path, **body))["choices"]) == tops
        events = await streamed(http, path, **body)
        assert read([event["choices"][0] for event in events]) == tops
    asked = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 4}, "return_logprob": True, "rid": "mine"}
    reply = await post(http, SGLANG, **asked, top_logprobs_num=3)
    rows = [[(token, value) for value, token, _ in top] for top in reply["meta_info"]["output_top_logprobs"]]
    assert rows == tops
    assert (await streamed(http, SGLANG, **asked, top_logprobs_num=3))[-1] == {"index": 0, **reply}


async def test_tokens_beside_logprobs_are_texts(plane: Plane, http: httpx.AsyncClient) -> None:
    """OpenAI's clients name no form of tokens."""
    plane.spawn()
    digest = (await update(plane, 1))["digest"]
    tokens = tokens_under(digest, 0, 4)
    names = [f" t{token}" for token in tokens]
    likeliest = [{f" t{(token + place) % 512}" for place in range(3)} for token in tokens]
    asked = {"prompt_token_ids": PROMPT, "max_tokens": 4}
    path, body = "/v1/completions", {**asked, "logprobs": 3}
    for parts in (
        (await post(http, path, **body))["choices"],
        [event["choices"][0] for event in await streamed(http, path, **body)],
    ):
        assert [name for part in parts for name in part["logprobs"]["tokens"]] == names
        assert [set(row) for part in parts for row in part["logprobs"]["top_logprobs"]] == likeliest
    path, body = "/v1/chat/completions", {**asked, "logprobs": True, "top_logprobs": 3}
    for parts in (
        (await post(http, path, **body))["choices"],
        [event["choices"][0] for event in await streamed(http, path, **body)],
    ):
        rows = [row for part in parts for row in part["logprobs"]["content"]]
        assert [row["token"] for row in rows] == names
        assert [bytes(row["bytes"]).decode() for row in rows] == names
        assert [{one["token"] for one in row["top_logprobs"]} for row in rows] == likeliest


def _id(name: str) -> int:
    return int(name.removeprefix("token_id:"))


def _completions_tops(parts: list[Any]) -> Any:
    rows = [top for part in parts for top in part["logprobs"]["top_logprobs"]]
    return [[(_id(name), value) for name, value in top.items()] for top in rows]


def _chat_tops(parts: list[Any]) -> Any:
    rows = [row for part in parts for row in part["logprobs"]["content"]]
    return [[(_id(one["token"]), one["logprob"]) for one in row["top_logprobs"]] for row in rows]


def _vllm_tops(parts: list[Any]) -> Any:
    rows = [row for part in parts for row in part["logprobs"]["content"]]
    assert all([one["rank"] for one in row["top_logprobs"]] == [1, 2, 3] for row in rows)
    return [[(one["token_id"], one["logprob"]) for one in row["top_logprobs"]] for row in rows]


def scoring(input_ids: Any, start: int) -> dict[str, Any]:
    """The body with which miles (prefill_logprobs.py) and slime score a prompt, single and batched."""
    return {
        "input_ids": input_ids,
        "sampling_params": {"top_p": 1.0, "max_new_tokens": 0, "temperature": 0, "skip_special_tokens": False},
        "return_logprob": True,
        "logprob_start_len": start,
    }


def scored_rows(digest: str, prompt: list[int], start: int) -> list[list[Any]]:
    """SGLang's `input_token_logprobs`, of which the first value is always null."""
    rows = zip(fake_prompt_logprobs(digest, prompt), prompt, strict=True)
    return [[None if place == start else value, token, None] for place, (value, token) in enumerate(rows)][start:]


async def test_scoring_prompts_makes_no_tokens(plane: Plane, http: httpx.AsyncClient) -> None:
    worker = plane.spawn()
    digest, other = (await update(plane, 1))["digest"], [9, 10, 11, 12]
    for start in (0, 1, len(PROMPT) - 1, len(PROMPT)):
        outputs = await post(http, SGLANG, **scoring([PROMPT, other], start))
        single = await post(http, SGLANG, **scoring(PROMPT, start))
        for prompt, output in ((PROMPT, outputs[0]), (other, outputs[1]), (PROMPT, single)):
            meta = output["meta_info"]
            assert meta["input_token_logprobs"] == scored_rows(digest, prompt, start)
            assert (output["text"], output["output_ids"], meta["output_token_logprobs"]) == ("", [], [])
            assert (meta["prompt_tokens"], meta["completion_tokens"]) == (len(prompt), 0)
            assert (meta["finish_reason"], meta["weight_version"]) == ({"type": "length", "length": 0}, "step_1")
            (span,) = meta["weight_versions"]
            assert (span["start"], span["end"], span["digest"], meta["instance_id"]) == (
                0,
                0,
                digest,
                worker.instance_id,
            )
    (event,) = await streamed(http, SGLANG, **scoring(PROMPT, 1))
    assert event["meta_info"]["input_token_logprobs"] == scored_rows(digest, PROMPT, 1)
    assert (event["output_ids"], event["text"]) == ([], "")


async def test_a_worker_that_dies_while_it_scores_is_replaced(plane: Plane, http: httpx.AsyncClient) -> None:
    plane.spawn(instance_id="f" * 16)
    victim = plane.spawn(token_delay_s=60, instance_id="0" * 16)
    client = await plane.client()
    await client.wait_for(2)
    digest = (await update(plane, 1))["digest"]

    async def it_scores() -> bool:
        state = await state_of(client, victim.instance_id)
        return int(state["running"]) + int(state["waiting"]) > 0

    # Of four equal loads one at least goes to the victim.
    tasks = [asyncio.create_task(post(http, SGLANG, **scoring([PROMPT, PROMPT], 1))) for _ in range(2)]
    await plane.until(it_scores)
    victim.kill()
    for outputs in await asyncio.gather(*tasks):
        for output in outputs:
            assert output["meta_info"]["input_token_logprobs"] == scored_rows(digest, PROMPT, 1)
            assert output["meta_info"]["instance_id"] == "f" * 16


async def test_each_prompt_of_a_list_gets_the_tokens_that_it_gets_alone(
    plane: Plane, http: httpx.AsyncClient
) -> None:
    plane.spawn()
    await update(plane, 1)
    sampling = {"max_new_tokens": 3, "n": 2, "sampling_seed": 5}
    for field, prompts in (("input_ids", [PROMPT, [9, 10, 11, 12]]), ("text", ["ab", "c"])):
        alone = [
            await post(http, SGLANG, **{field: one}, sampling_params=sampling, return_logprob=True)
            for one in prompts
        ]
        body = {field: prompts, "sampling_params": sampling, "return_logprob": True}
        replies = await post(http, SGLANG, **body)
        assert [one["output_ids"] for one in replies] == [
            one["output_ids"] for several in alone for one in several
        ]
        assert [one["meta_info"]["prompt_tokens"] for one in replies] == [
            len(prompt) for prompt in prompts for _ in range(2)
        ]
        last = {event["index"]: event for event in await streamed(http, SGLANG, **body)}
        assert [last[index]["output_ids"] for index in range(4)] == [one["output_ids"] for one in replies]
        (only,) = await post(http, SGLANG, **{field: prompts[:1]}, sampling_params={"max_new_tokens": 3})
        assert only["output_ids"] == replies[0]["output_ids"]
    bad = {"input_ids": [PROMPT, [1 << 20]], "sampling_params": {"n": 2}}
    assert error_of(await http.post(SGLANG, json=bad), 400)["field"] == "input_ids.1"


async def test_an_unsupported_field_is_refused_by_its_name(http: httpx.AsyncClient) -> None:
    """The error comes before any worker is asked: there is no worker."""
    ids = {"token_ids": PROMPT, "sampling_params": {}}
    refused: list[tuple[str, dict[str, Any], int, str]] = [
        (VLLM, {**ids, "sampling_params": {"bad_words": ["x"]}}, 501, "sampling_params.bad_words"),
        (VLLM, {**ids, "sampling_params": {"stop": [""]}}, 400, "sampling_params.stop.0"),
        (VLLM, {**ids, "sampling_params": {"logprobs": -1}}, 501, "sampling_params.logprobs"),
        (VLLM, {**ids, "sampling_params": {"logprobs": 21}}, 400, "sampling_params.logprobs"),
        (VLLM, {**ids, "sampling_params": {"prompt_logprobs": -1}}, 400, "sampling_params.prompt_logprobs"),
        (
            VLLM,
            {**ids, "sampling_params": {"prompt_logprobs": 2}, "stream": True},
            400,
            "sampling_params.prompt_logprobs",
        ),
        (SGLANG, {"input_ids": PROMPT, "top_logprobs_num": 21}, 400, "top_logprobs_num"),
        (SGLANG, {"input_ids": PROMPT, "top_logprobs_num": 2}, 400, "top_logprobs_num"),
        (VLLM, {**ids, "features": {"mm_hashes": {}}}, 501, "features"),
        (VLLM, {**ids, "output_mode": "text"}, 501, "output_mode"),
        (VLLM, {"token_ids": PROMPT}, 400, "sampling_params"),
        (VLLM, {**ids, "token_ids": []}, 400, "token_ids"),
        (VLLM, {**ids, "sampling_params": {"max_tokens": 0}}, 400, "sampling_params.max_tokens"),
        (VLLM, {**ids, "sampling_params": {"seed": (1 << 63) - 2, "n": 3}}, 400, "sampling_params.seed"),
        (VLLM, {**ids, "stream_options": {}}, 400, "stream_options"),
        (SGLANG, {"input_ids": [PROMPT, []]}, 400, "input_ids.1"),
        (SGLANG, {"text": ["a", ""]}, 400, "text.1"),
        (SGLANG, {"text": ["a"], "rid": ["1"]}, 501, "rid"),
        (SGLANG, {"text": ["a"], "sampling_params": [{}]}, 501, "sampling_params"),
        (SGLANG, {"text": "a", "sampling_params": {"stop_regex": "a"}}, 501, "sampling_params.stop_regex"),
        (SGLANG, {"input_ids": PROMPT, "return_hidden_states": True}, 501, "return_hidden_states"),
        (SGLANG, {"input_ids": PROMPT, "sampling_params": {"regex": "\0"}}, 400, "sampling_params.regex"),
        (SGLANG, {"input_ids": PROMPT, "logprob_start_len": len(PROMPT) + 1}, 400, "logprob_start_len"),
        (SGLANG, {"input_ids": PROMPT, "logprob_start_len": -2}, 400, "logprob_start_len"),
        (
            SGLANG,
            {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": -1}},
            400,
            "sampling_params.max_new_tokens",
        ),
        (SGLANG, {"input_ids": PROMPT, "text": "a"}, 400, "input_ids"),
        (SGLANG, {"sampling_params": {}}, 400, "input_ids"),
        (SGLANG, {"input_ids": PROMPT, "sampling_params": {"top_p": 2}}, 400, "sampling_params.top_p"),
        (SGLANG, {"input_ids": PROMPT, "sampling_params": {"temperature": 3}}, 400, "sampling_params.temperature"),
        (SGLANG, {"input_ids": PROMPT, "unheard_of": 1}, 400, "unheard_of"),
    ]
    for path, body, status, field in refused:
        error = error_of(await http.post(path, json=body), status)
        assert (error["field"], bool(error["fix"])) == (field, True)


async def test_a_workers_refusal_names_the_field_of_the_caller(plane: Plane, http: httpx.AsyncClient) -> None:
    plane.spawn()
    await update(plane, 1)
    refused: list[tuple[str, dict[str, Any], str]] = [
        (VLLM, {"token_ids": PROMPT, "sampling_params": {"max_tokens": 5000}}, "sampling_params.max_tokens"),
        (VLLM, {"token_ids": [1 << 20], "sampling_params": {}}, "token_ids"),
        (
            SGLANG,
            {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 5000}},
            "sampling_params.max_new_tokens",
        ),
        (
            SGLANG,
            {"input_ids": PROMPT, "sampling_params": {"min_new_tokens": 200}},
            "sampling_params.min_new_tokens",
        ),
        (SGLANG, {"input_ids": [1 << 20]}, "input_ids"),
    ]
    for path, body, field in refused:
        for stream in (False, True):
            assert error_of(await http.post(path, json={**body, "stream": stream}), 400)["field"] == field
    for path, body, field in (
        (VLLM, {"token_ids": PROMPT, "sampling_params": {"structured_outputs": {"choice": ["a"]}}}, "choice"),
        (SGLANG, {"input_ids": PROMPT, "sampling_params": {"ebnf": 'root ::= "a"'}}, "ebnf"),
    ):
        assert error_of(await http.post(path, json=body), 501)["field"].endswith(field)


async def test_fields_without_effect_are_accepted_but_checked(plane: Plane, http: httpx.AsyncClient) -> None:
    """The bodies are those of prime-rl's renderers (`priority`), OpenAI's client (`metadata`) and slime."""
    plane.spawn()
    tokens = tokens_under((await update(plane, 1))["digest"], 0, 2)
    ids = {"prompt_token_ids": PROMPT, "max_tokens": 2, "return_token_ids": True}
    vllm = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 2}}
    for more in ({"priority": 1}, {"metadata": {"step": "7"}}, {"spaces_between_special_tokens": False}):
        for path in ("/v1/completions", "/v1/chat/completions"):
            (choice,) = (await post(http, path, **ids, **more))["choices"]
            assert choice["token_ids"] == tokens
        (choice,) = (await post(http, VLLM, **vllm, **more))["choices"]
        assert choice["token_ids"] == tokens
    for sampling in ({"spaces_between_special_tokens": False}, {"unheard_of": 1}, {"guided_regex": "a"}):
        asked = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 2, **sampling}}
        (choice,) = (await post(http, VLLM, **asked))["choices"]
        assert choice["token_ids"] == tokens
    body: dict[str, Any] = {"max_new_tokens": 2, "spaces_between_special_tokens": False}
    reply = await post(http, SGLANG, input_ids=PROMPT, sampling_params=body, priority=3)
    assert reply["output_ids"] == tokens
    refused: list[tuple[str, dict[str, Any], int, str]] = [
        ("/v1/completions", {**ids, "priority": "high"}, 400, "priority"),
        ("/v1/completions", {**ids, "metadata": [1]}, 400, "metadata"),
        ("/v1/completions", {**ids, "spaces_between_special_tokens": 1}, 400, "spaces_between_special_tokens"),
        (VLLM, {**vllm, "priority": True}, 400, "priority"),
        (
            VLLM,
            {"token_ids": PROMPT, "sampling_params": {"flat_logprobs": 1}},
            501,
            "sampling_params.flat_logprobs",
        ),
        (VLLM, {"token_ids": PROMPT, "sampling_params": [1]}, 400, "sampling_params"),
        (
            SGLANG,
            {"input_ids": PROMPT, "sampling_params": {"unheard_of": 1}},
            400,
            "sampling_params.unheard_of",
        ),
    ]
    for path, wrong, status, field in refused:
        error = error_of(await http.post(path, json=wrong), status)
        assert (error["field"], bool(error["fix"])) == (field, True)


def test_a_length_that_the_caller_did_not_choose_is_marked() -> None:
    """The mark allows fewer tokens where there is no room for the default length."""
    chosen: list[tuple[Plan, Plan]] = [
        (
            plan_vllm({"token_ids": [5], "sampling_params": {}}, "id"),
            plan_vllm({"token_ids": [5], "sampling_params": {"max_tokens": 200}}, "id"),
        ),
        (
            plan_sglang({"text": ["a", "b"]}, "id"),
            plan_sglang({"text": ["a", "b"], "sampling_params": {"max_new_tokens": 200}}, "id"),
        ),
        (
            plan_chat({"prompt_token_ids": [5]}, "id"),
            plan_chat({"prompt_token_ids": [5], "max_completion_tokens": 200}, "id"),
        ),
        (
            plan_completion({"prompt": "a"}, "id"),
            plan_completion({"prompt": "a", "max_tokens": 200}, "id"),
        ),
    ]
    for (default, own), most in zip(chosen, (ALL_THAT_FITS, 128, 256, 16), strict=True):
        assert ({one.max_tokens for one in default.requests}, default.any_length) == ({most}, True)
        assert ({one.max_tokens for one in own.requests}, own.any_length) == ({200}, False)
