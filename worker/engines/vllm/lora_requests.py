"""Requests for adapters, as vLLM's LoRA code wants them."""

from __future__ import annotations

from typing import Any


def lora_request(number: int, path: str, anew: bool = False) -> Any:
    """vLLM's request for an adapter. `anew`: it replaces the adapter of this number."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(f"adapter-{number}", number, path, load_inplace=anew)
