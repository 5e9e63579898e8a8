"""The form of a text (`GenerateRequest.structured_output`) in SGLang."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rl_plane.protocol.generation import GenerateRequest
from rl_plane.protocol.structured_output import FormKind
from worker.engines.common.form_bound import TOKEN_S, TOO_AMBIGUOUS

log = logging.getLogger("worker.engines.sglang.text_form")

CONTINUED = "rl_plane_continued"
"""The name, in a request's `custom_params`, of the number of tokens at the end of the prompt that are of the text."""
REFUSED = "Failed to compile"
"""SGLang's words for a form that it does not take, and for tokens so far that do not have the form."""

_NAMES: dict[FormKind, str] = {"grammar": "ebnf"}


def sampling_options(request: GenerateRequest, made: int) -> dict[str, Any]:
    """The sampling parameters of SGLang by which the text has the form that the request gives. `made`: the tokens at
    the end of the prompt that this worker has made."""
    form = request.structured_output
    if form is None:
        return {}
    continued = request.continued + made
    return {
        _NAMES.get(form.kind, form.kind): form.text,
        **({"custom_params": {CONTINUED: continued}} if continued else {}),
    }


def with_grammars(original: Callable[..., bool], manager: Any, request: Any) -> bool:
    """Wraps the function in which SGLang looks up the grammar of a request. The first request that needs one makes the
    backend: SGLang itself makes none here, because it runs without a tokenizer."""
    given = request.sampling_params
    if any((given.json_schema, given.regex, given.ebnf, given.structural_tag)) and manager.grammar_backend is None:
        try:
            manager.grammar_backend = _make_backend(manager)
        except Exception as error:  # of any kind: it would end the engine
            log.exception("SGLang can't give a text a form with this model")
            request.set_finish_with_abort(f"{REFUSED} any form with this model: {error}")
            return False
    return original(manager, request)


def _make_backend(manager: Any) -> Any:
    from sglang.srt.constrained.base_grammar_backend import create_grammar_backend

    from worker.engines.common.tokenizing import load_tokenizer

    scheduler, model = manager.scheduler, manager.scheduler.model_config
    return create_grammar_backend(
        scheduler.server_args,
        load_tokenizer(Path(model.model_path)),
        model.vocab_size,
        model.hf_eos_token_id,
        think_end_ids=model.think_end_ids,
    )


def accept_in_time(original: Callable[..., None], grammar: Any, token: int) -> None:
    """Wraps the function by which a grammar takes a token. SGLang ends the request of a ValueError."""
    began = time.thread_time()
    original(grammar, token)
    if time.thread_time() - began > TOKEN_S:
        raise ValueError(TOO_AMBIGUOUS)


def continue_grammar(result: None, manager: Any, request: Any) -> None:
    """Runs after SGLang has the grammar of a request. The grammar of a continued request begins after the tokens so
    far, which stand in its prompt."""
    from sglang.srt.constrained.base_grammar_backend import InvalidGrammarObject

    count = (request.sampling_params.custom_params or {}).get(CONTINUED, 0)
    if not count or isinstance(request.grammar, InvalidGrammarObject):
        return
    try:
        for token in request.origin_input_ids[-count:]:
            request.grammar.accept_token(token)
    except ValueError as error:
        log.warning("a continued request does not have its form: %s", error)
        why = TOO_AMBIGUOUS if str(error) == TOO_AMBIGUOUS else "the tokens so far do not have the form"
        request.set_finish_with_abort(f"{REFUSED}: {why}")
