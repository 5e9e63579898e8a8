"""The replies of the OpenAI routes, whole and in chunks."""

from __future__ import annotations

from base64 import b64decode
from io import BytesIO
from typing import Any

import numpy
import pytest

from frontend.completions.native_bodies import plan_sglang, plan_vllm
from frontend.completions.native_replies import VllmChunks, sglang_whole, vllm_whole
from frontend.completions.openai_replies import Chunks, openai_error, whole
from frontend.completions.reply_choice import Choice
from frontend.routing.attempts import Accepted
from rl_plane.errors import InvalidRequest, PlaneError
from rl_plane.protocol.generation import (
    AdapterSpan,
    GenerateDelta,
    VersionSpan,
)
from rl_plane.protocol.routed_experts import RoutedExperts
from rl_plane.protocol.versions import WeightVersion
from tests.support.openai_plans import chat, completion


def _version(sequence: int, run: str = "r") -> WeightVersion:
    return WeightVersion(run, sequence, f"step_{sequence}", f"blake3:{sequence}")


def _span(sequence: int, start: int, end: int, **other: Any) -> VersionSpan:
    made = {"version": f"step_{sequence}", "sequence": sequence, "digest": f"blake3:{sequence}", "run": "r"}
    return VersionSpan(**{**made, **other}, start=start, end=end)


def _choice() -> Choice:
    choice = Choice(0)
    choice.take(Accepted("a" * 16, "lost", _version(1)))
    choice.take(GenerateDelta(token_ids=[], prompt_token_ids=[7, 8], spans=[_span(0, 0, 1)]))
    choice.take(Accepted("b" * 16, "i", _version(1)))
    first = [_span(1, 0, 1)]
    choice.take(GenerateDelta(token_ids=[1], logprobs=[-0.5], text="x", prompt_token_ids=[7, 8, 9], spans=first))
    last = GenerateDelta(
        token_ids=[2, 3], logprobs=[-1.0, -2.0], text="yz", finish_reason="stop", spans=[_span(1, 0, 3)]
    )
    choice.take(last)
    return choice


def test_sglangs_reply_leaves_out_the_experts_of_an_aborted_choice() -> None:
    plan = plan_sglang({"input_ids": [7, 8, 9], "return_routed_experts": True}, "id")
    choice = _choice()
    choice.finish_reason = "abort"
    reply = sglang_whole(plan, [choice], "m", 5)
    assert isinstance(reply, dict)
    assert "routed_experts" not in reply["meta_info"]


def test_a_whole_completion_has_its_tokens_logprobs_and_versions() -> None:
    reply = whole(completion(logprobs=0, return_token_ids=True), [_choice()], "m", 5)
    (choice,) = reply["choices"]
    assert choice["text"] == "xyz"
    assert choice["token_ids"] == [1, 2, 3]
    assert choice["logprobs"] == {
        "tokens": ["token_id:1", "token_id:2", "token_id:3"],
        "token_logprobs": [-0.5, -1.0, -2.0],
        "top_logprobs": [{"token_id:1": -0.5}, {"token_id:2": -1.0}, {"token_id:3": -2.0}],
        "text_offset": [0, 1, 1],
    }
    assert choice["weight_versions"] == [_span(1, 0, 3).model_dump(exclude_none=True)]
    assert choice["instance_id"] == "b" * 16
    assert reply["prompt_token_ids"] == [7, 8, 9]
    assert reply["usage"] == {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}
    version = {"run": "r", "sequence": 1, "label": "step_1", "digest": "blake3:1"}
    tokens = {"completion_token_ids": [1, 2, 3], "token_ids": [7, 8, 9]}
    assert reply["nvext"] == {"instance_id": "b" * 16, "incarnation": "i", "weight_version": version, **tokens}
    (one, other), plan = (_choice(), _choice()), completion(n=2, return_token_ids=True)
    other.token_ids = [4]
    other.logprobs, other.offsets = [-1.0], [0]
    assert whole(plan, [one, other], "m", 5)["nvext"]["completion_token_ids"] == [[1, 2, 3], [4]]


