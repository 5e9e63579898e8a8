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
import transformers
from pydantic import Field
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig

from rl_plane.errors import EngineDied, EngineFailed, InvalidRequest, PlaneError, Unsupported
from rl_plane.protocol.generation import RAW_LOGPROBS, GenerateRequest
from rl_plane.protocol.validation import Body
from rl_plane.protocol.versions import WeightVersion
from worker.engines.base import EngineAdapter, EngineInfo, EngineOptions, PauseMode
from worker.engines.capabilities import WHOLE, CanCheckWeights, CanLoadAdapters, CanScore, CheckAction, CheckScope
from worker.engines.common.checkpoint_spec import saved_specs
from worker.engines.common.generating import Generating
from worker.engines.common.pieces import Piece
from worker.engines.common.request_gate import requests_of
from worker.engines.common.scoring import check_sequences, checked_scores
from worker.engines.common.token_checks import NO_EXPERTS, NO_FORM, check_adapter, most_tops
from worker.engines.common.weights_in_process import WeightsInProcess
from worker.engines.hf.experts import ExpertRecorder
from worker.engines.hf.holder import HfHolder
from worker.engines.hf.loaded_model import load_model
from worker.engines.hf.loop import GenerationLoop
from worker.engines.hf.peft_layers import NO_PEFT, have_peft
from worker.engines.hf.pooling_engine import NO_SLEEP, HfPoolingEngine
from worker.engines.hf.streams import HfStream
from worker.receive.weight_receiver import Receiver, load_transports

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


