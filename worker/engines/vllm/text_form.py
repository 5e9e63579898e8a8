"""The form of a text (`GenerateRequest.structured_output`) in vLLM."""

from __future__ import annotations

import time
from typing import Any

from rl_plane.protocol.generation import GenerateRequest
from rl_plane.protocol.structured_output import FormKind
from worker.engines.common.form_bound import TOKEN_S, TOO_AMBIGUOUS

CONTINUED = "rl_plane_continued"
"""The name, in a request's `extra_args`, of the number of tokens at the end of the prompt that are of the text."""

_NAMES: dict[FormKind, str] = {"json_schema": "json", "regex": "regex", "grammar": "grammar"}


def sampling_options(request: GenerateRequest) -> dict[str, Any]:
    """The arguments of vLLM's SamplingParams by which the text has the form that the request gives."""
    form = request.structured_output
    if form is None:
        return {}
    from vllm.sampling_params import StructuredOutputsParams

    given = StructuredOutputsParams(**{_NAMES.get(form.kind, form.kind): form.text})
    continued = {"extra_args": {CONTINUED: request.continued}} if request.continued else {}
    return {"structured_outputs": given, **continued}


def continue_grammars() -> None:
    """Makes vLLM's grammar of a continued request begin after the tokens so far, which stand in its prompt. Call it in
    the process of vLLM's scheduler."""
    from vllm.v1.structured_output import StructuredOutputManager

    create = StructuredOutputManager._create_grammar

    def create_continued(manager: Any, request: Any) -> Any:
        grammar = create(manager, request)
        count = (request.sampling_params.extra_args or {}).get(CONTINUED, 0)
        for token in request.prompt_token_ids[-count:] if count else ():
            began = time.thread_time()
            if not grammar.accept_tokens(request.request_id, [token]):
                raise ValueError("the tokens so far do not have the form that the request gives")
            if time.thread_time() - began > TOKEN_S:
                raise ValueError(TOO_AMBIGUOUS)
        return grammar

    StructuredOutputManager._create_grammar = create_continued


def bound_grammars() -> None:
    """Ends a request whose form takes too long for one token. Call it in the process of vLLM's scheduler."""
    from vllm.v1.structured_output import StructuredOutputManager

    accept = StructuredOutputManager.accept_tokens

    def accept_bounded(manager: Any, request: Any, tokens: list[int]) -> bool:
        began = time.thread_time()
        accepted = bool(accept(manager, request, tokens))
        if accepted and tokens and time.thread_time() - began > TOKEN_S * len(tokens):
            request.stop_reason = TOO_AMBIGUOUS
            return False
        return accepted

    StructuredOutputManager.accept_tokens = accept_bounded
