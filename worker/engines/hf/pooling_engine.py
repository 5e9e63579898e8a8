"""The `hf` engine for pooling models: reward models (`--task classify`) and embedding models (`--task embed`).

One thread computes batches, swaps weights and reads the version, one after the other. So one version computes each
batch: the thread reads it when the batch begins.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

import torch
from pydantic import Field
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from rl_plane._util.tasks import end_tasks
from rl_plane.errors import EngineDied, EngineFailed, InvalidRequest, PlaneError, Unsupported
from rl_plane.protocol.generation import GenerateRequest
from rl_plane.protocol.pooling import lacking_tasks
from rl_plane.protocol.validation import Body
from rl_plane.protocol.versions import TensorSpec
from worker.engines.base import EngineInfo, EngineOptions, PauseMode
from worker.engines.common.checkpoint_spec import saved_specs
from worker.engines.common.pooled_requests import NO_LOGPROBS, NO_POOLING_LORA, PooledRequests
from worker.engines.common.request_gate import GatedRequest, RequestGate
from worker.engines.common.spans import Label
from worker.engines.common.torch_weights import ModelWeights
from worker.engines.hf.model_engine import NO_SLEEP, HfModelEngine

MAX_BATCH = 64
"""Inputs of one forward. More would only delay the first of them."""


class PoolingArguments(Body):
    """The engine arguments (`--engine-arg key=value`)."""

    max_batch_tokens: int = Field(4096, ge=1)
    """Tokens of one forward, with its padding. A longer input is computed alone."""
    max_model_len: int | None = Field(None, ge=1)
    """The default is as many tokens as the model takes."""


@dataclass(eq=False, slots=True)
class _Waiting:
    """An input that waits for a forward."""

    prompt: list[int]
    result: asyncio.Future[tuple[list[float], Label] | None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    """The numbers, and the weights that computed them. It is None if the engine paused before the forward."""


class HfPoolingEngine(PooledRequests, HfModelEngine[ModelWeights]):
    def __init__(self, options: EngineOptions) -> None:
        super().__init__(options)
        self._arguments = options.arguments(PoolingArguments)
        self._gate = RequestGate()
        self._thread: ThreadPoolExecutor | None = None
        self._queue: deque[_Waiting] = deque()
        self._batch: list[_Waiting] = []
        """The inputs that the thread computes now."""
        self._computing: asyncio.Task[None] | None = None

    # life

    async def _start(self) -> EngineInfo:
        self._thread = ThreadPoolExecutor(1, "hf-pooling")
        return await self._on_thread(self._load)

    def _load(self) -> EngineInfo:
        self._read_head()
        saved = saved_specs(self._options.model)
        self._load_weights(self._class_of(saved), ModelWeights, saved)
        self._check_head()
        most = int(self._model.config.get_text_config().max_position_embeddings)
        length = self._arguments.max_model_len or most
        if not 1 <= length <= most:
            raise InvalidRequest(
                f"max_model_len is {length}", field="engine_arg.max_model_len", fix=f"give 1 to {most}"
            )
        return self._info_of(
            length,
            {
                "release_memory": NO_SLEEP,
                "resume_memory": NO_SLEEP,
                "score": NO_LOGPROBS,
                **NO_POOLING_LORA,
                **lacking_tasks(self._options.task),
            },
            dimension=self.head.dimension,
            labels=self.head.labels,
        )

    def _class_of(self, saved: Mapping[str, TensorSpec]) -> Any:
        """The class whose tensors have the names of the checkpoint. The checkpoint of a model that generates gives
        embeddings too, and keeps its head for tokens, which an update brings as well."""
        if self._options.task == "classify":
            return AutoModelForSequenceClassification
        has_prefix = any(name.startswith("model.") for name in saved)
        return AutoModelForCausalLM if has_prefix else AutoModel

    def _check_head(self) -> None:
        if self._options.task == "classify" and not isinstance(
            getattr(self._model, "score", None), torch.nn.Linear
        ):
            raise Unsupported(
                f"the hf engine serves classifiers with one linear layer `score` over the last token, and "
                f"{type(self._model).__name__} has none",
                field="model",
                fix="serve this model with vllm",
            )

    async def close(self) -> None:
        if self._computing is not None:
            await end_tasks([self._computing])
        self._gate.abort(None)
        for one in (*self._batch, *self._queue):
            _settle(one, EngineDied("the engine is closed"))
        self._queue.clear()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.shutdown(wait=False, cancel_futures=True)
        self._drop_model()

    def _running(self) -> ThreadPoolExecutor:
        if self._thread is None:
            raise EngineDied("the engine is closed")
        return self._thread

    def _submit(self, work: Callable[[], Any]) -> Future[Any]:
        return self._running().submit(work)

    # requests

    def _pieces(self, request: GenerateRequest, prompt: list[int]) -> NoReturn:
        raise EngineFailed("a pooling model generates no tokens")  # `refuse_lacking` has refused such requests

    async def _raw(self, request: GenerateRequest, prompt: list[int]) -> tuple[Any, Label] | None:
        one = self._gate.enter(request)
        try:
            while True:
                await self._gate.turn(one)
                if one.ended is not None:
                    return None
                found = await self._computed(one, prompt)
                if found is not None or one.ended is not None:
                    return found
        finally:
            self._gate.leave(one)

    async def _computed(self, one: GatedRequest, prompt: list[int]) -> tuple[list[float], Label] | None:
        """Returns the result of one forward. It is None if the engine paused before it, or if the request ended."""
        waiting = _Waiting(prompt)
        self._queue.append(waiting)
        if self._computing is None or self._computing.done():
            self._computing = asyncio.create_task(self._compute())
        found = await waiting.result
        return found if one.ended is None else None

    async def _compute(self) -> None:
        """Computes all that waits, batch by batch, until the queue is empty or the engine is paused."""
        while self._queue:
            await asyncio.sleep(0)  # requests that have come at once get into one batch
            if self._gate.is_paused:
                for one in self._queue:
                    _settle(one, None)
                self._queue.clear()
                return
            batch = self._batch = self._take_batch()
            try:
                vectors, label = await self._on_thread(partial(self._forward, batch))
            except PlaneError as error:
                for one in batch:
                    _settle(one, error)
                continue
            for one, vector in zip(batch, vectors, strict=True):
                _settle(one, (vector, label))

    def _take_batch(self) -> list[_Waiting]:
        batch: list[_Waiting] = []
        longest = 0
        while self._queue and len(batch) < MAX_BATCH:
            longest = max(longest, len(self._queue[0].prompt))
            if batch and longest * (len(batch) + 1) > self._arguments.max_batch_tokens:
                break
            one = self._queue.popleft()
            if not one.result.done():
                batch.append(one)
        return batch

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def _forward(self, batch: list[_Waiting]) -> tuple[list[list[float]], Label]:
        """Runs on the thread."""
        label = Label(self.holder.version)
        if not batch:
            return [], label
        model, lengths = self._model, [len(one.prompt) for one in batch]
        ids = torch.zeros((len(batch), max(lengths)), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, one in enumerate(batch):
            ids[row, : lengths[row]] = torch.tensor(one.prompt)
            mask[row, : lengths[row]] = 1
        ids, mask = ids.to(model.device), mask.to(model.device)
        base = model.base_model if self._options.task == "classify" else getattr(model, "model", model)
        hidden = base(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
        pooled = self._pool_hidden(hidden, mask, torch.tensor(lengths, device=model.device))
        if self._options.task == "classify":
            pooled = model.score(pooled)
        vectors: list[list[float]] = pooled.float().cpu().tolist()
        return vectors, label

    def _pool_hidden(self, hidden: Any, mask: Any, lengths: Any) -> Any:
        position = self.head.position
        if position == "mean":
            return (hidden.float() * mask.unsqueeze(-1)).sum(1) / lengths.unsqueeze(-1)
        at = lengths - 1 if position == "last" else torch.zeros_like(lengths)
        return hidden[torch.arange(len(hidden), device=hidden.device), at]

    async def abort(self, request_ids: list[str] | None) -> int:
        return self._abort_tokenized(request_ids) + self._gate.abort(request_ids)

    async def pause(self, mode: PauseMode, clear_cache: bool) -> bool:
        was_paused = self._gate.is_paused
        if mode == "abort":
            self._abort_tokenized(None)
        await self._gate.pause(mode)
        try:
            await self.liveness()  # a batch that had begun is done
        except BaseException:
            if not was_paused:
                self._gate.resume()
            raise
        return clear_cache

    async def resume(self) -> None:
        self._running()
        self._gate.resume()

    def load(self) -> tuple[int, int]:
        return self._gate.load()


def _settle(one: _Waiting, outcome: tuple[list[float], Label] | PlaneError | None) -> None:
    if one.result.done():
        return  # its reader has left
    if isinstance(outcome, PlaneError):
        one.result.set_exception(outcome)
    else:
        one.result.set_result(outcome)