class HfEngine(Generating, WeightsInProcess, CanScore, CanLoadAdapters, CanCheckWeights):
    def __init__(self, options: EngineOptions) -> None:
        super().__init__(options)
        self._arguments = options.arguments(HfArguments)
        options.refuse_modes("the hf engine does not have this", "use vllm or sglang")
        self._model: Any = None
        self._loop: GenerationLoop | None = None
        self._experts: ExpertRecorder | None = None
        self._holder: HfHolder | None = None
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
        adapters, experts = self.holder.adapters, self._experts
        assert experts is not None, "made with the model"
        try:
            self._loop = await asyncio.to_thread(
                GenerationLoop,
                self._model,
                adapters,
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
        path = self._options.model
        logging.getLogger("ContinuousBatchingLogger").setLevel(logging.WARNING)  # it describes its cache at start
        self._load_tokenizer()
        self._model = load_model(AutoModelForCausalLM, self._options)
        self._experts = ExpertRecorder(self._model)
        self._holder = HfHolder(self._model, saved_specs(path), self._forget_weights)
        self.receiver = receiver = Receiver(
            self._holder, load_transports(self._options.places, str(self._model.device))
        )
        config = self._model.config.get_text_config()
        room = min(config.max_position_embeddings, self._arguments.num_blocks * self._arguments.page_size)
        length = self._arguments.max_model_len or room
        if length > room:
            raise InvalidRequest(
                f"max_model_len {length} is more than the model and the cache take ({room})",
                field="engine_arg.max_model_len",
                fix="lower it, or raise num_blocks",
            )
        return EngineInfo(
            engine="hf",
            engine_version=transformers.__version__,
            model=path.absolute().name,
            dtype=str(self._model.dtype).removeprefix("torch."),
            device=str(self._model.device),
            world_size=1,
            vocab_size=config.vocab_size,
            max_model_len=length,
            lacks=_lacks(bool(self._experts.experts)),
            transports=receiver.backends,
            tied=self.holder.tied_tensors(),
            logprobs_mode=self._options.logprobs_mode,
            max_prompt_top_logprobs=most_tops(config.vocab_size),
        )

    async def close(self) -> None:
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.call(loop.stop_loop)
            await asyncio.to_thread(loop.join_thread, CLOSE_TIMEOUT_S)
        self._model = self._experts = self._holder = self._tokenizer = None
        self._receiver = None

    async def liveness(self) -> None:
        device = self._model.device if self._model is not None else "cpu"
        # The command proves the loop, its tensor the device.
        await self._call(lambda _: torch.ones((), device=device).item())

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
        count: int = await self._call(lambda loop: loop.abort(streams))
        return before + count

    async def pause(self, mode: PauseMode, clear_cache: bool) -> bool:
        loop, drained = self.loop, Future[None]()
        before: list[bool] = []  # whether it was frozen; empty until the pause begins

        def begin(loop: GenerationLoop) -> None:
            before.append(loop.frozen)
            if mode == "wait":
                loop.drain(drained)
            else:
                loop.freeze()

        try:
            await self._call(begin)
            if mode == "wait":
                await asyncio.wrap_future(drained)
            elif mode == "abort":
                self._abort_tokenized(None)
                await self._call(lambda loop: loop.abort(None))
            return clear_cache and await self.flush_cache()
        except BaseException:
            loop.call(lambda: loop.go_back(before))  # no await: later commands run after this one
            raise

    async def resume(self) -> None:
        await self._call(lambda loop: loop.thaw())

    async def flush_cache(self) -> bool:
        """Returns True: there is no prefix cache, and no request uses another one's KV."""
        await self.liveness()
        return True

    def load(self) -> tuple[int, int]:
        loop, total = self._loop, len(self._streams)
        running = min(total, loop.running()) if loop is not None else 0
        return running, total - running

    # weights

    async def swap(self, staging: str, version: WeightVersion, *, keep_kv: bool = False) -> bool:
        served = self.loop.version
        names = self.receiver.changed_since(staging, served.digest if served is not None else None)
        staged, weights = self.receiver.take(staging), self.holder

        def between_two_steps(loop: GenerationLoop) -> None:
            loop.restart_requests(keep_kv=keep_kv)
            still = loop.version == served
            loop.version = None  # half-way, the weights are of no version
            weights.load(staged, names if still else None)
            loop.version = version

        await self._call(between_two_steps)
        return await self.flush_cache()

    def set_version(self, version: WeightVersion) -> None:
        self.loop.version = version

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        info = self.info
        checked = check_sequences(sequences, info.vocab_size, info.max_model_len)
        return checked_scores(await self._call(lambda loop: loop.score(checked)), checked)

    # adapters

    async def swap_adapter(self, name: str, staging: str | None, version: WeightVersion | None) -> bool:
        model = None if staging is None else self.receiver.take(staging)

        def between_two_steps(loop: GenerationLoop) -> None:
            if model is None:
                loop.remove_adapter(name)
            else:
                loop.put_adapter(name, model, version)

        await self._call(between_two_steps)
        return False  # there is no prefix cache

    def set_adapter_version(self, name: str, version: WeightVersion) -> None:
        versions = self.loop.adapter_versions
        check_adapter(name, versions, "name")
        versions[name] = version

    async def check_weights(self, action: CheckAction, scope: CheckScope = WHOLE) -> list[dict[str, Any]]:
        weights = self.holder
        if action != "reset_tensors":
            return [{"rank": 0, **await asyncio.to_thread(weights.checks.row, action, scope)}]

        def between_two_steps(loop: GenerationLoop) -> None:
            loop.restart_requests(keep_kv=True)
            loop.version = None  # running requests continue with weights of no version
            weights.reset()

        await self._call(between_two_steps)
        return [{"rank": 0}]

    @property
    def model(self) -> Any:
        """The transformers model, with the live weights. Only the generation thread may touch it while the engine
        steps."""
        if self._model is None:
            raise EngineFailed("the engine is not running")
        return self._model

    @property
    def loop(self) -> GenerationLoop:
        if self._loop is None:
            raise EngineFailed("the engine is not running")
        return self._loop

    def _running(self) -> GenerationLoop:
        return self.loop

    def _forget_weights(self) -> None:
        loop = self.loop
        loop.call(loop.forget_weights).result()

    @property
    def holder(self) -> HfHolder:
        if self._holder is None:
            raise EngineFailed("the engine is not running")
        return self._holder

    async def _call(self, command: Callable[[GenerationLoop], Any]) -> Any:
        loop = self.loop
        try:
            return await asyncio.wrap_future(loop.call(lambda: command(loop)))
        except PlaneError:
            raise
        except Exception as error:
            raise EngineFailed(f"{type(error).__name__}: {error}") from error


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
