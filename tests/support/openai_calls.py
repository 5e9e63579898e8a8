"""Calls of OpenAI's own unchanged Python client to a frontend, with checks of the replies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import openai
import pytest

PROMPT = [5, 6, 7]
MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]
TOKENS = 6


def ids_of(part: Any) -> list[int]:
    """A field that the client has no name for."""
    found: list[int] = part.model_extra["token_ids"]
    return found


async def models_and_errors(client: openai.AsyncOpenAI, model: str) -> None:
    assert model in [one.id async for one in client.models.list()]
    with pytest.raises(openai.BadRequestError) as bad:
        await client.completions.create(model=model, prompt="a", n=0)
    assert (bad.value.param, bad.value.code, bad.value.type) == ("n", "invalid_request", "invalid_request_error")
    with pytest.raises(openai.BadRequestError) as bad:
        await client.chat.completions.create(
            model=model, messages=MESSAGES, extra_body={"prompt_token_ids": PROMPT}
        )
    assert bad.value.param == "prompt_token_ids"
    with pytest.raises(openai.NotFoundError) as missing:
        await client.completions.create(model="unknown", prompt="a")
    assert missing.value.param == "model"
    with pytest.raises(openai.InternalServerError) as lacking:
        await client.completions.create(model=model, prompt="a", suffix="b")
    assert (lacking.value.status_code, lacking.value.param) == (501, "suffix")
    with pytest.raises(openai.BadRequestError):  # before a stream has begun it is a status, too
        await client.completions.create(model=model, prompt="a", max_tokens=1 << 24, stream=True)


async def completions(client: openai.AsyncOpenAI, model: str, nvext: dict[str, Any]) -> list[list[int]]:
    """Returns the tokens of two greedy choices, whole and streamed."""
    asked: dict[str, Any] = {
        "model": model,
        "prompt": "",
        "max_tokens": TOKENS,
        "temperature": 0,
        "n": 2,
        "logprobs": 1,
        "extra_body": {
            "prompt_token_ids": PROMPT,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "prompt_logprobs": 0,
            "ignore_eos": True,
            "nvext": nvext,
        },
    }
    whole = await client.completions.create(**asked)
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len(PROMPT), 2 * TOKENS)
    assert whole.model_extra is not None
    assert whole.model_extra["prompt_token_ids"] == PROMPT
    for choice in whole.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.tokens == [f"token_id:{one}" for one in ids_of(choice)]
        assert choice.logprobs.token_logprobs is not None
        assert len(choice.logprobs.token_logprobs) == len(ids_of(choice)) == TOKENS
        assert choice.model_extra is not None
        assert choice.model_extra["prompt_logprobs"][0] is None
        assert [list(row) for row in choice.model_extra["prompt_logprobs"][1:]] == [
            [str(one)] for one in PROMPT[1:]
        ]
        assert choice.finish_reason == "length"
    made: list[dict[str, Any]] = [{"ids": [], "text": "", "logprobs": [], "end": None} for _ in whole.choices]
    usage = None
    async for chunk in await client.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    ):
        usage = chunk.usage
        for part in chunk.choices:
            mine = made[part.index]
            assert part.logprobs is not None
            mine["ids"] += ids_of(part)
            mine["text"] += part.text
            mine["logprobs"] += part.logprobs.token_logprobs or []
            mine["end"] = part.finish_reason
    assert usage == whole.usage
    for choice, streamed in zip(whole.choices, made, strict=True):
        assert choice.logprobs is not None
        assert (streamed["ids"], streamed["text"]) == (ids_of(choice), choice.text)
        assert streamed["logprobs"] == pytest.approx(choice.logprobs.token_logprobs, abs=0.05)
        assert streamed["end"] == "length"
    return [ids_of(choice) for choice in whole.choices]


async def chats(
    client: openai.AsyncOpenAI, model: str, nvext: dict[str, Any], text_of: Callable[[int], str]
) -> None:
    """`text_of`: the text of a token, as the model's own tokenizer decodes it."""
    asked: dict[str, Any] = {
        "model": model,
        "messages": MESSAGES,
        "max_completion_tokens": TOKENS,
        "temperature": 0,
        "logprobs": True,
        "tools": [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}],
        "extra_body": {"return_token_ids": True, "ignore_eos": True, "nvext": nvext},
    }
    whole = await client.chat.completions.create(**asked)
    (choice,) = whole.choices
    assert (choice.message.role, choice.finish_reason) == ("assistant", "length")
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert [row.token for row in choice.logprobs.content] == [text_of(one) for one in ids_of(choice)]
    assert [bytes(row.bytes or ()).decode() for row in choice.logprobs.content] == [
        row.token for row in choice.logprobs.content
    ]
    assert whole.model_extra is not None
    prompt = whole.model_extra["prompt_token_ids"]
    ids, text, logprobs = [], "", []
    async for chunk in await client.chat.completions.create(**asked, stream=True):
        (part,) = chunk.choices
        ids += ids_of(part)
        text += part.delta.content or ""
        logprobs += [row.logprob for row in (part.logprobs.content if part.logprobs else None) or []]
    assert (ids, text) == (ids_of(choice), choice.message.content)
    assert logprobs == pytest.approx([row.logprob for row in choice.logprobs.content], abs=0.05)
    # The client's own accumulation of a stream.
    async with client.chat.completions.stream(**asked) as stream:
        await stream.until_done()
        final = stream.current_completion_snapshot
    assert final.choices[0].message.content == choice.message.content
    # The reply, sent back as it came, is a part of the next prompt.
    asked["messages"] = [*MESSAGES, choice.message, {"role": "user", "content": "more"}]
    following = await client.chat.completions.create(**asked)
    assert following.model_extra is not None
    assert len(following.model_extra["prompt_token_ids"]) > len(prompt)


