"""The `hf` engine: a model on transformers' continuous batching, in this process, on a CPU or one GPU.

Two threads work besides the caller's: the event loop, on which every coroutine here runs, and the generation thread of
`loop.py`. Only the generation thread touches the scheduler, the cache and the weights.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from pydantic import Field
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig

from rl_plane.errors import EngineDied, EngineFailed, InvalidRequest, PlaneError, Unsupported
from rl_plane.protocol.generation import RAW_LOGPROBS, GenerateRequest
from rl_plane.protocol.validation import Body
from rl_plane.protocol.versions import WeightVersion
from worker.engines.base import EngineAdapter, EngineInfo, EngineOptions, PauseMode
from worker.engines.capabilities import CanLoadAdapters, CanScore
from worker.engines.common.checkpoint_spec import saved_specs
from worker.engines.common.pieces import Piece
from worker.engines.common.request_gate import requests_of
from worker.engines.common.scoring import check_sequences, checked_scores
from worker.engines.common.token_checks import NO_EXPERTS, NO_FORM, check_adapter, most_tops
from worker.engines.hf.experts import ExpertRecorder
from worker.engines.hf.holder import HfHolder
from worker.engines.hf.loop import GenerationLoop
from worker.engines.hf.model_engine import NO_SLEEP, HfModelEngine
from worker.engines.hf.peft_layers import NO_PEFT, have_peft
from worker.engines.hf.pooling_engine import HfPoolingEngine
from worker.engines.hf.streams import HfStream

CLOSE_TIMEOUT_S = 10.0
"""Seconds that `close` waits for the running step. The thread is a daemon, so a hung step can't hold the process."""


class HfArguments(Body):
    """The engine arguments (`--engine-arg key=value`). The cache has room for num_blocks × page_size tokens."""

    num_blocks: int = Field(256, ge=1)
    page_size: int = Field(32, ge=4)
    """Tokens per block."""
    max_batch_tokens: int = Field(512, ge=1)
    """Tokens per step. Longer prompts take several steps. The attention mask has this number times the cache's
    tokens."""
    max_model_len: int | None = Field(None, ge=1)
    """The default is as many tokens as the model and the cache allow."""


def build(options: EngineOptions) -> EngineAdapter:
    return HfEngine(options) if options.task == "generate" else HfPoolingEngine(options)


