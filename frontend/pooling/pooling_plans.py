"""Turns a body of a pooling route into a `PooledPlan`: one request for each input, and the form of the reply."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from frontend.completions.messages import parse_chat
from frontend.completions.openai_bodies import MAX_CHOICES
from frontend.completions.plans import Plan, read_prompts
from frontend.completions.served_models import ServedModels
from frontend.completions.unserved_fields import without_unserved
from frontend.pooling import pooling_replies
from frontend.pooling.pooling_bodies import (
    PAIRS,
    ClassifyBody,
    EmbeddingsBody,
    InputBody,
    PoolingBody,
    ScoreBody,
    SglangPoolBody,
)
from frontend.routing.demands import demands_of
from rl_plane.errors import InvalidRequest, Unsupported
from rl_plane.protocol.generation import GenerateRequest
from rl_plane.protocol.pooling import MAX_PAIR_CHARS, Pooling, PoolingTask
from rl_plane.protocol.validation import parse_body


@dataclass(frozen=True, slots=True)
class PooledPlan:
    """The requests of one call, and its reply."""

    plan: Plan
    write: pooling_replies.Write


def plan_embeddings(body: dict[str, Any], request_id: str, models: ServedModels) -> PooledPlan:
    """A classifier answers with its logits, as SGLang does: verl reads the reward there."""
    parsed = parse_chat(EmbeddingsBody, without_unserved(body, EmbeddingsBody))
    is_raw = models.pools == "classify"
    pooling = Pooling(
        task=models.pools or "embed",
        activation=not is_raw and parsed.use_activation is not False,
        dimensions=parsed.dimensions,
    )
    made = _plan(parsed, request_id, *_inputs(parsed), [pooling], "input")
    return PooledPlan(made, pooling_replies.embeddings(parsed.encoding_format == "base64"))


def plan_classify(body: dict[str, Any], request_id: str, models: ServedModels) -> PooledPlan:
    """vLLM's form, or SGLang's: that has `text` or `input_ids`."""
    if _is_sglang(body):
        return _plan_sglang(body, request_id, "classify")
    parsed = parse_chat(ClassifyBody, without_unserved(body, ClassifyBody))
    given = parsed.use_activation if parsed.use_activation is not None else parsed.activation
    pooling = Pooling(task="classify", activation=given is not False)
    made = _plan(parsed, request_id, *_inputs(parsed), [pooling], "input")
    return PooledPlan(made, pooling_replies.classes(models.labels))


def plan_encode(body: dict[str, Any], request_id: str, models: ServedModels) -> PooledPlan:
    return _plan_sglang(body, request_id, models.pools or "embed")


def _plan_sglang(body: dict[str, Any], request_id: str, task: PoolingTask) -> PooledPlan:
    """SGLang's `/classify` gives the logits."""
    parsed = parse_body(SglangPoolBody, without_unserved(body, SglangPoolBody))
    if (parsed.text is None) == (parsed.input_ids is None):
        raise InvalidRequest("send text or input_ids", field="text", fix="send exactly one of the two")
    field = "text" if parsed.input_ids is None else "input_ids"
    prompts = read_prompts(getattr(parsed, field), field)
    if prompts is None or any(("prompt" in one) != (field == "text") for one in prompts.each):
        raise InvalidRequest(
            f"{field} has no input", field=field, fix="send texts as text, token ids as input_ids"
        )
    pooling = Pooling(task=task, activation=task == "embed", dimensions=parsed.dimensions)
    return PooledPlan(
        _plan(parsed, request_id, prompts.each, prompts.batch, [pooling], field), pooling_replies.sglang
    )


