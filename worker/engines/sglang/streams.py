"""Requests on their way through SGLang: each is a task that fills a queue, which its reader empties."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
from base64 import b64decode
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from rl_plane.errors import EngineFailed, InvalidRequest, PlaneError
from rl_plane.protocol.generation import FinishReason, GenerateRequest
from rl_plane.protocol.prompt_tops import PromptPlace, PromptTops
from rl_plane.protocol.routed_experts import RoutedExperts, width_of
from rl_plane.protocol.versions import WeightVersion
from worker.engines.common.finite_logits import NOT_FINITE, check_prompt
from worker.engines.common.form_bound import TOO_AMBIGUOUS, too_ambiguous
from worker.engines.common.pieces import Piece, PieceQueue, Top
from worker.engines.common.spans import Label
from worker.engines.sglang.logits import NOTE
from worker.engines.sglang.text_form import REFUSED, sampling_options

_FINISH: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}
MAX_SEED = 1 << 63
MAX_TOP_K = 1 << 30
"""More than any vocabulary. SGLang ends itself if the number does not fit 32 bits."""
FIRST_KEY = "rl-plane-0"
"""The engine's name of the weights that it starts with."""


def _likeliest(top: list[tuple[float, int, Any]], count: int) -> Top:
    """SGLang has one number for the prompt and the new tokens, so it may return more than this part asks for."""
    return [(token, value) for value, token, _ in top[:count]]


def _rank_in(tops: Top, token: int) -> int | None:
    return next((rank for rank, (one, _) in enumerate(tops, 1) if one == token), None)


def _ended_by_engine(why: str) -> PlaneError:
    if TOO_AMBIGUOUS in why:
        return too_ambiguous()
    if why.startswith(REFUSED):
        return InvalidRequest(
            f"SGLang refuses the form: {why}", field="structured_output", fix="give a form that SGLang takes"
        )
    return EngineFailed(f"SGLang ended the request: {why}")


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of a model, from its configuration."""

    layers: int
    top_k: int
    width: Literal[1, 2]

    @classmethod
    def of(cls, config: Any) -> Experts:
        """`config`: transformers' config of the language model."""
        names = ("num_experts", "num_local_experts", "n_routed_experts")
        count = next((found for name in names if (found := getattr(config, name, None))), 0)
        return cls(config.num_hidden_layers, getattr(config, "num_experts_per_tok", None) or 0, width_of(count))

    def read(self, encoded: str | None) -> RoutedExperts | None:
        """Reads base64 of int32 [tokens, layers, top_k]; None for an aborted request."""
        if encoded is None:
            return None
        import numpy

        ids = numpy.frombuffer(b64decode(encoded), "<i4").astype(f"<u{self.width}")
        return RoutedExperts(layers=self.layers, top_k=self.top_k, width=self.width, data=ids.tobytes())


class SglangStream:
    """One request, and its pieces."""

    def __init__(
        self, request: GenerateRequest, prompt: list[int], stop: frozenset[int], experts: Experts
    ) -> None:
        self.request = request
        self._experts = experts
        self.prompt = prompt
        self.submitted = False
        self.adapter: str | None = None
        """The adapter's name in the engine, once the request is submitted."""
        self.rid: str | None = None
        """SGLang's id of the request, once it is submitted."""
        self.kv: WeightVersion | None = None
        """The base weights of the oldest KV that the request has kept, if they have been replaced since."""
        self.feeding: asyncio.Task[Any] | None = None
        self.pieces = PieceQueue()
        self._stop = stop
        self.made: list[int] = []
        self.ended = False
        self._start = 0
        """The number of tokens that the request had when the engine was asked for the rest."""
        self._runs: list[tuple[str, int]] = []  # (key, end), counted from `_start`

    def take(self, out: dict[str, Any], key: str, label: Label) -> bool:
        """Takes an output of the engine. Returns whether the request has ended. `key`: the engine's name of its
        weights."""
        meta, reason = out["meta_info"], out["meta_info"]["finish_reason"]
        if meta.get(NOTE):
            self.end(EngineFailed(NOT_FINITE))
            return True
        if reason is not None and reason["type"] == "abort" and reason.get("status_code") is not None:
            # Such an output may lack what the request asks for.
            self.end(_ended_by_engine(str(reason.get("message"))))
            return True
        # The count says what is new: an abort repeats the last token.
        fresh = meta["completion_tokens"] - self._count
        first = not self.made
        piece = Piece(list(out["output_ids"][:fresh]))
        if self.request.logprobs:
            piece.logprobs = [value for value, *_ in meta["output_token_logprobs"][:fresh]]
        if self.request.logprobs and self.request.top_logprobs:
            tops = meta["output_top_logprobs"][:fresh]
            piece.tops = [_likeliest(top, self.request.top_logprobs) for top in tops]
        if self.request.prompt_logprobs and fresh and first:
            piece.prompt_logprobs = check_prompt([value for value, *_ in meta["input_token_logprobs"]])
            piece.prompt_tops = self._prompt_tops(meta)
        piece.labels = [label] * fresh
        self.made += piece.token_ids
        if fresh and self._runs and self._runs[-1][0] == key:
            self._runs[-1] = (key, self._count)
        elif fresh:
            self._runs.append((key, self._count))
        told = [(span["version"], span["end"]) for span in meta.get("weight_versions") or () if span["end"]]
        piece.sure = not told or told == self._runs
        if reason is not None:
            piece.finish_reason = _FINISH[reason["type"]]
            piece.routed = self._experts.read(meta.get("routed_experts")) if self.request.routed_experts else None
        stopped = next((at for at, token in enumerate(piece.token_ids) if token in self._stop), None)
        if stopped is not None:
            # With ignore_eos the engine ignores stop tokens, and has made more tokens after it.
            piece = piece.until(stopped + 1)
        if piece.finish_reason is not None:
            self.end(piece)
            return True
        if not self.ended:
            self.pieces.put(piece)
        return self.ended

    def _prompt_tops(self, meta: dict[str, Any]) -> PromptTops | None:
        """SGLang has no ranks. The rank of a token among the likeliest is its place there."""
        count = self.request.prompt_top_logprobs
        if not count:
            return None
        rows = [_likeliest(top, count) for top in meta["input_top_logprobs"][1:]]
        places = zip(self.prompt[1:], rows, strict=True)
        return PromptTops.of(count, (PromptPlace(_rank_in(tops, token), tops) for token, tops in places))

    @property
    def _count(self) -> int:
        return len(self.made) - self._start

    def begin_again(self) -> None:
        """Prepares to ask the engine, which has dropped the request, for the rest."""
        self.submitted, self._start, self._runs = False, len(self.made), []
        self.kv = None

    def end(self, item: Piece | PlaneError) -> None:
        """Adds the last item. Later items are dropped."""
        if not self.ended:
            self.ended = True
            self.pieces.put(item)