class HfEngine(HfModelEngine[HfHolder], CanScore, CanLoadAdapters):
    def __init__(self, options: EngineOptions) -> None:
        super().__init__(options)
        self._arguments = options.arguments(HfArguments)
        self._loop: GenerationLoop | None = None
        self._experts: ExpertRecorder | None = None
        self._streams: dict[str, HfStream] = {}
        self._keys = itertools.count()

    # life

    async def _start(self) -> EngineInfo:
        info = await asyncio.to_thread(self._load)
        config = ContinuousBatchingConfig(
            num_blocks=self._arguments.num_blocks,
            page_size=self._arguments.page_size,
            max_batch_tokens=self._arguments.max_batch_tokens,
            use_async_batching=False,  # our sampler runs on the host, in each step
            use_cuda_graph=False,
            allow_block_sharing=False,  # each request computes its own KV, so none of it outlives an update
            auto_switch_to_flash=False,  # it would fetch kernels from the network
        )
        experts = self._experts
        assert experts is not None, "made with the model"
        try:
            self._loop = await asyncio.to_thread(
                GenerationLoop,
                self._model,
                self.holder,
                experts,
                config,
                asyncio.get_running_loop(),
                info.logprobs_mode != RAW_LOGPROBS,
            )
            self._loop.start()
            await self.liveness()
        except (EngineDied, ValueError) as error:  # the next start would end the same way
            raise _refusal(error.__cause__ or error) from error
        return info

    def _load(self) -> EngineInfo:
        logging.getLogger("ContinuousBatchingLogger").setLevel(logging.WARNING)  # it describes its cache at start
        self._load_weights(AutoModelForCausalLM, HfHolder, saved_specs(self._options.model))
        self._experts = ExpertRecorder(self._model)
        config = self._model.config.get_text_config()
        room = min(config.max_position_embeddings, self._arguments.num_blocks * self._arguments.page_size)
        length = self._arguments.max_model_len or room
        if length > room:
            raise InvalidRequest(
                f"max_model_len {length} is more than the model and the cache take ({room})",
                field="engine_arg.max_model_len",
                fix="lower it, or raise num_blocks",
            )
        return self._info_of(
            length,
            _lacks(bool(self._experts.experts)),
            logprobs_mode=self._options.logprobs_mode,
            max_prompt_top_logprobs=most_tops(config.vocab_size),
        )

    async def close(self) -> None:
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.call(loop.stop_loop)
            await asyncio.to_thread(loop.join_thread, CLOSE_TIMEOUT_S)
        self._experts = None
        self._drop_model()

    # generation

    async def _pieces(self, request: GenerateRequest, prompt: list[int]) -> AsyncGenerator[Piece, None]:
        loop = self.loop
        stream = HfStream(f"request-{next(self._keys)}", request, prompt, self._eos)
        self._streams[request.id] = stream
        try:
            await asyncio.wrap_future(loop.call(lambda: loop.submit(stream)))
            finished = False
            while not finished:
                piece = await stream.pieces.next()
                finished = piece.finish_reason is not None
                yield piece
        finally:
            del self._streams[request.id]
            if not stream.done:
                # No await: this task may be cancelled, or the generator may be closing.
                loop.call(lambda: loop.abort([stream]))

    async def abort(self, request_ids: list[str] | None) -> int:
        streams = None if request_ids is None else requests_of(self._streams, request_ids)
        before = self._abort_tokenized(request_ids)
        loop = self.loop
        count = await self._on_thread(lambda: loop.abort(streams))
        return before + count

    async def pause(self, mode: PauseMode, clear_cache: bool) -> bool:
        loop, drained = self.loop, Future[None]()
        before: list[bool] = []  # whether it was frozen; empty until the pause begins

        def begin() -> None:
            before.append(loop.frozen)
            if mode == "wait":
                loop.drain(drained)
            else:
                loop.freeze()

        try:
            await self._on_thread(begin)
            if mode == "wait":
                await asyncio.wrap_future(drained)
            elif mode == "abort":
                self._abort_tokenized(None)
                await self._on_thread(lambda: loop.abort(None))
            return clear_cache and await self.flush_cache()
        except BaseException:
            loop.call(lambda: loop.go_back(before))  # no await: later commands run after this one
            raise

    async def resume(self) -> None:
        await self._on_thread(self.loop.thaw)

    def load(self) -> tuple[int, int]:
        loop, total = self._loop, len(self._streams)
        running = min(total, loop.running()) if loop is not None else 0
        return running, total - running

    # weights

    def _before_change(self, keep_kv: bool) -> None:
        self.loop.restart_requests(keep_kv=keep_kv)

    def _before_overwrite(self) -> None:
        self.loop.forget_weights()

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        info = self.info
        checked = check_sequences(sequences, info.vocab_size, info.max_model_len)
        loop = self.loop
        return checked_scores(await self._on_thread(lambda: loop.score(checked)), checked)

    # adapters

    async def swap_adapter(self, name: str, staging: str | None, version: WeightVersion | None) -> bool:
        loop = self.loop
        model = None if staging is None else self.receiver.take(staging)

        def between_two_steps() -> None:
            if model is None:
                loop.remove_adapter(name)
            else:
                loop.put_adapter(name, model, version)

        await self._on_thread(between_two_steps)
        return False  # there is no prefix cache

    def set_adapter_version(self, name: str, version: WeightVersion) -> None:
        versions = self.loop.adapter_versions
        check_adapter(name, versions, "name")
        versions[name] = version

    @property
    def loop(self) -> GenerationLoop:
        if self._loop is None:
            raise EngineFailed("the engine is not running")
        return self._loop

    def _running(self) -> GenerationLoop:
        return self.loop

    def _submit(self, work: Callable[[], Any]) -> Future[Any]:
        return self.loop.call(work)


def _refusal(cause: BaseException) -> PlaneError:
    """The error of a start that transformers' continuous batching has ended."""
    if isinstance(cause, MemoryError | torch.OutOfMemoryError):
        return InvalidRequest(
            f"the cache does not fit into memory: {cause}",
            field="engine_arg.num_blocks",
            fix="lower it, or max_batch_tokens",
        )
    return Unsupported(
        f"transformers' continuous batching does not take this model: {cause}",
        field="model",
        fix="serve this model with vllm or sglang",
    )


def _lacks(has_experts: bool) -> dict[str, str]:
    lacking = {"release_memory": NO_SLEEP, "resume_memory": NO_SLEEP, "generate:structured_output": NO_FORM}
    if not has_experts:
        lacking["generate:routed_experts"] = NO_EXPERTS
    return lacking if have_peft() else lacking | {"prepare_update:lora": NO_PEFT, "update_weights:lora": NO_PEFT}
