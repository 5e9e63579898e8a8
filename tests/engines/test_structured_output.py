"""The form of a text (`structured_output`) in real vLLM and real SGLang on a CPU: the text has it, its logprobs are of
the model's own logits, and a text that another worker has begun continues in its form."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest

from rl_plane.errors import InvalidRequest, PlaneError
from rl_plane.protocol.generation import GenerateRequest
from rl_plane.protocol.structured_output import FormKind, StructuredOutput, grammar_of_choices
from tests.support.engine_kinds import SGLANG, OffersMemory
from tests.support.engine_models import LOGPROBS, Models, is_of, kind, models
from tests.support.engine_runs import Run, ask, load_adapter, receive, reception, run, update, version
from tests.support.reference import logprobs_of
from tests.support.shared_engine import engine, prompt_of, scratch, shared
from worker.engines.base import PauseMode
from worker.testing.tiny_model import VOCAB_SIZE

__all__ = ["engine", "kind", "models", "scratch", "shared"]
pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:::(torch|vllm|sglang|transformers|multiprocessing)"),  # theirs, not ours
]

PERSON = {
    "type": "object",
    "properties": {
        "name": {"enum": ["Ada", "Grace"]},
        "born": {"type": "integer", "minimum": 1800, "maximum": 1999},
        "tools": {"type": "array", "items": {"enum": ["pen", "loom"]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "born", "tools"],
    "additionalProperties": False,
}
TAG = {
    "type": "structural_tag",
    "format": {"type": "sequence", "elements": [{"type": "const_string", "value": "<call>"}]},
}
AMBIGUOUS = 'root ::= a a a a a a a a\na ::= "" | [a-z] a a a a'
"""The work for one token of its texts grows with each token."""
PAUSES: tuple[PauseMode, ...] = ("keep", "abort")
SLOW_PARTS = 2000
"""The alternatives of a form that takes an engine seconds to compile."""
TEXTS: dict[FormKind, tuple[str, str]] = {
    "json_schema": (json.dumps(PERSON), r'\{\s*"name":\s*"(Ada|Grace)",\s*"born".*\}'),
    "regex": (r"[a-f]{6}-[0-9]{4}", r"[a-f]{6}-[0-9]{4}"),
    "grammar": (grammar_of_choices(['say "no"', "ja\\nein", "läßt 🦀"]), r'say "no"|ja\\nein|läßt 🦀'),
    "structural_tag": (json.dumps(TAG), "<call>"),
}
"""Kind of form → the form, and what its texts match."""

ONLY_SGLANG = pytest.mark.parametrize(
    "kind", [pytest.param(SGLANG, marks=pytest.mark.engines("sglang"), id="sglang")], indirect=True, scope="module"
)
"""vLLM gets a request when its form has been checked, so a test can't know how far the engine is."""


def slow_regex(number: int) -> str:
    """A form that takes an engine seconds to compile. Forms of different numbers differ, so none is in a cache."""
    return "|".join(f"{number}{place * 7919 % 100003}[a-f]{{1,3}}{place}" for place in range(SLOW_PARTS))


def formed(kind: FormKind, text: str, prompt: list[int], **more: Any) -> GenerateRequest:
    form = StructuredOutput(kind=kind, text=text)
    return ask(prompt, **{"structured_output": form, "ignore_eos": False, "max_tokens": 512} | more)


async def test_a_text_has_the_form_that_its_request_gives(engine: OffersMemory, models: Models) -> None:
    await update(engine, models.tiny[1], 1)
    blank = {str(token): -100.0 for token in range(VOCAB_SIZE) if (await engine.detokenize([token])).isspace()}
    for name, (form, matched) in TEXTS.items():
        for seed, fields in enumerate([{}, {"temperature": 1.0, "seed": 7}]):
            # JSON may have any number of blanks between its parts, and this model would make nothing else.
            result = await run(engine, formed(name, form, prompt_of(seed, 9), logit_bias=blank, **fields))
            assert result.finish == "stop", name
            assert re.fullmatch(matched, result.text, re.DOTALL), result.text
            if name == "json_schema":
                assert {"Ada", "Grace"} >= {json.loads(result.text)["name"]}


async def test_logprobs_are_of_the_models_own_logits(engine: OffersMemory, models: Models) -> None:
    await update(engine, models.tiny[1], 1)
    prompt, free = prompt_of(1, 12), ask(prompt_of(2, 20), max_tokens=24, logprobs=True)
    for fields in ({}, {"temperature": 1.3, "seed": 3}):
        request = formed("regex", "[a-f]{24}", prompt, logprobs=True, top_logprobs=3, **fields)
        beside = Run(engine, free.model_copy(update={"id": f"free of {request.id}"}))
        result, other = await run(engine, request), await beside.end()
        expected, _ = logprobs_of(models.tiny[1], prompt, result.tokens)
        assert result.logprobs == pytest.approx(expected, abs=LOGPROBS)
        assert min(expected) < -1.0, "the form has barred the likeliest token at some place"
        tops = [row for delta in result.deltas for row in delta.top_logprobs or ()]
        assert len(tops) == len(result.tokens)
        assert all(top[0][1] >= value - LOGPROBS for top, value in zip(tops, result.logprobs, strict=True))
        assert is_of(other, models.tiny[1]), "a form binds its own request alone"


