"""The span of one call of a generation route."""

from __future__ import annotations

from collections.abc import Sequence

from frontend.completions.plans import Plan
from frontend.completions.reply_choice import Choice
from rl_plane._util import tracing
from rl_plane._util.tracing import OFF, Span, TraceContext

GOOD = ("ok", "disconnected")
"""Outcomes of a call in which the plane has not failed."""


def begin_call(plan: Plan, parent: TraceContext | None) -> Span:
    """Begins the span. `parent`: the caller's span."""
    if not tracing.is_on():
        return OFF
    first = plan.requests[0]
    return tracing.begin(
        "completion",
        parent,
        request_id=plan.made_id,
        caller_id=plan.caller_id or None,
        session=plan.session,
        model=plan.model,
        choices=len(plan.requests),
        stream=plan.stream,
        prompt_tokens=first.prompt_size(),
        max_tokens=first.max_tokens,
    )


def end_call(span: Span, choices: Sequence[Choice], outcome: str, deliveries: int) -> None:
    """Ends the span. `outcome`: ok, disconnected, or an error's code. `deliveries`: messages with tokens."""
    if span is OFF:
        return
    spans = [one for choice in choices for one in choice.spans]
    span.set(
        outcome=outcome,
        tokens=sum(len(choice.token_ids) for choice in choices),
        deliveries=deliveries,
        workers=", ".join(dict.fromkeys(worker for choice in choices for _, worker, _ in choice.makers)) or None,
        versions=", ".join(dict.fromkeys(one.version for one in spans)) or None,
        finish_reasons=", ".join(dict.fromkeys(choice.finish_reason or "none" for choice in choices)),
    )
    span.end(code="" if outcome in GOOD else outcome)
