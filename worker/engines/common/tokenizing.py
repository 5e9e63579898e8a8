"""Tokens and text for engines that take token ids: prompts in, text out, with a Hugging Face tokenizer."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from rl_plane.errors import EngineFailed, InvalidRequest
from rl_plane.protocol.generation import GenerateRequest, Rendering
from rl_plane.protocol.worker_ops import Tokenize
from worker.engines.base import EngineInfo
from worker.engines.capabilities import CanTokenize
from worker.engines.common.token_checks import check_vocabulary, kept_of_prompt

aside = ThreadPoolExecutor(2, "tokenize")
"""Threads for the ops that only tokenize. The loop's own threads serve swaps and prompts."""


def load_tokenizer(model: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model, local_files_only=True)


def eos_tokens(model: Path, tokenizer: Any) -> frozenset[int]:
    """The tokens that end a text, as the model, its part for text, its generation config and its tokenizer name them. A
    tokenizer may have more tokens than its model: only ids that the model can make are in the result."""
    from transformers import AutoConfig, GenerationConfig

    config = AutoConfig.from_pretrained(model, local_files_only=True)
    text = config.get_text_config()
    sources = [config, text, tokenizer]
    if (model / "generation_config.json").is_file():
        sources.append(GenerationConfig.from_pretrained(model, local_files_only=True))
    found: set[int] = set()
    for source in sources:
        value = getattr(source, "eos_token_id", None)
        found.update([value] if isinstance(value, int) else value or [])
    return frozenset(token for token in found if 0 <= token < text.vocab_size)


async def prompt_tokens(tokenizer: Any, request: GenerateRequest) -> list[int]:
    request.check_one_prompt()
    if request.prompt_token_ids is not None:
        ids = list(request.prompt_token_ids)
    elif request.prompt is not None:
        pair = request.pooling.text_pair if request.pooling is not None else None
        ids = await _encoded(tokenizer, request.prompt, request.add_special_tokens, None, pair)
    else:
        ids = await _rendered(tokenizer, request.messages or [], request.rendering, None)
    return kept_of_prompt(request, ids)


async def _encoded(
    tokenizer: Any, text: str, add_special_tokens: bool, executor: Executor | None, pair: str | None = None
) -> list[int]:
    """`executor`: None for the loop's own threads. `pair`: a second text, joined as the tokenizer joins pairs."""
    encode = partial(tokenizer.encode, text, pair, add_special_tokens=add_special_tokens)
    ids: list[int] = await asyncio.get_running_loop().run_in_executor(executor, encode)
    return ids


async def _rendered(
    tokenizer: Any, messages: list[dict[str, Any]], rendering: Rendering, executor: Executor | None
) -> list[int]:
    render = partial(
        tokenizer.apply_chat_template,
        messages,
        tools=rendering.tools,
        documents=rendering.documents,
        add_generation_prompt=rendering.add_generation_prompt,
        continue_final_message=rendering.continue_final_message,
        tokenize=True,
        return_dict=False,
        **rendering.more,
    )
    try:
        ids: list[int] = await asyncio.get_running_loop().run_in_executor(executor, render)
    except Exception as error:  # a template is a program of the model's, and raises any exception
        raise InvalidRequest(
            f"the chat template refuses these messages: {error}",
            field="messages",
            fix="give each a role and a content",
        ) from error
    return ids


