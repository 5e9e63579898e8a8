"""Requests on their way through vLLM's front end."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from rl_plane._util.alarm import Alarm
from rl_plane.errors import EngineFailed, InvalidRequest, PlaneError
from rl_plane.protocol.generation import FinishReason, GenerateRequest
from rl_plane.protocol.prompt_tops import PromptPlace, PromptTops
from rl_plane.protocol.routed_experts import RoutedExperts
from rl_plane.protocol.versions import WeightVersion
from worker.engines.common.finite_logits import NOT_FINITE, check_prompt
from worker.engines.common.form_bound import TOO_AMBIGUOUS, too_ambiguous
from worker.engines.common.pieces import Piece, Top
from worker.engines.common.request_gate import requests_of
from worker.engines.common.spans import Label
from worker.engines.vllm.pooled_names import pooled_names
from worker.engines.vllm.processes import VllmProcess
from worker.engines.vllm.text_form import sampling_options
from worker.runtime.gathering import Turns

NO_OUTPUTS = 1 << 30
"""Tokens between two outputs, more than a request has: vLLM makes outputs of the first token and of the end only. What
comes between them is in vLLM's state of the request."""
_FINISH: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


@dataclass(eq=False, slots=True)
class VllmStream:
    """One request in vLLM's front end."""

    key: str
    """The request's id in the engine."""
    adapter: str | None
    kv: dict[str, WeightVersion] = field(default_factory=dict)
    """Name of weights in vLLM → the base weights of the oldest KV that the request has kept under them."""
    submitted: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the engine has the request, or will never get it. An abort waits for this event."""


class Streams:
    """`eos`: the tokens that end a text, unless a request says otherwise. `label_of(name, adapter)`: the label of a
    token that the weights of this name in vLLM made. A name that is None is unknown."""

    def __init__(
        self,
        process: VllmProcess,
        eos: frozenset[int],
        label_of: Callable[[str | None, str | None], Label],
    ) -> None:
        self._process = process
        self._llm = process.llm
        self._eos = eos
        self._label_of = label_of
        self._streams: dict[str, VllmStream] = {}
        self._numbers = itertools.count(1)
        self._turns = Turns()

    def of(self, request_ids: Iterable[str] | None) -> list[VllmStream]:
        """The running requests with these ids (None: all)."""
        return requests_of(self._streams, request_ids)

    def coming(self) -> list[VllmStream]:
        """The requests that vLLM does not have yet."""
        return [stream for stream in self._streams.values() if not stream.submitted.is_set()]

    def of_adapter(self, name: str) -> list[VllmStream]:
        return [stream for stream in self._streams.values() if stream.adapter == name]

    def keep_kv(self, ids: Iterable[str], before: str, after: str, base: WeightVersion | None) -> None:
        """Notes that the requests with these ids in vLLM keep the KV that they have under the weights `before`, while
        they continue with the weights `after`."""
        kept, known = set(ids), self._llm.output_processor.external_req_ids
        for stream in self._streams.values():
            version = stream.kv.get(before) or base
            if version is not None and not kept.isdisjoint(known.get(stream.key) or ()):
                stream.kv[after] = version

    def _label(self, name: str | None, stream: VllmStream) -> Label:
        label, kv = self._label_of(name, stream.adapter), stream.kv.get(name or "")
        return label if kv in (None, label.base) else replace(label, kv=kv)

    async def abort(self, streams: list[VllmStream]) -> None:
        for stream in streams:
            await stream.submitted.wait()
        if streams:
            await self._llm.abort([stream.key for stream in streams])

    async def run(self, request: GenerateRequest, prompt: list[int], lora: Any) -> AsyncGenerator[Piece, None]:
        """Yields pieces until one has a finish_reason. Closing it aborts the request."""
        stream = self._streams[request.id] = VllmStream(f"rl-plane-{next(self._numbers)}", request.adapter)
        made, finished = 0, False
        try:
            outputs = _Outputs(await self._submit(stream, request, prompt, lora), self._turns)
            tokens = _EarlyTokens(self._llm.output_processor, stream.key)
            while not finished:
                output = await outputs.next(request.gather_s if made else 0.0)
                choice: Any = output.outputs[0] if output is not None else None
                finished = output is not None and output.finished
                fresh, names, rows = tokens.after(made, choice)
                if not fresh and not finished:
                    continue
                label_of = {name: self._label(name, stream) for name in dict.fromkeys(names)}
                piece = Piece(fresh, labels=[label_of[name] for name in names])
                if request.prompt_logprobs and fresh and not made:
                    steps = output.prompt_logprobs or []
                    piece.prompt_logprobs = _prompt_logprobs(steps, prompt)
                    # A thread packs them: there may be a million, and other requests wait for this loop.
                    count = request.prompt_top_logprobs
                    piece.prompt_tops = await asyncio.to_thread(_prompt_tops, steps, prompt, count)
                if request.logprobs:
                    piece.logprobs = _logprobs(fresh, rows)
                    piece.tops = _tops(fresh, rows, request.top_logprobs)
                if finished:
                    piece.finish_reason = _FINISH.get(choice.finish_reason)
                    piece.routed = _routed(choice.routed_experts) if request.routed_experts else None
                made += len(fresh)
                if fresh or piece.finish_reason is not None:
                    for part in piece.by_weights():
                        yield part
                if finished and piece.finish_reason is None:
                    raise _failure(choice)
        except Exception as error:
            raise self._process.translated(error) from error
        finally:
            stream.submitted.set()
            del self._streams[request.id]
            if not finished and not self._llm.errored:
                await self._llm.abort(stream.key)

    async def pooled(self, request: GenerateRequest, prompt: list[int]) -> tuple[Any, Label] | None:
        """The raw numbers of a pooling request, as a tensor. None: the request was aborted. Cancelling it aborts the
        request."""
        from vllm import PoolingParams

        assert request.pooling is not None, "a pooling request"
        stream = self._streams[request.id] = VllmStream(f"rl-plane-{next(self._numbers)}", None)
        finished, names = False, pooled_names(self._llm)
        try:
            rendered = {"type": "token", "prompt_token_ids": prompt}
            # The activation is the same on every engine: `PoolingHead` has it.
            asked = PoolingParams(task=request.pooling.task, use_activation=False)
            queue = await self._llm.add_request(stream.key, rendered, asked)
            stream.submitted.set()
            output = queue.get_nowait() or await queue.get()
            finished = output.finished
            raw = output.outputs.data
            return (raw, self._label_of(names.get(stream.key), None)) if raw.numel() else None
        except Exception as error:
            raise self._process.translated(error) from error
        finally:
            stream.submitted.set()
            names.pop(stream.key, None)
            del self._streams[request.id]
            if not finished and not self._llm.errored:
                await self._llm.abort(stream.key)

    async def _submit(self, stream: VllmStream, request: GenerateRequest, prompt: list[int], lora: Any) -> Any:
        from vllm.exceptions import VLLMClientError

        rendered: dict[str, Any] = {"type": "token", "prompt_token_ids": prompt}
        if request.cache_salt is not None:
            rendered["cache_salt"] = request.cache_salt
        try:
            sampling = self._sampling(request)
            if request.structured_output is not None:
                # vLLM checks the form before it takes the request. That takes seconds for some: other requests wait
                # for this loop.
                rendered = await self._checked_aside(stream.key, rendered, sampling, lora)
            queue = await self._llm.add_request(stream.key, rendered, sampling, lora_request=lora)
        except (ValueError, VLLMClientError) as error:  # vLLM's own checks
            of_form = "structured_output" if request.structured_output is not None else "request"
            field = getattr(error, "parameter", None) or of_form
            raise InvalidRequest(f"vLLM refuses it: {error}", field=field, fix="give what vLLM takes") from error
        stream.submitted.set()
        return queue

    async def _checked_aside(self, key: str, rendered: dict[str, Any], sampling: Any, lora: Any) -> Any:
        """Makes the engine's request of it, on a thread."""
        tasks = await self._llm.get_supported_tasks()
        process = self._llm.input_processor.process_inputs
        return await asyncio.to_thread(process, key, rendered, sampling, tasks, lora_request=lora)

    def _sampling(self, request: GenerateRequest) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        stop = set(request.stop_token_ids) | (set() if request.ignore_eos else self._eos)
        sampling = SamplingParams(
            max_tokens=request.max_tokens,
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            min_p=request.min_p,
            frequency_penalty=request.frequency_penalty,
            presence_penalty=request.presence_penalty,
            repetition_penalty=request.repetition_penalty,
            seed=request.seed,
            min_tokens=request.min_tokens,
            logit_bias={int(token): bias for token, bias in request.logit_bias.items()} or None,
            allowed_token_ids=request.allowed_token_ids,
            stop_token_ids=sorted(stop),
            ignore_eos=True,  # `stop` says what ends a text, as for every engine
            logprobs=request.top_logprobs if request.logprobs else None,
            prompt_logprobs=request.prompt_top_logprobs if request.prompt_logprobs else None,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            stream_interval=NO_OUTPUTS if request.gather_s else None,
            **sampling_options(request),
        )
        sampling.all_stop_token_ids.update(self._eos)  # `min_tokens` bars them
        # vLLM takes bad words as text only, and turns them into these.
        sampling._bad_words_token_ids = request.bad_words_token_ids or None
        return sampling


