"""Prompts and text of engines that take token ids, without an engine."""

from __future__ import annotations

import inspect
import json
import random
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rl_plane.errors import InvalidRequest
from rl_plane.protocol.generation import RESERVED, GenerateRequest, Rendering
from rl_plane.protocol.worker_ops import Tokenize
from worker.engines.common.tokenizing import (
    IncrementalText,
    Tokenizing,
    eos_tokens,
    load_tokenizer,
    prompt_tokens,
)
from worker.testing.tiny_model import VOCAB_SIZE, make_tiny_model


def test_only_a_token_that_the_model_can_make_ends_a_text(tmp_path: Path) -> None:
    config = {"model_type": "qwen3", "vocab_size": 16, "eos_token_id": [3, 15, 16]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [4, -1]}))
    assert eos_tokens(tmp_path, SimpleNamespace(eos_token_id=20)) == {3, 4, 15}


def test_a_model_of_text_and_images_ends_a_text_with_what_either_config_says(tmp_path: Path) -> None:
    text = {"model_type": "gemma3_text", "vocab_size": 16, "eos_token_id": 1}
    config = {"model_type": "gemma3", "eos_token_id": [1, 6, 16], "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert eos_tokens(tmp_path, SimpleNamespace(eos_token_id=None)) == {1, 6}


class Threads:
    """A tokenizer that notes on which thread it was asked."""

    asked: list[str]

    def __init__(self) -> None:
        self.asked = []

    def _ask(self, *args: Any, **options: Any) -> list[int]:
        self.asked.append(threading.current_thread().name)
        return [1]

    encode = apply_chat_template = decode = _ask


class Engine(Tokenizing):
    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        info: Any = SimpleNamespace(vocab_size=16)
        self._info = info

    def _running(self) -> None:
        pass


async def test_the_ops_have_threads_of_their_own() -> None:
    tokenizer = Threads()
    engine = Engine(tokenizer)
    await engine.tokenize(Tokenize(prompt="a"))
    await engine.tokenize(Tokenize(messages=[{"role": "user", "content": "a"}]))
    await engine.detokenize([1])
    assert len(tokenizer.asked) == 3
    assert all(name.startswith("tokenize") for name in tokenizer.asked)


TEMPLATE = """{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif -%}
{% for document in documents or [] %}<doc>{{ document.title }}</doc>{% endfor -%}
{% for message in messages %}<{{ message.role }}{% if message.name %} {{ message.name }}{% endif %}>
{%- if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif -%}
{{ message.content }}
{%- for call in message.tool_calls or [] %}<call {{ call.id }}>{{ call.function | tojson }}</call>{% endfor -%}
</{{ message.role }}>{% endfor -%}
{% if add_generation_prompt %}<assistant>{% if enable_thinking is false %}<think></think>{% endif %}{% endif %}"""
TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}
FUNCTION = {"name": "look", "arguments": {"at": 1}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "name": "me", "content": "hi"},
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "hm",
        "tool_calls": [{"id": "c1", "type": "function", "function": FUNCTION}],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "42"},
]
TALK = (
    "<user me>hi</user><assistant><think>hm</think>"
    '<call c1>{"name": "look", "arguments": {"at": 1}}</call></assistant><tool>42</tool>'
)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Any:
    found = load_tokenizer(make_tiny_model(tmp_path / "model", seed=1))
    found.chat_template = TEMPLATE
    return found


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, f"{TALK}<assistant>"),
        ({"tools": [TOOL]}, f"<tools>{json.dumps([TOOL])}</tools>{TALK}<assistant>"),
        ({"documents": [{"title": "t"}]}, f"<doc>t</doc>{TALK}<assistant>"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, f"{TALK}<assistant><think></think>"),
        ({"add_generation_prompt": False}, TALK),
        ({"continue_final_message": True}, TALK.removesuffix("</tool>")),
    ],
)
async def test_a_template_is_given_all_that_a_request_says(
    tokenizer: Any, fields: dict[str, Any], text: str
) -> None:
    body = Tokenize(messages=MESSAGES, **fields)
    tokens = await Engine(tokenizer).tokenize(body)
    assert tokenizer.decode(tokens) == text
    request = GenerateRequest(id="x", messages=MESSAGES, rendering=body.rendering)
    assert await prompt_tokens(tokenizer, request) == tokens


