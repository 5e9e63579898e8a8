"""The `sglang` engine: SGLang's Engine, built in this process, on a CPU or on GPUs.

This process has its tokenizer manager, on the engine loop; each rank of the model is a scheduler process of SGLang's,
in which a plugin of ours (`sglang_plugin`) serves the weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import multiprocessing
import os
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from rl_plane.errors import EngineFailed, InvalidRequest, PlaneError, Unsupported
from rl_plane.generation import GenerateDelta, GenerateRequest
from rl_plane.ops import PreparedReply
from rl_plane.versions import TensorSpec, WeightVersion
from worker.engines.base import CheckAction, EngineAdapter, EngineInfo, EngineOptions, PauseMode
from worker.engines.sglang_args import ON_CPU, parse_arguments
from worker.engines.sglang_plugin import MARK, METHOD, child_failed, lora_reference
from worker.engines.sglang_streams import FIRST_KEY, Feeder
from worker.engines.spans import Label, SpanLog
from worker.engines.tokenizing import IncrementalText, check_tokens, eos_tokens, load_tokenizer, prompt_tokens
from worker.reception import Cancelled, Reception

T = TypeVar("T")
log = logging.getLogger("worker.sglang")

DTYPES = ("float32", "bfloat16", "float16")

FLUSH_WAIT_S = 2.0
"""How long a flush waits for the engine to see that it is idle: right after a request it does not yet."""

UNUSED_WAIT_S = 5.0
"""How long the aborted requests of an adapter may take to be gone from the engine."""

POLL_MS = 100
"""How often a thread that waits for SGLang looks whether it is dead."""

CLOSE_TIMEOUT_S = 5.0
"""How long a killed process may take to be gone."""


@dataclass(slots=True)
class Adapter:
    """One that is loaded."""

    engine_name: str
    """Its name in the engine: never used again."""
    lora_id: str
    version: WeightVersion | None


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
        device, _, index = _device(options.device).partition(":")
        self._device = device
        self._first_gpu = int(index or 0)
        self._engine: Any = None
        self._manager: Any = None
        self._feeder: Feeder | None = None
        self._tokenizer: Any = None
        self._info: EngineInfo | None = None
        self._processes: list[Any] = []
        self._dead: asyncio.Future[NoReturn] | None = None
        self._handling: asyncio.Task[None] | None = None
        self._calling = asyncio.Lock()
        self._paused = False
        self._keys = (f"rl-plane-{number}" for number in itertools.count(1))
        self._version: WeightVersion | None = None
        self._adapters: dict[str, Adapter] = {}
        self._numbers = itertools.count(1)

    # life

    async def start(self) -> EngineInfo:
        loop = asyncio.get_running_loop()
        self._dead = loop.create_future()
        self._dead.add_done_callback(lambda dead: dead.exception())  # it may be that nobody asks
        try:
            self._tokenizer = await asyncio.to_thread(load_tokenizer, self._options.model)
            eos = await asyncio.to_thread(eos_tokens, self._options.model, self._tokenizer)
            # Here, on the loop's own thread, which it holds up: SGLang takes the running loop for its sockets.
            with self._environment(), _own_logging():
                self._build()
            self._feeder = Feeder(self._manager, eos, self._adapter_in_engine, self._label)
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

    @contextlib.contextmanager
    def _environment(self) -> Iterator[None]:
        """For the processes that SGLang starts, and for what it reads here when it is imported."""
        os.environ["SGLANG_RETURN_ORIGINAL_LOGPROB"] = "1"  # raw, not scaled by the temperature
        os.environ[MARK] = json.dumps(
            {
                "device": self._device,
                "model": str(self._options.model.absolute()),
                "weight_roots": [str(root) for root in self._options.weight_roots],
            }
        )
        try:
            yield
        finally:
            del os.environ[MARK]

    def _build(self) -> None:
        from sglang import Engine

        arguments: dict[str, Any] = dict(ON_CPU) if self._device == "cpu" else {}
        arguments |= self._arguments
        before = set(multiprocessing.active_children())
        try:
            self._engine = Engine(
                model_path=str(self._options.model),
                device=self._device,
                base_gpu_id=self._first_gpu,
                dtype=self._options.dtype or "auto",
                weight_version=FIRST_KEY,
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
        child.join(1.0)  # it has ended: this only takes its exit code
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

    async def _call(self, op: str, **arguments: str) -> None:
        """In every rank, between two steps (see sglang_scheduler)."""
        async with self._calling:
            try:
                await self._alive(asyncio.to_thread(self._remote_call, op, arguments))
            except asyncio.CancelledError:
                # Its answer would be taken for the next one's. The caller has a bound; the engine has none.
                self._fail(f"{op} was given up before SGLang answered")
                raise

    def _remote_call(self, op: str, arguments: dict[str, str]) -> None:
        from sglang.srt.managers.io_struct import RpcReqInput, sock_recv, sock_send

        socket, dead = self._engine.send_to_rpc, self._dead
        assert dead is not None, "start sets it"
        sock_send(socket, RpcReqInput(method=METHOD, parameters={"op": op, **arguments}))
        while not socket.poll(POLL_MS):
            if dead.done():
                return
        reply = sock_recv(socket)
        if not reply.success:
            raise EngineFailed(f"{op}: {reply.message}")

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
                for label in piece.labels:
                    spans.add(label)
                finished = piece.finish_reason is not None
                yield GenerateDelta(
                    token_ids=piece.token_ids,
                    logprobs=piece.logprobs if request.logprobs else None,
                    text=text.add(piece.token_ids, last=finished),
                    finish_reason=piece.finish_reason,
                    spans=spans.tell(finished) if piece.sure else [],
                    prompt_token_ids=told,
                )
                told = None

    def _label(self, adapter: str | None) -> Label:
        if adapter is None:
            return Label(self._version)
        loaded = self._adapters.get(adapter)
        return Label(self._version, adapter, loaded.version if loaded is not None else None)

    def _adapter_in_engine(self, name: str | None) -> str | None:
        if name is None:
            return None
        return self._adapter(name, "model").engine_name

    def _adapter(self, name: str, field: str) -> Adapter:
        if name not in self._adapters:
            raise InvalidRequest(
                f"there is no adapter {name[:64]!r} here", field=field, fix="name one that is loaded"
            )
        return self._adapters[name]

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
        await self._freeze("retract")  # of nothing; in_place would keep the last step, and refuse a flush

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
        """Running requests are retracted: they compute their KV anew, by the new weights."""
        await self._freeze("retract")  # all that the old weights made has come when this returns
        await self._call("ready", staging=staging)
        self._version = None  # half-way there are no known weights
        key = next(self._keys)
        await self._call("swap", key=key)
        self._running().key, self._version = key, version
        return True

    def set_version(self, version: WeightVersion) -> None:
        self._version = version

    def check_overwrite(self, reception: Reception) -> None:
        raise NotImplementedError

    def overwrite(self, reception: Reception, cancelled: Cancelled) -> PreparedReply:
        raise NotImplementedError

    def init_transport(self, config: Mapping[str, Any]) -> list[dict[str, Any]]:
        raise NotImplementedError

    def destroy_transport(self, backend: str) -> list[dict[str, Any]]:
        raise NotImplementedError

    async def swap_adapter(self, name: str, staging: str | None, version: WeightVersion | None) -> bool:
        """Each has a name of its own in the engine, and so a prefix cache of its own. The new one is loaded beside
        the old one, which goes when that has worked; where it can't go, the new one does."""
        old = self._adapters.get(name)
        fresh: Adapter | None = None
        # A request that only waits ends at once when it is aborted: no step is left that would want the adapter.
        await self._freeze("retract")
        if staging is not None:
            number = next(self._numbers)
            fresh = Adapter(f"{name}@{number}", f"rl-plane-{number}", version)
            await self._call("put_adapter", staging=staging, name=fresh.engine_name, lora_id=fresh.lora_id)
        try:
            if old is not None:
                await self._retire(old)
        except BaseException:
            if fresh is not None:
                await self._call("remove_adapter", name=fresh.engine_name, lora_id=fresh.lora_id)
            raise
        if fresh is not None:
            await self._manager.lora_registry.register(lora_reference(fresh.engine_name, fresh.lora_id))
            self._adapters[name] = fresh
        else:
            self._adapters.pop(name, None)
        return True

    async def _retire(self, old: Adapter) -> None:
        registry, feeder = self._manager.lora_registry, self._running()
        await feeder.abort([stream for stream in feeder.submitted() if stream.adapter == old.engine_name])
        await registry.unregister(old.engine_name)
        try:
            async with asyncio.timeout(UNUSED_WAIT_S):
                await registry.wait_for_unload(old.lora_id)
            await self._call("remove_adapter", name=old.engine_name, lora_id=old.lora_id)
        except BaseException as error:
            await registry.register(lora_reference(old.engine_name, old.lora_id))
            if isinstance(error, TimeoutError):
                raise EngineFailed(f"requests of {old.engine_name} did not end in {UNUSED_WAIT_S:g} s") from error
            raise

    def set_adapter_version(self, name: str, version: WeightVersion) -> None:
        self._adapter(name, "name").version = version

    async def check_weights(self, action: CheckAction) -> list[dict[str, Any]]:
        raise NotImplementedError

    async def release_memory(self, tags: list[str]) -> None:
        raise Unsupported("not yet")

    async def resume_memory(self, tags: list[str]) -> None:
        raise Unsupported("not yet")


def _device(asked: str) -> str:
    import torch

    if asked == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = asked.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdecimal()):
        raise InvalidRequest(f"unknown device {asked[:64]}", field="device", fix="cpu, cuda or cuda:0")
    return asked


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
def _own_logging() -> Iterator[None]:
    """SGLang puts handlers of its own in the place of the root logger's."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
