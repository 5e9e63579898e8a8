"""References to adapters, as SGLang's LoRA code wants them."""

from __future__ import annotations

from typing import Any


def lora_reference(name: str, lora_id: str) -> Any:
    """SGLang's LoRARef of an adapter. `name`: its name in the engine."""
    from sglang.srt.lora.lora_registry import LoRARef

    return LoRARef(lora_id=lora_id, lora_name=name, lora_path=name, pinned=False)
