"""The replies of the engines' own generation routes."""

from __future__ import annotations

from typing import Any

from frontend.completions.openai_replies import prompt_logprobs, scored_prompt, token_name, top_rows, usage
from frontend.completions.plans import Plan
from frontend.completions.reply_choice import Choice, spans_of
from rl_plane.protocol.generation import GenerateDelta, VersionSpan
from rl_plane.protocol.routed_experts import as_int32, as_npy

# ---- vLLM's ----


def _vllm_logprobs(made: Choice | GenerateDelta) -> dict[str, Any]:
    rows = zip(made.token_ids, made.logprobs or [], top_rows(made), strict=True)
    return {
        "content": [
            {
                **_vllm_row(token, value, None),
                "top_logprobs": [_vllm_row(*one, rank) for rank, one in enumerate(top, 1)],
            }
            for token, value, top in rows
        ]
    }


def _vllm_row(token: int, logprob: float, rank: int | None) -> dict[str, Any]:
    """vLLM now writes `token_id`, and wrote `token` before."""
    return {"token_id": token, "token": token_name(token), "logprob": logprob, "rank": rank}


def vllm_whole(plan: Plan, choices: list[Choice], model: str, created: int) -> dict[str, Any]:
    return {
        "request_id": plan.id,
        "output_mode": "tokens",
        "model": model,
        "created": created,
        "choices": [
            {
                "index": choice.index,
                "token_ids": choice.token_ids,
                "logprobs": _vllm_logprobs(choice) if plan.logprobs else None,
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason(plan),
                "routed_experts": as_npy(choice.experts(plan)),
                "weight_versions": spans_of(choice.labelled()),
                **choice.provenance(),
            }
            for choice in choices
        ],
        "prompt_logprobs": prompt_logprobs(choices[0]) if plan.prompt_logprobs else None,
        "prompt_token_ids": choices[0].prompt_token_ids if plan.return_token_ids else None,
        "usage": usage(plan, choices),
    }


class VllmChunks:
    """The events of one stream of vLLM's."""

    def __init__(self, plan: Plan, choices: list[Choice], model: str, created: int) -> None:
        self._plan = plan
        self._choices = choices
        self._head = {"request_id": plan.id, "output_mode": "tokens"}
        self._begun = False

    def of(self, choice: Choice, delta: GenerateDelta, offset: int) -> dict[str, Any]:
        row: dict[str, Any] = {
            "index": choice.index,
            "token_ids": delta.token_ids,
            "logprobs": _vllm_logprobs(delta) if self._plan.logprobs else None,
            "finish_reason": delta.finish_reason,
            **choice.provenance(),
        }
        if delta.spans or delta.finish_reason is not None:
            row["weight_versions"] = spans_of(choice.labelled())
        if delta.finish_reason is not None:
            row["stop_reason"] = choice.stop_reason(self._plan)
            row["routed_experts"] = as_npy(choice.experts(self._plan))
        chunk: dict[str, Any] = {**self._head, "choices": [row]}
        if self._plan.return_token_ids and not self._begun:
            chunk["prompt_token_ids"] = choice.prompt_token_ids
        if delta.prompt_logprobs is not None:
            chunk["prompt_logprobs"] = prompt_logprobs(choice)
        self._begun = True
        return chunk

    def usage(self) -> dict[str, Any]:
        return {**self._head, "choices": [], "usage": usage(self._plan, self._choices)}


# ---- SGLang's ----


def sglang_whole(plan: Plan, choices: list[Choice], model: str, created: int) -> dict[str, Any] | list[Any]:
    return one_or_list(plan, [_sglang_choice(plan, choice) for choice in choices])


def one_or_list(plan: Plan, rows: list[dict[str, Any]]) -> dict[str, Any] | list[Any]:
    """SGLang's reply: one row, or a list if there are several rows or the prompts came in a list."""
    return rows[0] if len(rows) == 1 and plan.batch is None else rows


def sglang_meta(plan: Plan, choice: Choice, spans: list[VersionSpan], reason: Any) -> dict[str, Any]:
    """The `meta_info` of one row. `reason`: its `finish_reason`."""
    return {
        "id": plan.id if len(plan.requests) == 1 else f"{plan.id}-{choice.index}",
        "finish_reason": reason,
        "prompt_tokens": len(choice.prompt_token_ids or ()),
        "weight_version": spans[-1].version if spans else None,
        "weight_versions": spans_of(spans),
        **choice.provenance(),
    }


def _sglang_choice(plan: Plan, choice: Choice) -> dict[str, Any]:
    """The whole choice so far."""
    meta = sglang_meta(plan, choice, choice.labelled(), _sglang_reason(choice))
    meta["completion_tokens"] = len(choice.token_ids)
    if plan.logprobs:
        rows = zip(choice.token_ids, choice.logprobs or [], strict=True)
        meta["output_token_logprobs"] = [[value, token, None] for token, value in rows]
        if choice.top_logprobs is not None:
            meta["output_top_logprobs"] = [
                [[value, token, None] for token, value in top] for top in choice.top_logprobs
            ]
        scored = list(scored_prompt(choice))[plan.scored_from :] if choice.prompt_logprobs else []
        inputs: list[list[Any]] = [[value, token, None] for token, value, _ in scored]
        if inputs:
            inputs[0][0] = None  # SGLang scores each token of the asked range but the first
        meta["input_token_logprobs"] = inputs
        if plan.requests[0].prompt_top_logprobs and scored:
            tops = [[[value, token, None] for token, value in place.tops] for _, _, place in scored[1:]]
            meta["input_top_logprobs"] = [None, *tops]
    if plan.routed_experts and choice.finish_reason is not None:
        experts = as_int32(choice.experts(plan))
        if experts is not None:  # SGLang leaves the key out after an abort, and miles looks for it
            meta["routed_experts"] = experts
    reply = {"text": choice.text, "output_ids": choice.token_ids, "meta_info": meta}
    if plan.return_token_ids:
        reply["prompt_token_ids"] = choice.prompt_token_ids or []
    return reply


def _sglang_reason(choice: Choice) -> dict[str, Any] | None:
    made = choice.token_ids
    if choice.finish_reason == "stop":
        return {"type": "stop", "matched": choice.stop_string or (made[-1] if made else None)}
    if choice.finish_reason == "length":
        return {"type": "length", "length": len(made)}
    return {"type": "abort", "message": "Aborted"} if choice.finish_reason is not None else None


class SglangChunks:
    """The events of one stream of SGLang's. Each event has its whole choice so far."""

    def __init__(self, plan: Plan, choices: list[Choice], model: str, created: int) -> None:
        self._plan = plan

    def of(self, choice: Choice, delta: GenerateDelta, offset: int) -> dict[str, Any]:
        return {"index": choice.index, **_sglang_choice(self._plan, choice)}

    def usage(self) -> dict[str, Any]:
        raise AssertionError("a request of SGLang's has no such option")
