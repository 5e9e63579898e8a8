"""Requests of engines that take token ids: from the prompt to deltas with text, spans and the end by a stop string."""

from __future__ import annotations

import asyncio
import contextlib
from abc import abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass, field

from rl_plane.errors import EngineFailed, InvalidRequest, PlaneError
from rl_plane.protocol.generation import GenerateDelta, GenerateRequest
from worker.engines.base import EngineAdapter, EngineInfo, EngineOptions
from worker.engines.common.pieces import Piece, Top
from worker.engines.common.request_gate import requests_of
from worker.engines.common.scoring import LOGPROB_FLOOR
from worker.engines.common.spans import SpanLog
from worker.engines.common.stop_strings import ReplyText
from worker.engines.common.token_checks import check_pooled, check_tokens, check_tops, refuse_lacking
from worker.engines.common.tokenizing import Tokenizing, TokenTexts, eos_tokens, load_tokenizer, prompt_tokens


@dataclass(eq=False, slots=True)
class _RunningRequest:
    begun: bool = False
    """It has a token."""
    tokenizing: bool = True
    """The engine does not have the request yet."""
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    """Set if the request is aborted while its prompt is being tokenized."""


class Generating(EngineAdapter, Tokenizing):
    """Implements `start`, `generate` and `load` of an engine that makes pieces of token ids."""

    def __init__(self, options: EngineOptions) -> None:
        super().__init__()
        options.check_model()
        self._options = options
        self._eos: frozenset[int] = frozenset()
        """The tokens that end a text, unless a request says otherwise."""
        self._token_texts: TokenTexts | None = None
        self._info: EngineInfo | None = None
        self._requests: dict[str, _RunningRequest] = {}

    async def start(self) -> EngineInfo:
        try:
            self._info = await self._start()
        except PlaneError:
            await self.close()
            raise
        except Exception as error:
            await self.close()
            raise EngineFailed(f"the engine did not start: {error}") from error
        return self._info

    @abstractmethod
    async def _start(self) -> EngineInfo:
        """Starts the engine, which may leave the closing after an error to `start`."""

    @abstractmethod
    def _pieces(self, request: GenerateRequest, prompt: list[int]) -> AsyncGenerator[Piece, None]:
        """Yields pieces, each of one kind of weights and with tokens or a finish_reason, until one has a
        finish_reason. Closing the generator aborts the request in the engine."""

    def _load_tokenizer(self) -> None:
        """Blocks."""
        self._tokenizer = load_tokenizer(self._options.model)
        self._eos = eos_tokens(self._options.model, self._tokenizer)
        self._token_texts = TokenTexts(self._tokenizer)

    def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateDelta]:
        return self._deltas(request, self._pieces)

    async def _deltas(
        self, request: GenerateRequest, make: Callable[[GenerateRequest, list[int]], AsyncGenerator[Piece, None]]
    ) -> AsyncIterator[GenerateDelta]:
        """Yields the deltas of the pieces that `make` makes, as `_pieces` does."""
        self._running()
        if request.id in self._requests:
            raise InvalidRequest(f"request {request.id} is running already", field="id", fix="use a fresh id")
        one = self._requests[request.id] = _RunningRequest()
        try:
            prompt = await self._prompt_of(request, one)
            if prompt is None:
                self._forget_request(request, one)  # the id may be used again at once
                yield GenerateDelta(token_ids=[], logprobs=[] if request.logprobs else None, finish_reason="abort")
                return
            if request.pooling is not None:
                check_pooled(prompt, self.info.vocab_size, self.info.max_model_len)
            else:
                check_tokens(request, prompt, self._eos, self.info.vocab_size, self.info.max_model_len)
            refuse_lacking(request, self.info.lacks)
            check_tops(request, self.info.max_prompt_top_logprobs)
            one.tokenizing = False
            text, spans = ReplyText(self._tokenizer, request, prompt), SpanLog()
            async with contextlib.aclosing(make(request, prompt)) as pieces:
                async for piece in pieces:
                    is_first, one.begun = not one.begun, True
                    read = text.add(piece.token_ids, last=piece.finish_reason is not None)
                    if read.stop_string is not None:
                        piece = piece.until(read.count)
                    if piece.labels:  # they are all the same
                        spans.add(piece.labels[0], len(piece.labels))
                    finished = piece.finish_reason is not None
                    tops = _finite(piece.tops) if request.logprobs and request.top_logprobs else None
                    facts = await self._prompt_facts(request, prompt, piece) if is_first else {}
                    yield GenerateDelta(
                        token_ids=piece.token_ids,
                        logprobs=piece.logprobs if request.logprobs else None,
                        top_logprobs=tops,
                        token_texts=self._texts_of(request, piece.token_ids, tops),
                        text=read.text,
                        finish_reason=piece.finish_reason,
                        stop_string=read.stop_string,
                        spans=spans.tell(finished) if piece.sure else [],
                        prompt_token_ids=prompt if is_first else None,
                        prompt_logprobs=piece.prompt_logprobs,
                        prompt_tops=piece.prompt_tops,
                        routed_experts=piece.routed,
                        pooled=piece.pooled,
                        **facts,
                    )
                    if finished:
                        return  # a stop string ends the request here; closing ends it in the engine
        finally:
            self._forget_request(request, one)

    async def _prompt_facts(
        self, request: GenerateRequest, prompt: list[int], piece: Piece
    ) -> dict[str, str | dict[str, str]]:
        """Returns the fields of the first delta that have the prompt's texts. A thread decodes them: a prompt with its
        likeliest tokens may name most of a vocabulary."""
        facts: dict[str, str | dict[str, str]] = {}
        if request.prompt_text:
            whole = request.prompt if request.truncate_prompt_tokens is None else None
            facts["prompt_text"] = await self.detokenize(prompt) if whole is None else whole
        if request.prompt_token_texts and piece.prompt_logprobs is not None and self._token_texts is not None:
            tokens = set(prompt) | (piece.prompt_tops.ids() if piece.prompt_tops is not None else set())
            facts["prompt_token_texts"] = await asyncio.to_thread(self._token_texts.of, tokens)
        return facts

    def _texts_of(
        self, request: GenerateRequest, tokens: list[int], tops: list[list[tuple[int, float]]] | None
    ) -> dict[str, str] | None:
        if not (request.logprobs and request.token_texts) or self._token_texts is None:
            return None
        return self._token_texts.of({*tokens, *(token for row in tops or () for token, _ in row)})

    def _forget_request(self, request: GenerateRequest, one: _RunningRequest) -> None:
        if self._requests.get(request.id) is one:
            del self._requests[request.id]

    async def _prompt_of(self, request: GenerateRequest, one: _RunningRequest) -> list[int] | None:
        """Returns the prompt's tokens, or None if the request was aborted meanwhile: many prompts may wait for a
        thread."""
        if request.prompt_token_ids is not None:
            return await prompt_tokens(self._tokenizer, request)  # does not wait
        work = asyncio.create_task(prompt_tokens(self._tokenizer, request))
        until = asyncio.create_task(one.aborted.wait())
        try:
            await asyncio.wait((work, until), return_when=asyncio.FIRST_COMPLETED)
            return None if one.aborted.is_set() else work.result()
        finally:
            work.cancel()
            until.cancel()

    def _abort_tokenized(self, request_ids: list[str] | None) -> int:
        """Aborts requests whose prompts are being tokenized. Returns how many."""
        found = requests_of(self._requests, request_ids)
        ended = [one for one in found if one.tokenizing and not one.aborted.is_set()]
        for one in ended:
            one.aborted.set()
        return len(ended)

    def load(self) -> tuple[int, int]:
        requests = [one for one in list(self._requests.values()) if not one.tokenizing]
        running = sum(one.begun for one in requests)
        return running, len(requests) - running


def _finite(tops: list[Top]) -> list[Top]:
    """Processed logprobs of tokens that `top_k` or another limit has barred are -inf, which JSON does not have."""
    return [[(token, max(value, LOGPROB_FLOOR)) for token, value in top] for top in tops]