class _Outputs:
    """vLLM's outputs of one request."""

    def __init__(self, queue: Any, turns: Turns) -> None:
        self._queue = queue
        self._turns = turns
        self._put = queue.put
        self._alarm = Alarm()
        queue.put = self._noticing

    def _noticing(self, output: Any) -> None:
        self._put(output)
        self._alarm.ring()

    async def next(self, gather_s: float) -> Any:
        """Waits for the next output. With `gather_s` it waits until the next turn at most, and returns None if no
        output has come."""
        output = self._queue.get_nowait()
        if output is None and gather_s:
            await self._alarm.wait_for(self._turns.next(gather_s))
            return self._queue.get_nowait()
        return output or await self._queue.get()


class _EarlyTokens:
    """The tokens of one request, from vLLM's own state of it, which has them before an output does."""

    def __init__(self, processor: Any, key: str) -> None:
        internal = processor.external_req_ids.get(key)
        self._state = processor.request_states.get(internal[0]) if internal else None
        """vLLM's state of the request. None: the request has ended already. Then its only output has all tokens."""

    def after(self, made: int, choice: Any) -> tuple[list[int], list[str | None], Any]:
        """Returns the tokens after the first `made`, the names of their weights, and their logprobs, if vLLM has some.
        `choice`: that of the output that has come, or None."""
        state = self._state
        if state is None:
            starts = [(span.version, span.start) for span in choice.weight_versions or ()]
            ids, logprobs = list(choice.token_ids), choice.logprobs
        else:
            starts, rows = state.weight_version_starts, state.logprobs_processor.logprobs
            ids, logprobs = state.detokenizer.output_token_ids[made:], rows and rows[made:]
        return ids, _names(starts, made, len(ids)), logprobs