class Feeder:
    """Gives requests to the engine while its gate is open.

    `adapter_of(name)`: an adapter's name in the engine. `label_of(adapter)`: the label of tokens that the engine makes
    now. All tokens from before a swap have been taken before the swap begins, and the engine makes none until it ends.
    """

    def __init__(
        self,
        manager: Any,
        eos: frozenset[int],
        adapter_of: Callable[[str | None], str | None],
        label_of: Callable[[str | None], Label],
        experts: Experts,
    ) -> None:
        self.key = FIRST_KEY
        """The engine's name of the served weights."""
        self._manager = manager
        self._eos = eos
        self._adapter_of = adapter_of
        self._label_of = label_of
        self._experts = experts
        self._open = asyncio.Event()
        self._open.set()
        self._numbers = itertools.count()
        self.streams: dict[str, SglangStream] = {}

    def open(self) -> None:
        self._open.set()

    def close(self) -> None:
        """Makes requests that come from now on wait."""
        self._open.clear()

    def forget_kv(self) -> None:
        """Notes that all requests compute their KV again."""
        for stream in self.streams.values():
            stream.kv = None

    def submitted(self) -> list[SglangStream]:
        return [stream for stream in self.streams.values() if stream.submitted]

    def begun(self) -> list[SglangStream]:
        """The requests in the engine, and the requests that have tokens and wait to return there."""
        return [stream for stream in self.streams.values() if stream.submitted or stream.made]

    async def run(self, request: GenerateRequest, prompt: list[int]) -> AsyncGenerator[Piece, None]:
        """Yields pieces until one has a finish_reason. Leaving early aborts the request in the engine."""
        after = frozenset(request.stop_token_ids) if request.ignore_eos else frozenset()
        stream = self.streams[request.id] = SglangStream(request, prompt, after, self._experts)
        stream.feeding = asyncio.create_task(self._feed(stream))
        try:
            finished = False
            while not finished:
                piece = await stream.pieces.next()
                finished = piece.finish_reason is not None
                yield piece
        finally:
            del self.streams[request.id]
            stream.feeding.cancel()  # this aborts it in the engine

    async def pooled(self, request: GenerateRequest, prompt: list[int]) -> tuple[list[float], Label] | None:
        """The raw numbers of a pooling request. None: the request was aborted. Cancelling it aborts the request.

        SGLang does not say which weights have computed a vector. So a vector counts only if the engine had the same
        weights from the submission to the end. Otherwise it is computed again."""
        stream = self.streams[request.id] = SglangStream(request, prompt, frozenset(), self._experts)
        try:
            while not stream.ended:
                feeding = stream.feeding = asyncio.create_task(self._feed_pooled(stream))
                await asyncio.wait([feeding])
                found: tuple[list[float], Label] | None = None if feeding.cancelled() else feeding.result()
                if found is not None:
                    return found
            await stream.pieces.next()  # raises the error that has ended the request, if it was one
            return None
        finally:
            del self.streams[request.id]
            if stream.feeding is not None:
                stream.feeding.cancel()  # this aborts it in the engine

    async def _feed_pooled(self, stream: SglangStream) -> tuple[list[float], Label] | None:
        """Returns the numbers and their weights. It returns None if the weights have changed meanwhile, or if the
        request has ended."""
        from sglang.srt.managers.io_struct import EmbeddingReqInput

        try:
            while not self._open.is_set():
                await self._open.wait()
            key, stream.submitted = self.key, True
            stream.rid = f"{next(self._numbers):016x}"
            asked = EmbeddingReqInput(rid=stream.rid, input_ids=stream.prompt)
            async with contextlib.aclosing(self._manager.generate_request(asked)) as outputs:
                out = await anext(outputs)
            reason = out["meta_info"]["finish_reason"] or {}
            if reason.get("type") == "abort":
                is_refused = reason.get("status_code") is not None
                stream.end(
                    _ended_by_engine(str(reason.get("message"))) if is_refused else Piece(finish_reason="abort")
                )
                return None
            return (out["embedding"], self._label_of(None)) if key == self.key else None
        except PlaneError as error:
            stream.end(error)
        except Exception as error:
            stream.end(EngineFailed(f"{type(error).__name__}: {error}"))
        finally:
            stream.submitted = False
        return None

    async def abort(self, streams: list[SglangStream]) -> None:
        """Ends these requests here at once, and in the engine."""
        for stream in streams:
            stream.end(Piece(finish_reason="abort"))
        await self._take_out(streams)

    async def begin_again(self, streams: list[SglangStream]) -> None:
        """Ends these requests in the engine. When the gate opens, the engine is asked for the rest, after the tokens so
        far."""
        await self._take_out(streams)
        for stream in streams:
            if not stream.ended and self.streams.get(stream.request.id) is stream:
                stream.begin_again()
                stream.feeding = asyncio.create_task(self._feed(stream))

    def end_left(self, adapter: str) -> None:
        """Ends, in a frozen engine, requests of this adapter that were aborted before: the scheduler may have left the
        abort to the next step, which does not come."""
        for rid, state in list(self._manager.rid_to_state.items()):
            if state.obj.lora_path == adapter:
                state.abort_sent = False  # otherwise it is not sent again
                self._manager.abort_request(rid)

    def feed_begun(self) -> None:
        """Lets requests that have begun pass the closed gate."""
        for stream in self.begun():
            if not (stream.submitted or stream.ended) and stream.feeding is not None:
                stream.feeding.cancel()
                stream.feeding = asyncio.create_task(self._feed(stream, waits=False))

    @staticmethod
    async def _take_out(streams: list[SglangStream]) -> None:
        tasks = [stream.feeding for stream in streams if stream.feeding is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def fail(self, error: PlaneError) -> None:
        """Ends all requests: the engine is dead."""
        for stream in self.streams.values():
            stream.end(error)
            if stream.feeding is not None:
                stream.feeding.cancel()  # it would never return

    async def _feed(self, stream: SglangStream, *, waits: bool = True) -> None:
        try:
            while waits and not self._open.is_set():
                await self._open.wait()
            stream.adapter = self._adapter_of(stream.request.adapter)
            stream.submitted = True
            # SGLang aborts by prefix: all ids are of one length.
            stream.rid = f"{next(self._numbers):016x}"
            async with contextlib.aclosing(self._manager.generate_request(self._asked(stream))) as outputs:
                async for out in outputs:
                    if stream.take(out, self.key, self._label(stream)):
                        return  # closing aborts the request in the engine
            stream.end(EngineFailed("SGLang ended the request without a reason"))
        except PlaneError as error:
            stream.end(error)
        except Exception as error:
            stream.end(EngineFailed(f"{type(error).__name__}: {error}"))

    def _label(self, stream: SglangStream) -> Label:
        label = self._label_of(stream.request.adapter)
        return label if stream.kv in (None, label.base) else replace(label, kv=stream.kv)

    def _asked(self, stream: SglangStream) -> Any:
        from sglang.srt.managers.io_struct import GenerateReqInput

        request = stream.request
        with_prompt = request.prompt_logprobs and not stream.made
        return GenerateReqInput(
            rid=stream.rid,
            input_ids=[*stream.prompt, *stream.made],
            lora_path=stream.adapter,
            cache_salt=request.cache_salt,
            stream=True,
            return_logprob=request.logprobs or with_prompt,
            top_logprobs_num=max(
                request.top_logprobs if request.logprobs else 0,
                request.prompt_top_logprobs if with_prompt else 0,
            ),
            return_routed_experts=request.routed_experts,
            logprob_start_len=0 if with_prompt else -1,
            sampling_params={
                "max_new_tokens": request.max_tokens - len(stream.made),
                "temperature": request.temperature,
                "top_p": request.top_p,
                "top_k": min(request.top_k, MAX_TOP_K) or -1,
                # A draw depends on seed and position only, so the rest continues the same draws.
                "sampling_seed": request.seed if request.seed is not None else secrets.randbelow(MAX_SEED),
                "stop_token_ids": sorted({*request.stop_token_ids, *self._eos}) or None,
                "ignore_eos": request.ignore_eos,
                "logit_bias": request.logit_bias or None,
                "skip_special_tokens": False,
                **sampling_options(request, len(stream.made)),
            },
        )
