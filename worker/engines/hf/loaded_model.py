"""Loads a model of transformers for the `hf` engines."""

from __future__ import annotations

from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from worker.engines.base import EngineOptions
from worker.engines.common.checkpoint_spec import refuse_lacking


def load_model(model_class: Any, options: EngineOptions) -> Any:
    """Loads the options' model onto their device, for inference only. Blocks. Raises InvalidRequest if the model's
    files lack tensors, which transformers would fill with random numbers."""
    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    disable_progress_bar()  # a worker's standard error is its log
    model, report = model_class.from_pretrained(
        options.model,
        dtype="auto" if options.dtype is None else getattr(torch, options.dtype),
        local_files_only=True,
        use_safetensors=True,
        attn_implementation="sdpa",
        output_loading_info=True,
    )
    refuse_lacking(report["missing_keys"], options.task)
    model.to(device).eval().requires_grad_(False)
    if model.device.type == "cpu":
        # Loading maps the file: a trainer that overwrites the file would change the weights, or end the process.
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data = tensor.data.clone()
    return model
