"""The HTTP dialects of trainers' clients that a frontend can answer."""

from __future__ import annotations

DIALECTS = {
    "vllm": "frontend.dialects.vllm.vllm_routes",
    "sglang": "frontend.dialects.sglang.sglang_routes",
    "prime-rl": "frontend.dialects.prime_rl",
}
"""Dialect → the module with its `mount(routes, context)`. The command line and the frontend read this table. The
frontend mounts the modules in its order, and loads only those of the dialects that it answers."""