async def stops_and_batches(client: openai.AsyncOpenAI, model: str, nvext: dict[str, Any]) -> None:
    asked: dict[str, Any] = {"model": model, "max_tokens": TOKENS, "temperature": 0}
    extra = {"return_token_ids": True, "ignore_eos": True, "nvext": nvext, "skip_special_tokens": False}
    prompts: list[Any] = [PROMPT, [9, 10], PROMPT]
    alone = [await client.completions.create(**asked, prompt=one, extra_body=extra) for one in prompts[:2]]
    batch = await client.completions.create(**asked, prompt=prompts, n=2, extra_body=extra)
    assert [choice.index for choice in batch.choices] == list(range(6))
    expected = [alone[which].choices[0] for which in (0, 0, 1, 1, 0, 0)]
    assert [ids_of(choice) for choice in batch.choices] == [ids_of(choice) for choice in expected]
    assert batch.usage is not None
    assert (batch.usage.prompt_tokens, batch.usage.completion_tokens) == (8, 6 * TOKENS)
    text = alone[0].choices[0].text
    stop = text[len(text) // 2 :][:2]
    for include in (False, True):
        more = {**extra, "include_stop_str_in_output": include}
        (cut,) = (
            await client.completions.create(**asked, prompt=PROMPT, stop=["\x00", stop], extra_body=more)
        ).choices
        end = text.index(stop)
        assert cut.text == text[: end + len(stop) * include]
        assert (cut.finish_reason, cut.model_extra and cut.model_extra["stop_reason"]) == ("stop", stop)
        whole = ids_of(alone[0].choices[0])
        assert ids_of(cut) == whole[: len(ids_of(cut))]
        streamed = [
            chunk.choices[0]
            async for chunk in await client.completions.create(
                **asked, prompt=PROMPT, stop=stop, extra_body=more, stream=True
            )
        ]
        assert "".join(part.text for part in streamed) == cut.text
        assert [one for part in streamed for one in ids_of(part)] == ids_of(cut)
        assert streamed[-1].finish_reason == "stop"