def _names(starts: list[tuple[str, int]], made: int, count: int) -> list[str | None]:
    """The names of the weights of `count` tokens after the first `made`. `starts`: each name, and its first token."""
    if starts and starts[-1][1] <= made:
        return [starts[-1][0]] * count
    places = range(made, made + count)
    return [next((name for name, start in reversed(starts) if start <= place), None) for place in places]


def _prompt_logprobs(steps: list[Any], prompt: list[int]) -> list[float | None]:
    if len(steps) != len(prompt):
        raise EngineFailed(f"vLLM gave {len(steps)} prompt logprobs of {len(prompt)} tokens")
    pairs = zip(prompt, steps, strict=True)
    return check_prompt([None if step is None else step[token].logprob for token, step in pairs])


def _prompt_tops(steps: list[Any], prompt: list[int], count: int) -> PromptTops:
    pairs = list(zip(prompt, steps, strict=True))[1:]
    return PromptTops.of(
        count, (PromptPlace(step[token].rank, _likeliest(token, step, count)) for token, step in pairs)
    )


def _failure(choice: Any) -> PlaneError:
    if choice.stop_reason == NOT_FINITE:
        return EngineFailed(NOT_FINITE)
    if choice.stop_reason == TOO_AMBIGUOUS:
        return too_ambiguous()
    return EngineFailed(f"vLLM ended the request: {choice.finish_reason}")


def _routed(rows: Any) -> RoutedExperts | None:
    """`rows`: numpy's [tokens, layers, top_k] of uint8 or uint16, with the last tokens. None before that, and for a
    request that was aborted without tokens."""
    if rows is None:
        return None
    _, layers, top_k = rows.shape
    return RoutedExperts(layers=layers, top_k=top_k, width=rows.itemsize, data=rows.tobytes())


def _logprobs(token_ids: list[int], steps: Any) -> list[float]:
    return [step[token].logprob for token, step in zip(token_ids, steps, strict=True)]


def _tops(token_ids: list[int], steps: Any, count: int) -> list[Top]:
    if not count:
        return []
    return [_likeliest(token, step, count) for token, step in zip(token_ids, steps, strict=True)]


def _likeliest(token: int, step: Any, count: int) -> Top:
    """vLLM also returns the token of the place: if it is none of the likeliest, there is one more."""
    rows = [(one, row) for one, row in step.items() if one != token or len(step) <= count]
    return [(one, row.logprob) for one, row in sorted(rows, key=lambda pair: int(pair[1].rank))]