def test_a_whole_chat_has_no_fields_that_were_not_asked_for() -> None:
    reply = whole(chat(), [_choice()], "m", 5)
    (choice,) = reply["choices"]
    assert choice["message"] == {"role": "assistant", "content": "xyz"}
    assert choice["logprobs"] is None
    assert "token_ids" not in choice
    assert "prompt_token_ids" not in reply
    (row, *_) = whole(chat(logprobs=True), [_choice()], "m", 5)["choices"][0]["logprobs"]["content"]
    assert row == {"token": "token_id:1", "logprob": -0.5, "bytes": None, "top_logprobs": []}


def test_tokens_beside_logprobs_have_their_texts() -> None:
    choice, tops = Choice(0), [[(1, -0.5), (2, -1.0)], [(2, -0.25), (4, -9.0)]]
    texts = {"1": " a", "2": "é", "4": "\ufffd"}
    choice.take(
        GenerateDelta(
            token_ids=[1, 3], logprobs=[-0.5, -2.0], top_logprobs=tops, token_texts=texts, spans=[_span(1, 0, 2)]
        )
    )
    told = whole(completion(logprobs=2), [choice], "m", 5)["choices"][0]["logprobs"]
    assert told["tokens"] == [" a", "token_id:3"], "a token without a text has its id"
    assert told["top_logprobs"] == [
        {" a": -0.5, "é": -1.0},
        {"é": -0.25, "\ufffd": -9.0, "token_id:3": -2.0},
    ]
    first, second = whole(chat(logprobs=True, top_logprobs=2), [choice], "m", 5)["choices"][0]["logprobs"][
        "content"
    ]
    assert (first["token"], first["bytes"]) == (" a", [32, 97])
    assert first["top_logprobs"][1] == {"token": "é", "logprob": -1.0, "bytes": [0xC3, 0xA9]}
    assert (second["token"], second["bytes"]) == ("token_id:3", None)


def test_a_reply_never_shows_several_versions_as_one() -> None:
    choice = _choice()
    choice.spans = [_span(1, 0, 1), _span(2, 1, 3)]
    assert whole(completion(), [choice], "m", 5)["nvext"]["weight_version"] is None


def test_a_reply_names_the_adapter_beside_the_base() -> None:
    adapter = AdapterSpan(name="a", version="lora_2", sequence=2, digest="blake3:a")
    choice = _choice()
    choice.spans = [_span(1, 0, 3, adapter=adapter)]
    reply = whole(completion(), [choice], "a", 5)
    (told,) = reply["choices"][0]["weight_versions"]
    assert told == {**_span(1, 0, 3).model_dump(exclude_none=True), "adapter": adapter.model_dump()}
    assert reply["nvext"]["weight_version"]["sequence"] == 1
    assert reply["nvext"]["adapter"] == adapter.model_dump()
    other = adapter.model_copy(update={"sequence": 3})
    choice.spans = [_span(1, 0, 1, adapter=adapter), _span(1, 1, 3, adapter=other)]
    nvext = whole(completion(), [choice], "a", 5)["nvext"]
    assert (nvext["weight_version"], "adapter" in nvext) == (None, False)
    plan = completion(n=2).with_adapter("a")
    assert [request.adapter for request in plan.requests] == ["a", "a"]


def test_the_partial_tokens_of_a_choice_have_their_labels() -> None:
    choice = Choice(0)
    assert choice.partial()["weight_versions"] == []
    choice.take(GenerateDelta(token_ids=[1], spans=[_span(1, 0, 1)]))
    choice.take(GenerateDelta(token_ids=[2, 3]))
    assert choice.partial()["weight_versions"] == [_span(1, 0, 3).model_dump(exclude_none=True)]
    choice.take(GenerateDelta(token_ids=[4], spans=[_span(1, 0, 3), _span(2, 3, 4)]))
    choice.take(GenerateDelta(token_ids=[5]))
    assert choice.labelled() == [_span(1, 0, 3), _span(2, 3, 5)]


