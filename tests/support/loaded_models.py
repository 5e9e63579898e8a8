"""Helpers of `tests/publish/test_publish_hf.py` and of other tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def load(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
