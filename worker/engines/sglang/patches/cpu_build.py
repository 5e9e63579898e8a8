"""Lets SGLang run on torch's build for CPUs, which has no pinned memory."""

from __future__ import annotations

from typing import Any


def do_without_pinned_memory() -> None:
    """Makes torch ignore `pin_memory`: SGLang's LoRA code and its store of routed experts always ask for it."""
    import torch
    from sglang.srt.mem_cache.pool_host import common

    def without(make: Any) -> Any:
        return lambda *arguments, pin_memory=False, **options: make(*arguments, **options)

    for name in ("tensor", "empty", "zeros", "ones", "arange", "full"):
        setattr(torch, name, without(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda tensor, *arguments, **options: tensor
    common.ALLOC_MEMORY_FUNCS["cpu"] = common.alloc_with_pin_memory
