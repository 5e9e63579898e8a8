"""Makes plans from the fields of a body."""

from __future__ import annotations

from typing import Any

from frontend.completions.plans import Plan, plan_chat, plan_completion

# ---- plans ----


def completion(**body: Any) -> Plan:
    return plan_completion({"prompt": "hi", **body}, "cmpl-1")


def chat(**body: Any) -> Plan:
    return plan_chat({"messages": [{"role": "user", "content": "hi"}], **body}, "chatcmpl-1")