async def test_an_engine_continues_a_text_in_its_form(engine: OffersMemory, models: Models) -> None:
    await update(engine, models.tiny[1], 1)
    prompt = prompt_of(3, 11)
    whole = await run(engine, formed("regex", "[a-f]{30}=[0-9]{8}", prompt))
    assert whole.finish == "stop"
    for made in (1, len(whole.tokens) // 2, len(whole.tokens) - 1):
        so_far = whole.tokens[:made]
        rest = formed("regex", "[a-f]{30}=[0-9]{8}", [*prompt, *so_far], continued=made)
        result = await run(engine, rest)
        text = await engine.detokenize(so_far + [one for one in result.tokens if one])
        assert re.fullmatch("[a-f]{30}=[0-9]{8}", text), (made, text)
        assert result.finish == "stop"
    other = formed("regex", "[a-f]{30}=[0-9]{8}", [*prompt, *whole.tokens[:-1]], continued=len(whole.tokens[:-1]))
    misfit = other.model_copy(update={"structured_output": StructuredOutput(kind="regex", text="[x-z]{9}")})
    with pytest.raises(PlaneError):
        await run(engine, misfit)
    assert (await run(engine, other.model_copy(update={"id": "again"}))).finish == "stop"


async def test_an_update_leaves_a_running_text_its_form(engine: OffersMemory, models: Models) -> None:
    await update(engine, models.tiny[1], 1)
    running = [Run(engine, formed("regex", "[a-f]{400}", prompt_of(seed, 15))) for seed in range(3)]
    for one in running:
        await one.reach(10)
    await update(engine, models.tiny[2], 2)
    for result in await asyncio.gather(*(one.end() for one in running)):
        assert result.finish == "stop"
        assert re.fullmatch("[a-f]{400}", result.text)
        assert [span.sequence for span in result.spans] == [1, 2]


@ONLY_SGLANG
async def test_a_form_that_is_compiled_holds_up_no_change_of_a_paused_engine(
    engine: OffersMemory, models: Models
) -> None:
    for number, mode in enumerate(PAUSES):
        await update(engine, models.tiny[1], 1)
        await load_adapter(engine, "x", models.adapters[1])
        staging, _ = await receive(engine, reception(models.tiny[2]))
        slow = [
            Run(engine, formed("regex", slow_regex(2 * number + index), prompt_of(number, 9), adapter=adapter))
            for index, adapter in enumerate((None, "x"))
        ]
        await run(engine, ask([3], max_tokens=1))  # the engine has the others, too, when it has answered
        await engine.pause(mode, False)
        assert await engine.swap(staging, version(2, models.tiny[2]))
        assert await engine.flush_cache()
        await engine.swap_adapter("x", None, None)
        assert not any(one.result.tokens for one in slow), "the forms were compiled at the pause"
        await engine.resume()
        assert [(await one.end()).finish for one in slow] == ["stop" if mode == "keep" else "abort", "abort"]
        assert [span.sequence for span in (await run(engine, ask([3], max_tokens=1))).spans] == [2]


async def test_bad_forms_are_refused_and_leave_the_engine_as_it_was(engine: OffersMemory, models: Models) -> None:
    await update(engine, models.tiny[1], 1)
    bad: list[tuple[FormKind, str]] = [
        ("regex", "(unclosed"),
        ("grammar", "root ::= missing"),
        ("json_schema", '{"type": "nothing"}'),
        ("structural_tag", '{"type": "structural_tag", "format": {"type": "nothing"}}'),
    ]
    for name, form in bad:
        with pytest.raises(InvalidRequest) as caught:
            await run(engine, formed(name, form, [5]))
        assert caught.value.facts["field"] == "structured_output", name
    with pytest.raises(InvalidRequest) as caught:
        await run(engine, formed(*bad[0], prompt_of(2, 9), prompt_logprobs=True, prompt_top_logprobs=2))
    assert caught.value.facts["field"] == "structured_output"
    beside = Run(engine, ask(prompt_of(5, 9), max_tokens=300))
    with pytest.raises(InvalidRequest, match="too many ways") as caught:
        await run(engine, formed("grammar", AMBIGUOUS, [5], max_tokens=1000))
    assert caught.value.facts["field"] == "structured_output"
    assert (await beside.end()).finish == "length"
    for field, value in {"ignore_eos": True, "min_tokens": 3}.items():
        with pytest.raises(InvalidRequest) as caught:
            await run(engine, formed("regex", "a", [5], **{field: value}))
        assert caught.value.facts["field"] == field
    assert (await run(engine, formed("regex", "[ab]{3}", [5]))).finish == "stop"
