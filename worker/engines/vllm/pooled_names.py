"""The name of the weights that have computed each vector, in vLLM's front end.

vLLM names the weights of each step, and keeps the name for requests that make tokens. Here it keeps it for pooling
requests too.
"""

from __future__ import annotations

from typing import Any, cast

_NAMES = "rl_plane_pooled_names"


def pooled_names(llm: Any) -> dict[str, str | None]:
    """The caller's id of a request → the name of the weights, from its end until the caller takes it."""
    return cast("dict[str, str | None]", getattr(llm, _NAMES))


def name_pooled(llm: Any) -> None:
    """Call it once in the front end. `llm`: an AsyncLLM. It also completes the end of a pooling request that the
    scheduler aborts: vLLM's front end expects a vector there, and would fail."""
    import torch

    processor = llm.output_processor
    process = processor.process_outputs
    names: dict[str, str | None] = {}
    setattr(llm, _NAMES, names)

    def process_named(outputs: list[Any], *more: Any, weight_version: str | None = None, **options: Any) -> Any:
        for output in outputs:
            state = processor.request_states.get(output.request_id)
            if state is None or state.detokenizer is not None or output.finish_reason is None:
                continue
            if output.pooling_output is None:
                output.pooling_output = torch.empty(0)
            names[state.external_req_id] = weight_version
        return process(outputs, *more, weight_version=weight_version, **options)

    processor.process_outputs = process_named