def test_chat_chunks_begin_with_the_role_and_end_with_the_versions() -> None:
    plan = chat(stream=True, return_token_ids=True)
    choice = _choice()
    chunks = Chunks(plan, [choice], "m", 5)
    first = chunks.of(choice, GenerateDelta(token_ids=[1], logprobs=[-0.5], text="x"), 0)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": "x"}
    assert first["prompt_token_ids"] == [7, 8, 9]
    assert "weight_versions" not in first["choices"][0]
    ended = GenerateDelta(token_ids=[2], logprobs=[-1.0], finish_reason="stop", spans=choice.spans)
    last = chunks.of(choice, ended, 1)
    assert last["nvext"]["completion_token_ids"] == [1, 2, 3]
    assert last["choices"][0]["logprobs"]["content"][0]["logprob"] == -1.0
    assert last["choices"][0]["delta"] == {"content": ""}
    assert last["choices"][0]["weight_versions"] == [_span(1, 0, 3).model_dump(exclude_none=True)]
    assert "prompt_token_ids" not in last


def test_rows_of_experts_begin_at_the_place_that_the_caller_names() -> None:
    """The clients of prime-rl name a place with every turn after the first, also where they ask for no experts."""
    body = {"token_ids": [7, 8, 9], "sampling_params": {"routed_experts_prompt_start": 2}}
    start = {"input_ids": [7, 8, 9], "routed_experts_start_len": 2}
    choice, asked = _choice(), {"return_routed_experts": True}
    choice.routed_experts = RoutedExperts(layers=1, top_k=1, width=1, data=bytes(range(5)))

    def row_of(reply: Any) -> Any:
        return numpy.load(BytesIO(b64decode(reply["choices"][0]["routed_experts"]))).ravel().tolist()

    vllm = plan_vllm(body | asked, "v")
    assert row_of(vllm_whole(vllm, [choice], "m", 5)) == [2, 3, 4]
    last = GenerateDelta(token_ids=[], finish_reason="stop")
    assert row_of(VllmChunks(vllm, [choice], "m", 5).of(choice, last, 3)) == [2, 3, 4]
    for plan in (completion, chat):
        for place, rows in ((2, [2, 3, 4]), (50, [3, 4])):  # a place behind the prompt means its end
            asks = plan(routed_experts_prompt_start=place, **asked)
            assert row_of(whole(asks, [choice], "m", 5)) == rows
            assert row_of(Chunks(asks, [choice], "m", 5).of(choice, last, 3)) == rows
    reply = sglang_whole(plan_sglang(start | asked, "s"), [choice], "m", 5)
    assert isinstance(reply, dict)
    assert b64decode(reply["meta_info"]["routed_experts"]) == numpy.array([2, 3, 4], "<i4").tobytes()
    choice.routed_experts = None
    assert vllm_whole(plan_vllm(body, "v"), [choice], "m", 5)["choices"][0]["routed_experts"] is None
    plan_sglang(start, "s")
    for make, wrong, field in (
        (plan_vllm, {**body, "token_ids": [7]}, "sampling_params.routed_experts_prompt_start"),
        (plan_sglang, {**start, "input_ids": [[7, 8, 9], [7]]}, "routed_experts_start_len"),
    ):
        make(wrong, "w")
        with pytest.raises(InvalidRequest) as caught:
            make(wrong | asked, "w")
        assert caught.value.facts["field"] == field


def test_openai_clients_find_their_keys() -> None:
    error = openai_error(InvalidRequest("wrong", field="n", fix="less"), 0.0)["error"]
    assert error == {
        "code": "invalid_request",
        "message": "wrong",
        "field": "n",
        "fix": "less",
        "type": "invalid_request_error",
        "param": "n",
    }
    assert openai_error(PlaneError("broke"), 0.0)["error"]["type"] == "server_error"