async def test_special_tokens_are_around_a_text_unless_it_says_otherwise(tokenizer: Any) -> None:
    from tokenizers.processors import TemplateProcessing

    begin, end = "<|im_start|>", "<|im_end|>"
    ids = [(token, tokenizer.convert_tokens_to_ids(token)) for token in (begin, end)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(f"{begin} $A {end}", None, ids)
    bare = tokenizer.encode("hello", add_special_tokens=False)
    for asked, tokens in (({}, [ids[0][1], *bare, ids[1][1]]), ({"add_special_tokens": False}, bare)):
        assert await Engine(tokenizer).tokenize(Tokenize.model_validate({"prompt": "hello", **asked})) == tokens
        request = GenerateRequest.model_validate({"id": "x", "prompt": "hello", **asked})
        assert await prompt_tokens(tokenizer, request) == tokens


async def test_a_chat_that_the_template_refuses_is_an_invalid_request(tokenizer: Any) -> None:
    tokenizer.chat_template = "{{ raise_exception('no tools here') }}"
    with pytest.raises(InvalidRequest, match="no tools here") as caught:
        await Engine(tokenizer).tokenize(Tokenize(messages=MESSAGES, tools=[TOOL]))
    assert caught.value.facts["field"] == "messages"


class Counting:
    """A tokenizer that notes the largest number of tokens that it has decoded at once."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.most = 0

    def decode(self, ids: list[int], **options: Any) -> str:
        self.most = max(self.most, len(ids))
        text: str = self._tokenizer.decode(ids, **options)
        return text


def byte_fallback() -> Any:
    """A tokenizer that writes a run of bytes which is no UTF-8 with a replacement character for each byte."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE({f"<0x{byte:02X}>": byte for byte in range(256)}, [], byte_fallback=True))
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=made, clean_up_tokenization_spaces=False)


def told(tokenizer: Any, ids: list[int]) -> tuple[str, int]:
    """The text of tokens that arrive one by one, and the largest number of them that was decoded at once."""
    counting = Counting(tokenizer)
    text = IncrementalText(counting)
    parts = [text.add([token], last=place == len(ids)) for place, token in enumerate(ids, 1)]
    return "".join(parts), counting.most


def test_a_bounded_number_of_tokens_is_decoded_anew_whatever_they_are(tokenizer: Any) -> None:
    (broken,) = tokenizer.convert_tokens_to_ids(["ÿ"])  # the byte 0xff
    crab = tokenizer.encode("🦀", add_special_tokens=False)
    assert len(crab) == 4
    apart = [crab[0], *[0] * 200, *crab[1:]]
    for ids in ([broken] * 200, [broken, *crab * 50], crab[:2] * 100, apart):
        text, most = told(tokenizer, ids)
        assert most < 40
        assert text == tokenizer.decode(ids, skip_special_tokens=True) or ids is apart
    bytewise = byte_fallback()
    assert told(bytewise, [255] * 200) == ("\ufffd" * 200, 33)
    assert told(bytewise, [255, *list("🦀".encode()) * 50])[1] < 40


def test_characters_that_a_tokenizer_writes_byte_by_byte_are_told_whole() -> None:
    bytewise = byte_fallback()
    for text in ("🦀" * 50, "a字字字b", "é🦀字" * 20):
        assert told(bytewise, list(text.encode()))[0] == text
    for seed in range(40):
        pick = random.Random(seed)
        ids = [byte for _ in range(40) for byte in pick.choice(["a", "é", "字", "🦀"]).encode()]
        assert told(bytewise, ids)[0] == bytewise.decode(ids)


def test_the_text_of_tokens_that_arrive_one_by_one_is_the_text_of_all(tokenizer: Any) -> None:
    for seed in range(40):
        pick = random.Random(seed)
        parts = [
            [pick.randrange(3, VOCAB_SIZE)] * pick.randint(1, 4)
            if pick.random() < 0.3
            else tokenizer.encode(pick.choice(["é", "日本", "🦀", "a the", "\ufffd"]), add_special_tokens=False)
            for _ in range(60)
        ]
        ids = [token for part in parts for token in part[: pick.randint(1, 4)]]
        assert told(tokenizer, ids)[0] == tokenizer.decode(ids, skip_special_tokens=True), seed


def test_no_argument_of_the_tokenizers_own_is_a_templates() -> None:
    import transformers
    from transformers.utils.chat_template_utils import render_jinja_template

    for function in (transformers.PreTrainedTokenizerBase.apply_chat_template, render_jinja_template):
        names = {name for name in inspect.signature(function).parameters if name != "kwargs"}
        assert names <= RESERVED
    for name in RESERVED:
        with pytest.raises(InvalidRequest) as caught:
            Rendering.of(None, None, {name: 1}, None, None)
        assert caught.value.facts["field"] == f"chat_template_kwargs.{name}"