def plan_score(body: dict[str, Any], request_id: str, models: ServedModels) -> PooledPlan:
    """A classifier with one label reads each pair as one input. An embedding model reads each text once."""
    parsed = parse_body(ScoreBody, without_unserved(body, ScoreBody))
    one, other = _sides(parsed)
    left, right = (_texts(getattr(parsed, name), name) for name in (one, other))
    if len(left) not in (1, len(right)):
        raise InvalidRequest(
            f"{one} has {len(left)} texts and {other} {len(right)}",
            field=one,
            fix=f"send one, or as many as {other} has",
        )
    if models.pools == "embed":
        pooling = Pooling(task="embed")
        texts = [{"prompt": text} for text in (*left, *right)]
        _check_count(len(texts), other)
        return PooledPlan(
            _plan(parsed, request_id, texts, True, [pooling], other),
            pooling_replies.cosines(len(left), len(right)),
        )
    if models.pools == "classify" and len(models.labels) > 1:
        raise Unsupported(
            f"a score is of a model with one label, and this one has {len(models.labels)}",
            field="model",
            fix="POST /classify gives all of them",
        )
    is_active = parsed.use_activation is not False
    pairs = left * len(right) if len(left) == 1 else left
    poolings = [Pooling(task="classify", activation=is_active, text_pair=text) for text in right]
    return PooledPlan(
        _plan(parsed, request_id, [{"prompt": text} for text in pairs], True, poolings, other),
        pooling_replies.scores,
    )


def _is_sglang(body: dict[str, Any]) -> bool:
    return "input" not in body and "messages" not in body and ("text" in body or "input_ids" in body)


def _inputs(body: InputBody) -> tuple[list[dict[str, Any]], bool]:
    """The prompt fields of each request, and whether the inputs came in a list."""
    if body.messages:
        if body.input is not None:
            raise InvalidRequest("input and messages are both given", field="input", fix="send one of the two")
        rendering = body.rendering()
        if body.add_generation_prompt is None:
            rendering = rendering.model_copy(update={"add_generation_prompt": False})
        return [{"messages": body.plain_messages(), "rendering": rendering}], False
    prompts = read_prompts(body.input, "input")
    if prompts is None:
        raise InvalidRequest("there is no input", field="input", fix="send a text, token ids, or a list of either")
    if body.add_special_tokens is not None:
        prompts = prompts.with_special_tokens(body.add_special_tokens)
    return prompts.each, prompts.batch


def _sides(body: ScoreBody) -> tuple[str, str]:
    given = {name for pair in PAIRS for name in pair if getattr(body, name) is not None}
    found = [pair for pair in PAIRS if given == set(pair)]
    if len(found) != 1:
        raise InvalidRequest(
            f"{', '.join(sorted(given)) or 'nothing'} given",
            field=min(given, default="text_1"),
            fix=f"send one pair: {', '.join(' and '.join(pair) for pair in PAIRS)}",
        )
    return found[0]


def _texts(value: Any, field: str) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts or not all(isinstance(one, str) and one for one in texts):
        raise InvalidRequest(f"{field} is no text", field=field, fix="send a text, or a list of texts")
    _check_count(len(texts), field)
    if (longest := max(map(len, texts))) > MAX_PAIR_CHARS:
        raise InvalidRequest(
            f"a text of {field} has {longest} characters", field=field, fix=f"send at most {MAX_PAIR_CHARS}"
        )
    return texts


def _check_count(count: int, field: str) -> None:
    if count > MAX_CHOICES:
        raise InvalidRequest(f"{count} inputs", field=field, fix=f"send at most {MAX_CHOICES} at once")


def _plan(
    body: PoolingBody,
    request_id: str,
    inputs: Sequence[dict[str, Any]],
    is_list: bool,
    poolings: Sequence[Pooling],
    field: str,
) -> Plan:
    """`poolings`: one for each input, or one for all."""
    demands = demands_of(body, body.nvext)
    if demands.on_stale == "cut":
        raise InvalidRequest("a vector can't be cut", field="on_stale", fix="send wait or refuse")
    if demands.migrate:
        raise InvalidRequest("a vector is always computed again after a loss", field="migrate", fix="leave it out")
    count = len(inputs)
    each = poolings if len(poolings) == count else [*poolings] * count
    requests = [
        parse_body(
            GenerateRequest,
            {
                "id": request_id if count == 1 else f"{request_id}-{index}",
                "max_tokens": 1,
                **one,
                "pooling": pooling,
            },
        )
        for index, (one, pooling) in enumerate(zip(inputs, each, strict=True))
    ]
    return Plan(
        id=request_id,
        model=body.model,
        requests=tuple(requests),
        instance_id=body.nvext.instance_id if body.nvext is not None else None,
        demands=demands,
        fields=dict.fromkeys(("prompt", "prompt_token_ids"), field),
        batch=count if is_list else None,
    )
