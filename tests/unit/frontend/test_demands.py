"""The demands of requests on the weights, and the continuation of a choice at another worker. Pure, without a loop."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from frontend.completions.openai_bodies import CompletionBody, NvExt
from frontend.completions.plans import plan_completion
from frontend.routing.committed import MAX_LABELS, LabelsOfRun
from frontend.routing.demands import (
    NO_DEMANDS,
    Demands,
    Point,
    at_admission,
    at_delivery,
    demands_of,
    point_of,
    point_of_span,
)
from frontend.routing.progress import GenerationProgress, seed_after
from rl_plane.errors import InvalidRequest
from rl_plane.protocol.generation import GenerateDelta, GenerateRequest, VersionSpan, unwitnessed
from tests.support.committed_records import record, span, version

# ---- how they are said ----


def test_demands_stand_at_the_top_or_in_nvext() -> None:
    said = {"min_version": "step_3", "max_lag": 2, "one_version": True, "on_stale": "cut", "migrate": True}
    wanted = Demands("step_3", 2, True, "cut", True)
    for body in (said, {"nvext": said}, {"max_lag": 2, "nvext": said}):
        assert plan_completion({"prompt": "hi", **body}, "r").demands == wanted
    assert plan_completion({"prompt": "hi"}, "r").demands == NO_DEMANDS


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"min_version": -1}, "min_version"),
        ({"min_version": True}, "min_version"),
        ({"min_version": 1.5}, "min_version"),
        ({"min_version": ""}, "min_version"),
        ({"min_version": "x" * 300}, "min_version"),
        ({"max_lag": -1}, "max_lag"),
        ({"one_version": 1}, "one_version"),
        ({"max_lag": 1, "on_stale": "hope"}, "on_stale"),
        ({"on_stale": "cut"}, "on_stale"),
        ({"nvext": {"max_lag": "2"}}, "nvext.max_lag"),
        ({"max_lag": 1, "nvext": {"max_lag": 2}}, "nvext.max_lag"),
        ({"migrate": True, "nvext": {"instance_id": "0" * 16}}, "nvext.instance_id"),
        ({"migrate": True, "bad_words_token_ids": [[5, 6]]}, "bad_words_token_ids"),
        ({"migrate": True, "presence_penalty": 0.5}, "presence_penalty"),
    ],
)
def test_a_senseless_demand_is_refused_by_its_field(body: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        plan_completion({"prompt": "hi", **body}, "r")
    assert caught.value.facts["field"] == field
    assert caught.value.facts["fix"]


def test_a_null_demands_nothing() -> None:
    assert demands_of(CompletionBody(max_lag=None), NvExt()) == NO_DEMANDS


# ---- points ----


def test_the_newer_of_base_and_adapter_counts() -> None:
    state = record(3, a=7, b=2).held
    assert point_of(state, None) == Point("r", 3)
    assert point_of(state, "a") == Point("r", 7)
    assert point_of(state, "b") == Point("r", 3)
    assert point_of(state, "gone") == Point("r", 3)
    assert point_of_span(span(3, 0, 4)) == Point("r", 3)
    assert point_of_span(span(3, 0, 4, a=7)) == Point("r", 7)
    assert point_of_span(*unwitnessed(4)) is None


def test_labels_name_the_latest_sequence_of_the_present_run(monkeypatch: pytest.MonkeyPatch) -> None:
    labels = LabelsOfRun()
    for sequence in (4, 3):
        labels.add(version(sequence), "r")
    labels.add(version(9, "other"), "r")
    assert (labels.get("step_4"), labels.get("step_3"), labels.get("step_9")) == (4, 3, None)
    labels.add(version(1, "next"), "next")
    assert (labels.get("step_4"), labels.get("step_1")) == (None, 1)
    for sequence in range(MAX_LABELS + 2):
        labels.add(version(sequence, "next"), "next")
    assert labels.get("step_1") is None
    assert labels.get("step_2") == 2


def test_a_label_is_of_its_target() -> None:
    labels = LabelsOfRun()
    labels.add(version(5), "r")
    for sequence, name in ((11, "a"), (12, "b"), (13, "b")):
        labels.add(replace(version(sequence), label="step_5" if sequence < 13 else "late"), "r", name)
    assert [labels.get("step_5", name) for name in (None, "a", "b", "c")] == [5, 11, 12, 5]
    assert [labels.get("late", name) for name in (None, "a", "b")] == [None, None, 13]
    labels.add(replace(version(14), label="step_5"), "r")
    assert [labels.get("step_5", name) for name in (None, "a", "b")] == [14, 14, 14]


# ---- admission ----

NOW = Point("r", 5)


@pytest.mark.parametrize(
    ("demands", "serves", "unmet"),
    [
        (Demands(), Point("r", 1), None),
        (Demands(min_version=5), NOW, None),
        (Demands(min_version=5), Point("r", 4), "min_version"),
        (Demands(min_version=6), NOW, "min_version"),
        (Demands(min_version=3), Point("q", 5), "min_version"),
        (Demands(max_lag=0), NOW, None),
        (Demands(max_lag=0), Point("r", 4), "max_lag"),
        (Demands(max_lag=1), Point("r", 4), None),
        (Demands(max_lag=9), Point("q", 5), "max_lag"),
    ],
)
def test_the_demands_decide_which_worker_may_make_the_first_token(
    demands: Demands, serves: Point, unmet: str | None
) -> None:
    found = at_admission(demands, serves, NOW)
    assert (found.demand if found else None) == unmet


@pytest.mark.parametrize(
    ("demands", "made_by", "unmet"),
    [
        (Demands(one_version=True), NOW, None),
        (Demands(one_version=True), None, None),
        (Demands(one_version=True), Point("r", 4), "one_version"),
        (Demands(one_version=True), Point("q", 5), "one_version"),
        (Demands(max_lag=0), Point("r", 4), None),
    ],
)
def test_the_demands_decide_which_worker_may_continue_a_choice(
    demands: Demands, made_by: Point | None, unmet: str | None
) -> None:
    found = at_admission(demands, NOW, NOW, made_by)
    assert (found.demand if found else None) == unmet


# ---- delivery ----


@pytest.mark.parametrize(
    ("demands", "spans", "unmet"),
    [
        (Demands(one_version=True), [span(4, 0, 9)], None),
        (Demands(one_version=True), [span(4, 0, 9), span(5, 9, 10)], "one_version"),
        (Demands(one_version=True), [span(4, 0, 9, a=4), span(4, 9, 10, a=5)], "one_version"),
        (Demands(max_lag=1), [span(4, 0, 9), span(5, 9, 10)], None),
        (Demands(max_lag=1), [span(3, 0, 9), span(5, 9, 10)], "max_lag"),
        (Demands(max_lag=0), [span(2, 0, 9, a=5)], None),
        (Demands(min_version=4), [span(4, 0, 9), span(5, 9, 10)], None),
        (Demands(min_version=4), [span(3, 0, 9), span(5, 9, 10)], "min_version"),
        (Demands(min_version=4), [span(5, 0, 9, "q")], "min_version"),
        (Demands(max_lag=0, one_version=True), [], None),
        (Demands(one_version=True), unwitnessed(9), "one_version"),
        (Demands(max_lag=9), unwitnessed(9), "max_lag"),
        (Demands(min_version=0), unwitnessed(9), "min_version"),
        (Demands(), unwitnessed(9), None),
    ],
)
def test_the_demands_decide_which_tokens_may_be_delivered(
    demands: Demands, spans: list[VersionSpan], unmet: str | None
) -> None:
    found = at_delivery(demands, spans, NOW)
    assert (found.demand if found else None) == unmet
    if found is not None:
        assert (found.error().http_status, found.error().facts["field"]) == (503, unmet)


# ---- a choice that continues ----


def delta(tokens: list[int], *spans: VersionSpan, **more: Any) -> GenerateDelta:
    return GenerateDelta(token_ids=tokens, spans=list(spans), **more)


def test_the_next_worker_is_asked_for_the_rest() -> None:
    asked = GenerateRequest(
        id="r",
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=10,
        min_tokens=4,
        truncate_prompt_tokens=9,
        seed=3,
        logprobs=True,
        prompt_logprobs=True,
        stop_token_ids=[8],
        adapter="a",
        cache_salt="s",
    )
    progress = GenerationProgress(asked)
    assert progress.rest() is asked
    progress.take(progress.shifted(delta([1, 2], span(4, 0, 2), prompt_token_ids=[7, 7])))
    progress.take(progress.shifted(delta([3])))
    rest = progress.rest()
    changed = {name for name in GenerateRequest.model_fields if getattr(rest, name) != getattr(asked, name)}
    assert changed == {
        "messages",
        "prompt_token_ids",
        "continued",
        "max_tokens",
        "min_tokens",
        "truncate_prompt_tokens",
        "prompt_logprobs",
        "seed",
    }
    assert (rest.prompt_token_ids, rest.messages, rest.continued) == ([7, 7, 1, 2, 3], None, 3)
    assert (rest.max_tokens, rest.min_tokens, rest.prompt_logprobs) == (7, 1, False)
    assert rest.seed == seed_after(3, 3) != seed_after(3, 4)
    assert 0 <= seed_after((1 << 63) - 1, 9) < 1 << 63
    assert GenerateRequest.model_validate(rest.model_dump()) == rest
    progress.take(progress.shifted(delta([4, 5], span(4, 0, 2))))
    assert progress.rest().prompt_token_ids == [7, 7, 1, 2, 3, 4, 5]
    assert progress.rest().min_tokens == 0


def test_a_worker_with_little_room_is_asked_for_fewer_tokens() -> None:
    progress = GenerationProgress(GenerateRequest(id="r", prompt_token_ids=[7], max_tokens=10))
    assert progress.rest(4).max_tokens == 4
    progress.take(progress.shifted(delta([1, 2, 3, 4], span(4, 0, 4), prompt_token_ids=[7])))
    assert progress.full
    assert progress.rest().max_tokens == 6  # another one may have more
    assert not progress.full
    assert progress.rest(5).max_tokens == 1


def test_spans_of_the_next_worker_begin_where_the_last_span_ended() -> None:
    progress = GenerationProgress(GenerateRequest(id="r", prompt_token_ids=[7], max_tokens=20))
    progress.rest()
    for one in (delta([1], span(4, 0, 1), prompt_token_ids=[7]), delta([2])):
        progress.take(progress.shifted(one))
    progress.rest()
    same = progress.shifted(delta([3], span(4, 0, 1), prompt_token_ids=[7, 1, 2]))
    assert same.spans == [span(4, 0, 3)]
    assert same.prompt_token_ids is None
    progress.take(same)
    progress.take(progress.shifted(delta([4])))
    assert progress.shifted(delta([5])).spans == []
    progress.take(progress.shifted(delta([5], span(4, 0, 2), span(5, 2, 3))))
    assert progress.labelled() == [span(4, 0, 4), span(5, 4, 5)]
    progress.rest()
    last = progress.shifted(delta([6], span(6, 0, 1), finish_reason="length"))
    assert last.spans == [span(4, 0, 4), span(5, 4, 5), span(6, 5, 6)]
    assert progress.shifted(delta([], finish_reason="abort")).spans == [span(4, 0, 4), span(5, 4, 5)]
    assert progress.end("abort").spans == [span(4, 0, 4), span(5, 4, 5)]
    assert (progress.fresh, progress.full) == (0, False)


def test_the_messages_of_a_worker_lost_before_its_first_token_are_ignored() -> None:
    progress = GenerationProgress(GenerateRequest(id="r", prompt_token_ids=[7], max_tokens=1))
    progress.rest()
    progress.take(delta([], prompt_token_ids=[9]))
    assert progress.rest() is progress.request
    assert (progress.prompt_token_ids, progress.can_move) == (None, False)
    progress.take(delta([1], span(4, 0, 1), prompt_token_ids=[7]))
    assert (progress.can_move, progress.full) == (True, True)