class Tokenizing(CanTokenize):
    """The half of an engine that turns text into tokens and back, without the model."""

    _tokenizer: Any = None
    _info: EngineInfo | None = None

    @property
    def info(self) -> EngineInfo:
        """Raises EngineFailed before the engine has started."""
        if self._info is None:
            raise EngineFailed("the engine is not running")
        return self._info

    @abstractmethod
    def _running(self) -> object:
        """Raises EngineFailed if the engine is not running."""

    async def tokenize(self, body: Tokenize) -> list[int]:
        self._running()
        if body.prompt is not None:
            return await _encoded(self._tokenizer, body.prompt, body.add_special_tokens is not False, aside)
        return await _rendered(self._tokenizer, body.messages or [], body.rendering, aside)

    async def detokenize(self, token_ids: list[int]) -> str:
        self._running()
        check_vocabulary("tokens", token_ids, self.info.vocab_size)
        decode = partial(
            self._tokenizer.decode, token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        text: str = await asyncio.get_running_loop().run_in_executor(aside, decode)
        return text


class TokenTexts:
    """The text of single tokens, each decoded alone, as vLLM's server names tokens beside their logprobs. It remembers
    each text, so it grows to the vocabulary at most."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def of(self, token_ids: Iterable[int]) -> dict[str, str]:
        return {str(token): self._one(token) for token in token_ids}

    def _one(self, token: int) -> str:
        if (text := self._known.get(token)) is None:
            text = self._known[token] = self._tokenizer.decode([token])
        return text


class IncrementalText:
    """The text of tokens as they arrive. It holds back characters that more bytes may complete, until the last
    token."""

    _WINDOW = 16  # tokens decoded anew each time: some context, for tokenizers whose tokens depend on it

    def __init__(self, tokenizer: Any, skip_special_tokens: bool = True) -> None:
        self._decode = _decoder(tokenizer, skip_special_tokens)
        self._ids: list[int] = []
        self._sent = 0  # characters of the decoded window

    def add(self, token_ids: list[int], last: bool) -> str:
        self._ids += token_ids
        text, unfinished = self._decode(self._ids), list[int]()
        if not last and text.endswith("\ufffd"):
            text, unfinished = self._without_unfinished(text)
        whole = len(text)
        if not last:
            # An unfinished character is at most three bytes, each shown as a replacement character or all as one.
            while whole > max(self._sent, len(text) - 3) and text[whole - 1] == "\ufffd":
                whole -= 1
        fresh = text[self._sent : whole]
        self._sent = max(self._sent, whole)
        if len(self._ids) > 2 * self._WINDOW:
            fresh += self._cut(text)
        self._ids += unfinished
        return fresh

    def _without_unfinished(self, text: str) -> tuple[str, list[int]]:
        """Takes the last tokens away if they make earlier characters unreadable. Returns the text without them, and
        these tokens. Some tokenizers show a whole run of bytes as replacement characters until its last one is
        there."""
        for count in range(1, 4):  # an unfinished character has at most three bytes
            before = self._decode(self._ids[:-count])
            if not before.endswith("\ufffd"):
                if text.startswith(before):
                    break
                unfinished = self._ids[-count:]
                del self._ids[-count:]
                return before, unfinished
        return text, []

    def _cut(self, text: str) -> str:
        """Keeps the last tokens only. `text`: that of all tokens. Returns the characters that can't be held back any
        longer, mostly none."""
        held = text[self._sent :]
        # A window that begins inside of a character has other text. Then it begins up to three bytes sooner.
        for size in range(self._WINDOW, self._WINDOW + 4):
            window = self._decode(self._ids[-size:])
            if len(window) >= len(held) and text.endswith(window):
                self._ids, self._sent = self._ids[-size:], len(window) - len(held)
                return ""
        self._ids, self._sent = self._ids[-size:], len(window)
        return held


def _decoder(tokenizer: Any, skip_special_tokens: bool) -> Callable[[list[int]], str]:
    """The tokenizer's function from tokens to their text.

    Most of the tokenizers of transformers only pass the tokens on to one of the library tokenizers. Calling that one
    directly takes a third of the time."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        from transformers import PreTrainedTokenizerFast as Plain

        kind = type(tokenizer)
        if (kind.decode, kind._decode) == (Plain.decode, Plain._decode):
            return partial(backend.decode, skip_special_tokens=skip_special_tokens)
    return partial(tokenizer.decode, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
