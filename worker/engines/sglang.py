"""The `sglang` engine: SGLang's Engine, built in this process, on a CPU or on GPUs.

This process has its tokenizer manager, on the engine loop; each rank of the model is a scheduler process of SGLang's,
in which a plugin of ours (`sglang_plugin`) serves the weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import multiprocessing
import os
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from typing import Any, NoReturn, TypeVar

from rl_plane.errors import EngineFailed, InvalidRequest, PlaneError, Unsupported
from rl_plane.generation import GenerateDelta, GenerateRequest
from rl_plane.ops import PreparedReply
from rl_plane.versions import TensorSpec, WeightVersion
from worker.engines.base import CheckAction, EngineAdapter, EngineInfo, EngineOptions, PauseMode
from worker.engines.sglang_args import ON_CPU, parse_arguments
from worker.engines.sglang_plugin import MARK, child_failed
from worker.engines.sglang_streams import Feeder
from worker.engines.spans import Label, SpanLog
from worker.engines.tokenizing import IncrementalText, check_tokens, eos_tokens, load_tokenizer, prompt_tokens
from worker.reception import Cancelled, Reception

T = TypeVar("T")
log = logging.getLogger("worker.sglang")

DTYPES = ("float32", "bfloat16", "float16")

FLUSH_WAIT_S = 2.0
"""How long a flush waits for the engine to see that it is idle: right after a request it does not yet."""

CLOSE_TIMEOUT_S = 5.0
"""How long a killed process may take to be gone."""

_ENVIRONMENT = {
    MARK: "1",
    "SGLANG_RETURN_ORIGINAL_LOGPROB": "1",  # raw, not scaled by the temperature
}


def build(options: EngineOptions) -> EngineAdapter:
    return SglangEngine(options)


class SglangEngine:
    def __init__(self, options: EngineOptions) -> None:
        if options.dtype is not None and options.dtype not in DTYPES:
            raise InvalidRequest(
                f"unknown dtype {options.dtype}", field="dtype", fix=f"one of {', '.join(DTYPES)}"
            )
        if not (options.model / "config.json").is_file():
            raise InvalidRequest(
                f"{options.model} has no config.json", field="model", fix="give a Hugging Face model directory"
            )
        self._options = options
        self._arguments = parse_arguments(options.extra)
        self._engine: Any = None
        self._manager: Any = None
        self._feeder: Feeder | None = None
        self._tokenizer: Any = None
        self._info: EngineInfo | None = None
        self._processes: list[Any] = []
        self._dead: asyncio.Future[NoReturn] | None = None
        self._handling: asyncio.Task[None] | None = None
        self._paused = False
        self._keys = (f"rl-plane-{number}" for number in itertools.count(1))
        self._key = "default"
        self._versions: dict[str, WeightVersion | None] = {}
        """The engine's names of the weights that it held → what they are. None: no version."""
        self._adapters: dict[str, WeightVersion] = {}

    # life

    async def start(self) -> EngineInfo:
        loop = asyncio.get_running_loop()
        self._dead = loop.create_future()
        self._dead.add_done_callback(lambda dead: dead.exception())  # it may be that nobody asks
        try:
            self._tokenizer = await asyncio.to_thread(load_tokenizer, self._options.model)
            eos = await asyncio.to_thread(eos_tokens, self._options.model, self._tokenizer)
            # Here, on the loop's own thread, which it holds up: SGLang takes the running loop for its sockets.
            with _environment(), _own_logging():
                self._build()
            self._feeder = Feeder(self._manager, eos, self._adapter_in_engine)
            self._watch(loop)
            await self.liveness()
            self._info = self._describe()
        except PlaneError:
            await self.close()
            raise
        except Exception as error:
            await self.close()
            raise EngineFailed(f"SGLang did not start: {error}") from error
        return self._info

    def _build(self) -> None:
        import torch
        from sglang import Engine

        device = self._options.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        kind, _, index = device.partition(":")
        arguments: dict[str, Any] = dict(ON_CPU) if kind == "cpu" else {}
        arguments |= self._arguments
        before = set(multiprocessing.active_children())
        try:
            self._engine = Engine(
                model_path=str(self._options.model),
                device=kind,
                base_gpu_id=int(index or 0),
                dtype=self._options.dtype or "auto",
                weight_version=self._key,
                skip_tokenizer_init=True,
                incremental_streaming_output=True,
                custom_sigquit_handler=child_failed,
                **arguments,
            )
        finally:
            self._processes = [child for child in multiprocessing.active_children() if child not in before]
        self._manager = self._engine.tokenizer_manager

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """In place of SGLang's own ways to notice a death, all of which end this process."""
        self._manager._subprocess_watchdog.stop()
        for child in self._processes:
            loop.add_reader(child.sentinel, self._child_ended, child)
        self._manager.event_loop = loop  # else it would install signal handlers, at its first request
        self._handling = loop.create_task(self._manager.handle_loop())
        self._handling.add_done_callback(self._handling_ended)

    def _child_ended(self, child: Any) -> None:
        child.join(0)
        self._fail(f"a process of SGLang's ended: {child.name}, exit code {child.exitcode}")

    def _handling_ended(self, handling: asyncio.Task[None]) -> None:
        if not handling.cancelled():
            self._fail(f"SGLang's answers can't be read any more: {handling.exception()!r}")

    def _fail(self, why: str) -> None:
        if self._dead is None or self._dead.done():
            return
        log.error("%s", why)
        error = EngineFailed(why)
        self._dead.set_exception(error)
        if self._feeder is not None:
            self._feeder.fail(error)
        self._unwatch()

    def _unwatch(self) -> None:
        loop = asyncio.get_running_loop()
        for child in self._processes:
            with contextlib.suppress(ValueError):  # closed
                loop.remove_reader(child.sentinel)

    def _describe(self) -> EngineInfo:
        import sglang

        config, infos = self._manager.model_config, self._engine._scheduler_init_result.scheduler_infos
        return EngineInfo(
            engine="sglang",
            engine_version=sglang.__version__,
            model=self._options.model.absolute().name,
            dtype=str(config.dtype).removeprefix("torch."),
            device=str(self._engine.server_args.device),
            world_size=int(self._engine.server_args.tp_size * self._engine.server_args.pp_size),
            vocab_size=config.vocab_size,
            max_model_len=int(infos[0]["max_req_input_len"]),
            capabilities={},
            transports=(),
        )

    async def close(self) -> None:
        """Not by Engine.shutdown, which ends every child of this process."""
        if self._dead is not None and not self._dead.done():
            self._unwatch()
            self._fail_quietly("the engine was closed")
        if self._handling is not None:
            self._handling.cancel()
        if self._engine is not None:
            import atexit

            atexit.unregister(self._engine.shutdown)
            self._engine.send_to_rpc.close(linger=0)
        processes, self._processes = self._processes, []
        await asyncio.to_thread(_end, processes)
        self._engine = self._manager = None

    def _fail_quietly(self, why: str) -> None:
        assert self._dead is not None
        error = EngineFailed(why)
        self._dead.set_exception(error)
        if self._feeder is not None:
            self._feeder.fail(error)

    async def liveness(self) -> None:
        await self._alive(self._manager.get_internal_state())

    async def _alive(self, work: Coroutine[Any, Any, T]) -> T:
        """The engine's answer, or an EngineFailed if it dies meanwhile: it would never answer."""
        dead = self._dead
        if dead is None or self._manager is None or dead.done():
            work.close()
            raise EngineFailed("the engine is not running") if dead is None else _reason(dead)
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task, dead}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            task.cancel()
        if not task.done() or task.cancelled():
            raise _reason(dead)
        return await task

    def _running(self) -> Feeder:
        if self._feeder is None or self._dead is None:
            raise EngineFailed("the engine is not running")
        if self._dead.done():
            raise _reason(self._dead)
        return self._feeder

    # generation

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateDelta]:
        feeder, info = self._running(), self._info
        assert info is not None, "start sets it"
        prompt = await prompt_tokens(self._tokenizer, request)
        check_tokens(request, prompt, info.vocab_size, info.max_model_len)
        if request.id in feeder.streams:
            raise InvalidRequest(f"request {request.id} is running already", field="id", fix="use a fresh id")
        text, spans = IncrementalText(self._tokenizer), SpanLog()
        told: list[int] | None = prompt
        async with contextlib.aclosing(feeder.run(request, prompt)) as pieces:
            async for piece in pieces:
                for key in piece.keys:
                    spans.add(self._label(key, request.adapter))
                finished = piece.finish_reason is not None
                yield GenerateDelta(
                    token_ids=piece.token_ids,
                    logprobs=piece.logprobs if request.logprobs else None,
                    text=text.add(piece.token_ids, last=finished),
                    finish_reason=piece.finish_reason,
                    spans=spans.tell(finished),
                    prompt_token_ids=told,
                )
                told = None

    def _label(self, key: str, adapter: str | None) -> Label:
        if adapter is None:
            return Label(self._versions.get(key))
        return Label(self._versions.get(key), adapter, self._adapters.get(adapter))

    def _adapter_in_engine(self, name: str | None) -> str | None:
        if name is None:
            return None
        raise InvalidRequest(
            f"there is no adapter {name[:64]!r} here", field="model", fix="name one that is loaded"
        )

    async def abort(self, request_ids: list[str] | None) -> int:
        feeder = self._running()
        names = feeder.streams if request_ids is None else request_ids
        streams = [feeder.streams[name] for name in dict.fromkeys(names) if name in feeder.streams]
        await feeder.abort(streams)
        return len(streams)

    async def pause(self, mode: PauseMode, clear_cache: bool) -> bool:
        """`keep`: SGLang's in_place; with `clear_cache` its retract, by which running requests lose their KV and
        have it computed again after `resume`."""
        if mode == "wait":
            await self._drain()
        elif mode == "abort":
            # Retracted requests are only waiting, and end at once: others would after the next step.
            await self._freeze("retract")
            await self.abort(None)
        else:
            await self._freeze("retract" if clear_cache else "in_place")
        return clear_cache and await self.flush_cache()

    async def _freeze(self, how: str) -> None:
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        feeder = self._running()
        feeder.close()
        self._paused = True
        await self._manager.pause_generation(PauseGenerationReqInput(mode=how))
        await self.liveness()  # it has done so

    async def _thaw(self) -> None:
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        await self._manager.continue_generation(ContinueGenerationReqInput())
        self._paused = False

    async def _drain(self) -> None:
        feeder, was_paused = self._running(), self._paused
        was_open = feeder.is_open
        feeder.close()
        try:
            if was_paused:
                await self._thaw()
            while running := [stream.feeding for stream in feeder.submitted() if stream.feeding is not None]:
                await asyncio.wait(running)
        except asyncio.CancelledError:
            if was_paused:
                await self._freeze("in_place")
            if was_open:
                feeder.open()
            raise
        await self._freeze("in_place")

    async def resume(self) -> None:
        feeder = self._running()
        if self._paused:
            await self._thaw()
        feeder.open()

    async def flush_cache(self) -> bool:
        """While requests run, SGLang refuses."""
        feeder = self._running()
        if not self._paused and feeder.submitted():
            return False
        wait_s = None if self._paused else FLUSH_WAIT_S
        reply = await self._alive(self._manager.flush_cache(timeout_s=wait_s))
        return bool(reply.success)

    def load(self) -> tuple[int, int]:
        if self._feeder is None:
            return 0, 0
        running = len(self._feeder.submitted())
        return running, len(self._feeder.streams) - running

    # weights

    def weight_spec(self) -> Mapping[str, TensorSpec]:
        raise NotImplementedError

    def receive(self, reception: Reception, cancelled: Cancelled) -> PreparedReply:
        raise NotImplementedError

    async def discard(self, staging: str) -> None:
        raise NotImplementedError

    async def swap(self, staging: str, version: WeightVersion) -> bool:
        raise NotImplementedError

    def set_version(self, version: WeightVersion) -> None:
        self._versions[self._key] = version

    def check_overwrite(self, reception: Reception) -> None:
        raise NotImplementedError

    def overwrite(self, reception: Reception, cancelled: Cancelled) -> PreparedReply:
        raise NotImplementedError

    def init_transport(self, config: Mapping[str, Any]) -> list[dict[str, Any]]:
        raise NotImplementedError

    def destroy_transport(self, backend: str) -> list[dict[str, Any]]:
        raise NotImplementedError

    async def swap_adapter(self, name: str, staging: str | None, version: WeightVersion | None) -> bool:
        raise NotImplementedError

    def set_adapter_version(self, name: str, version: WeightVersion) -> None:
        raise NotImplementedError

    async def check_weights(self, action: CheckAction) -> list[dict[str, Any]]:
        raise NotImplementedError

    async def release_memory(self, tags: list[str]) -> None:
        raise Unsupported("not yet")

    async def resume_memory(self, tags: list[str]) -> None:
        raise Unsupported("not yet")


def _reason(dead: asyncio.Future[NoReturn]) -> EngineFailed:
    """A fresh one for each who is told."""
    error = dead.exception()
    return EngineFailed(str(error))


def _end(processes: list[Any]) -> None:
    import psutil

    families = []
    for child in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            families += psutil.Process(child.pid).children(recursive=True)
        child.kill()
    for member in families:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    for child in processes:
        child.join(CLOSE_TIMEOUT_S)


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    """For the processes that SGLang starts, and for what it reads here when it is imported."""
    os.environ.update(_ENVIRONMENT)
    try:
        yield
    finally:
        os.environ.pop(MARK)


@contextlib.contextmanager
def _own_logging() -> Iterator[None]:
    """SGLang puts handlers of its own in the place of the root logger's."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
