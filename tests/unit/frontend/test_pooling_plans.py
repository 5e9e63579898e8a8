"""The bodies of the routes of pooling models, as plans."""

from __future__ import annotations

from typing import Any

import pytest

from frontend.completions.served_models import ServedModels
from frontend.pooling.pooling_plans import PooledPlan, plan_classify, plan_embeddings, plan_encode, plan_score
from rl_plane.errors import InvalidRequest, PlaneError, Unsupported
from rl_plane.membership.core import Member
from rl_plane.protocol.generation import GenerateDelta, GenerateRequest
from rl_plane.protocol.pooling import MAX_DIMENSION, MAX_PAIR_CHARS, packed, unpacked

POLICY = ServedModels("reward", ("m",), (), None, None)
REWARD = ServedModels("reward", ("m",), (), None, None, "classify", ("reward",))
LABELS = ServedModels("reward", ("m",), (), None, None, "classify", ("a", "b"))
EMBEDDER = ServedModels("reward", ("m",), (), None, None, "embed")


def asked(pooled: PooledPlan) -> list[tuple[Any, str, bool]]:
    """The input, the task and the activation of each request."""
    found: list[tuple[Any, str, bool]] = []
    for one in pooled.plan.requests:
        assert one.pooling is not None
        prompt: Any = one.prompt_token_ids or one.messages or one.prompt
        pair = one.pooling.text_pair
        found.append((prompt if pair is None else (prompt, pair), one.pooling.task, one.pooling.activation))
    return found


@pytest.mark.parametrize(
    ("given", "inputs"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([5, 6], [[5, 6]]),
        ([[5], [6, 7]], [[5], [6, 7]]),
    ],
)
def test_an_input_is_a_text_or_tokens_or_a_list_of_them(given: Any, inputs: list[Any]) -> None:
    assert [one for one, _, _ in asked(plan_embeddings({"input": given}, "id", EMBEDDER))] == inputs
    assert [one for one, _, _ in asked(plan_classify({"input": given}, "id", REWARD))] == inputs


def test_each_client_gets_what_its_engine_gives() -> None:
    assert asked(plan_classify({"input": "a"}, "id", REWARD)) == [("a", "classify", True)]
    for name in ("use_activation", "activation"):  # verl's, for newer and older versions of vLLM
        assert asked(plan_classify({"input": "a", name: False}, "id", REWARD)) == [("a", "classify", False)]
    assert asked(plan_classify({"text": "a"}, "id", REWARD)) == [("a", "classify", False)]
    assert asked(plan_classify({"input_ids": [5]}, "id", REWARD)) == [([5], "classify", False)]
    assert asked(plan_encode({"text": ["a", "b"]}, "id", EMBEDDER))[1] == ("b", "embed", True)
    # verl reads the reward there, with SGLang.
    assert asked(plan_embeddings({"input": "a"}, "id", REWARD)) == [("a", "classify", False)]
    assert asked(plan_embeddings({"input": "a"}, "id", POLICY)) == [("a", "embed", True)]


def test_a_message_of_a_reply_is_taken_with_its_null_fields() -> None:
    message: dict[str, Any] = {"role": "assistant", "content": "x", "refusal": None, "annotations": []}
    for plan, models in ((plan_embeddings, EMBEDDER), (plan_classify, REWARD)):
        ((messages, _, _),) = asked(plan({"messages": [message]}, "id", models))
        assert messages == [{"role": "assistant", "content": "x"}]


def test_pairs_are_scored_together_or_embedded_apart() -> None:
    one = {"text_1": "q", "text_2": ["a", "b"]}
    assert asked(plan_score(one, "id", REWARD)) == [(("q", text), "classify", True) for text in "ab"]
    assert [text for text, _, _ in asked(plan_score(one, "id", EMBEDDER))] == ["q", "a", "b"]
    many = {"queries": ["p", "q"], "documents": ["a", "b"]}
    assert [pair for pair, _, _ in asked(plan_score(many, "id", REWARD))] == [("p", "a"), ("q", "b")]
    with pytest.raises(Unsupported, match="2"):
        plan_score(one, "id", LABELS)


def test_a_conversation_ends_where_it_ends() -> None:
    body = {"messages": [{"role": "user", "content": "hi"}]}
    (request,) = plan_classify(body, "id", REWARD).plan.requests
    assert not request.rendering.add_generation_prompt


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": [5, -6]}, "input.1"),
        ({"input": ["a"] * 1025}, "input"),
        ({"input": "a", "messages": [{"role": "user", "content": "hi"}]}, "input"),
        ({"input": "a", "nonsense": 1}, "nonsense"),
        ({"input": "a", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"input": "a", "encoding_format": "bytes"}, "encoding_format"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "max_lag": 1, "on_stale": "cut"}, "on_stale"),
        ({"input": "a", "migrate": True}, "migrate"),
    ],
)
def test_a_wrong_body_is_refused_by_its_field(body: dict[str, Any], field: str) -> None:
    with pytest.raises(PlaneError) as raised:
        plan_embeddings(body, "id", EMBEDDER)
    assert raised.value.facts["field"] == field


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "text_1"),
        ({"text_1": "a", "documents": ["b"]}, "documents"),
        ({"text_1": ["a", "b"], "text_2": ["c"]}, "text_1"),
        ({"text_1": "a", "text_2": [{"type": "image"}]}, "text_2"),
        ({"text_1": "a", "text_2": "b" * (MAX_PAIR_CHARS + 1)}, "text_2"),
    ],
)
def test_a_wrong_pair_of_texts_names_its_field(body: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        plan_score(body, "id", REWARD)
    assert raised.value.facts["field"] == field


def test_the_task_of_a_fleet_is_that_of_all_members() -> None:
    def member(number: int, **info: Any) -> Member:
        return Member(f"{number:016x}", "i", "server", number, number, {"model": "m", **info})

    rewards = [member(number, task="classify", labels=["good"]) for number in (1, 2)]
    assert (ServedModels.of("reward", rewards, None).pools, ServedModels.of("reward", rewards, None).labels) == (
        "classify",
        ("good",),
    )
    assert ServedModels.of("reward", [*rewards, member(3)], None).pools is None


def test_a_vector_travels_as_it_is() -> None:
    numbers = [0.5, -1.25, 3.0]
    assert unpacked(packed(numbers)) == numbers
    for data in (b"", b"abc", bytes(4 * MAX_DIMENSION + 4)):
        with pytest.raises(ValueError, match="no vector"):
            unpacked(data)
    delta = GenerateDelta(token_ids=[], pooled=packed(numbers), finish_reason="stop")
    assert GenerateDelta.model_validate(delta.model_dump()) == delta
    assert (delta.size, delta.is_ahead) == (1, False)
    assert GenerateRequest(id="a", prompt="hi").task == "generate"
