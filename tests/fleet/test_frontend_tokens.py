"""`/tokenize` and `/detokenize` over real worker processes, with the fake engine and with a real tokenizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httpx
import pytest

from frontend.completions.tokens import parse_tokenize
from frontend.completions.unserved_fields import UNSERVED
from rl_plane.errors import InvalidRequest, Unsupported
from tests.support.frontend_process import error_of, http

if TYPE_CHECKING:
    from tests.conftest import Plane

__all__ = ["http"]

MESSAGES = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "look"}}


async def test_tokenize_gives_the_tokens_that_generation_takes(plane: Plane, http: httpx.AsyncClient) -> None:
    error_of(await http.post("/tokenize", json={"prompt": "abc"}), 503)
    plane.spawn_many(2)
    shown = {"messages": MESSAGES, "tools": [TOOL], "chat_template_kwargs": {"think": False}}
    for body, path in (
        ({"prompt": "abc"}, "/v1/completions"),
        ({"messages": MESSAGES}, "/v1/chat/completions"),
        (shown, "/v1/chat/completions"),
        ({**shown, "continue_final_message": True}, "/v1/chat/completions"),
    ):
        reply = (await http.post("/tokenize", json={**body, "model": "seed0"})).json()
        asked = {**body, "max_tokens": 1, "return_token_ids": True}
        made = (await http.post(path, json=asked)).json()
        assert reply["tokens"] == made["prompt_token_ids"]
        assert (reply["count"], reply["max_model_len"]) == (len(reply["tokens"]), 4096)
        ids = made["choices"][0]["token_ids"]
        text = (await http.post("/detokenize", json={"tokens": ids})).json()
        assert text == {"prompt": f" t{ids[0]}"}
    assert (await http.post("/detokenize", json={"tokens": []})).json() == {"prompt": ""}
    error = error_of(await http.post("/detokenize", json={"tokens": [512]}), 400)
    assert error["field"] == "tokens"
    error = error_of(await http.post("/tokenize", json={"prompt": "abc", "model": "unknown"}), 404)
    assert error["field"] == "model"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "messages": MESSAGES}, "prompt"),
        ({"prompt": ["a"]}, "prompt"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        (
            {"messages": MESSAGES, "continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
        ),
        ({"prompt": "a", "continue_final_message": True}, "continue_final_message"),
        ({"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        ({"prompt": "a", "tools": [TOOL]}, "tools"),
        ({"prompt": "a", "documents": [{}]}, "documents"),
        ({"prompt": "a", "chat_template_args": {"x": 1}}, "chat_template_kwargs"),
        ({"messages": MESSAGES, "tools": [{"type": "x"}]}, "tools.0.type"),
        (
            {"messages": MESSAGES, "chat_template_kwargs": {"chat_template": "x"}},
            "chat_template_kwargs.chat_template",
        ),
        ({"messages": MESSAGES, "add_special_tokens": True}, "add_special_tokens"),
        ({"prompt": "a", "unheard_of": 1}, "unheard_of"),
    ],
)
def test_wrong_bodies_are_refused_by_name(body: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_tokenize(body)
    assert caught.value.facts["field"] == field
    assert caught.value.facts["fix"]


@pytest.mark.parametrize("field", ["return_token_strs", "chat_template", "media_io_kwargs", "mm_processor_kwargs"])
def test_a_field_of_vllm_that_is_not_served_is_never_ignored(field: str) -> None:
    for neutral in (None, *UNSERVED[field]):
        assert parse_tokenize({"prompt": "a", field: neutral}) == (None, {"prompt": "a"})
    with pytest.raises(Unsupported) as caught:
        parse_tokenize({"prompt": "a", field: ["something"]})
    assert caught.value.facts["field"] == field
