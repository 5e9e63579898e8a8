"""The `vllm` engine: vLLM's AsyncLLM, built in this process, on a CPU or on GPUs.

vLLM's front end runs in this process, on the engine loop. Its scheduler is a process of its own, and so is each rank of
the model, where our extension (`rank.py`) swaps the weights. A further process, the host agent, receives them for all
ranks.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
from collections.abc import AsyncGenerator, Collection
from dataclasses import asdict, dataclass, field
from typing import Any

from rl_plane.errors import EngineDied, EngineFailed, InvalidRequest, PlaneError, Unsupported
from rl_plane.protocol.generation import GenerateRequest
from rl_plane.protocol.versions import WeightVersion
from rl_plane.protocol.worker_ops import EngineLoadReply, ParsedCall
from worker.engines.base import AdapterLost, EngineInfo, EngineOptions, PauseMode
from worker.engines.capabilities import WHOLE, CheckAction, CheckScope, FullEngine
from worker.engines.common.checkpoint_spec import check_tensors
from worker.engines.common.lora import NO_LORA
from worker.engines.common.pieces import Piece
from worker.engines.common.rank_engine import RankEngine
from worker.engines.common.replicas import scores_of_replicas
from worker.engines.common.spans import Label
from worker.engines.common.token_checks import NO_EXPERTS, NO_ROUTED, check_adapter, most_tops, no_cut_rows
from worker.engines.common.tool_call_parsing import ARGUMENT
from worker.engines.vllm.args import NO_TRITON, check_settings, parse_arguments, pooling_arguments
from worker.engines.vllm.core_load import METHOD as LOAD
from worker.engines.vllm.core_load import total_load
from worker.engines.vllm.kept_kv import METHOD as KEEP_KV
from worker.engines.vllm.lora_requests import lora_request
from worker.engines.vllm.processes import VllmProcess, quieten
from worker.engines.vllm.scorer import METHOD
from worker.engines.vllm.sleep_levels import SLEEP_LEVEL, ReleasedMemory, SleepCall
from worker.engines.vllm.streams import Streams, VllmStream
from worker.engines.vllm.vllm_tool_parsers import cached, calls_of, parsers

KEPT_STATES = 256
"""The number of updates that the engine remembers. A request that is older has tokens of unknown versions."""

_FAST_PREFILL = "vLLM's fast prefill scores prompts wrongly: start it without kv_sharing_fast_prefill"
_SECOND_RUNNER = (
    "with LoRA, vLLM's second model runner scores prompts wrongly: start it with VLLM_USE_V2_MODEL_RUNNER=0"
)
_NO_SLEEP_CPU = "vLLM frees nothing on a CPU: its sleep mode is for GPUs"
_NO_SLEEP = "vLLM's sleep mode is off: start it with --enable-memory-saver"


@dataclass(slots=True)
class _State:
    """The versions of the weights while the engine had one name for them. None: an unknown version."""

    base: WeightVersion | None = None
    adapters: dict[str, WeightVersion] = field(default_factory=dict)
    name: str = "default"


@dataclass(frozen=True, slots=True)
class _Lora:
    """A loaded adapter: vLLM's number for it, and the name of the directory of its files. Each host has these files
    while the adapter is loaded."""

    number: int
    files: str


def build(options: EngineOptions) -> FullEngine:
    return VllmEngine(options)


def _process_of(options: EngineOptions) -> VllmProcess:
    sleeping = {"enable_sleep_mode": "true"} if options.memory_saver else {}
    arguments = parse_arguments(dict(options.extra) | sleeping)
    check_settings(options, arguments)
    arguments["logprobs_mode"] = options.logprobs_mode
    return VllmProcess(options, arguments)


class VllmEngine(RankEngine[VllmProcess]):
    gathers = True  # the tokens of a whole reply are read from vLLM's state of the request, once per turn

    def __init__(self, options: EngineOptions, process: VllmProcess | None = None) -> None:
        """`process`: the default is vLLM's own, built from the options."""
        quieten()
        super().__init__(options, process or _process_of(options))
        self._parsers_tokenizer: Any = None
        """The tokenizer as `cached` makes it. None: no parser was chosen yet."""
        self._released = ReleasedMemory()
        self._streams: Streams | None = None
        self._numbers = itertools.count(1)
        self._loras: dict[str, _Lora] = {}
        self._state = _State()
        self._states = {"default": self._state}
        """vLLM's name for the weights → their versions."""

    # life

    async def _start(self) -> EngineInfo:
        self.engine_loop = asyncio.get_running_loop()
        await asyncio.to_thread(check_tensors, self._options.model, self._options.task)
        await asyncio.to_thread(self._load_tokenizer)
        if (parser := self._options.extra.get(ARGUMENT)) is not None:
            await self._use_parser(parser)
        await asyncio.to_thread(self._read_head)
        if self._head is not None:
            self.process.arguments |= pooling_arguments(self._head)
        await self.process.start()
        await self._check_task()
        self._streams = Streams(self.process, self._eos, self._label)
        await self.liveness()
        return self._describe()

    async def _check_task(self) -> None:
        """Raises Unsupported for a pooling model that vLLM serves for other tasks only."""
        if self._head is None:
            return
        tasks = await self.process.ask(self.process.llm.get_supported_tasks())
        if self._head.task not in tasks:
            raise Unsupported(
                f"vLLM does not serve this model for {self._head.task}. Its tasks are: {', '.join(tasks) or 'none'}",
                field="model",
                fix="serve another model, or this one by another engine",
            )

    def _describe(self) -> EngineInfo:
        import vllm
        from vllm.platforms import current_platform

        model, parallel = self.process.config.model_config, self.process.config.parallel_config
        lora = self.process.config.lora_config
        return EngineInfo(
            engine="vllm",
            engine_version=vllm.__version__,
            model=self._options.model.absolute().name,
            dtype=str(model.dtype).removeprefix("torch."),
            device=current_platform.device_type,
            world_size=parallel.world_size * self.process.replicas,
            tp_size=parallel.tensor_parallel_size,
            pp_size=parallel.pipeline_parallel_size,
            dp_size=self.process.replicas,
            vocab_size=model.get_vocab_size(),
            max_model_len=model.max_model_len,
            lacks=self._lacking(),
            transports=self.host.transports,
            tied=self.model.tied,
            deterministic=self._options.deterministic,
            memory_saver=bool(model.enable_sleep_mode),
            max_adapters=self._lora_places(),
            max_lora_rank=None if lora is None else int(lora.max_lora_rank),
            logprobs_mode=model.logprobs_mode,
            max_prompt_top_logprobs=most_tops(model.get_vocab_size(), model.max_logprobs),
            kv_tokens=self._kv_tokens(),
            dimension=self._head.dimension if self._head is not None else None,
            labels=self._head.labels if self._head is not None else (),
        )

    async def engine_load(self) -> EngineLoadReply:
        return total_load(await self.process.on_cores(LOAD))

    def _lacking(self) -> dict[str, str]:
        lacking = self._lacking_in_common()
        if (reason := self._no_sleep()) is not None:
            lacking |= {"release_memory": reason, "resume_memory": reason}
        if self._head is not None:
            return lacking
        if self.process.config.lora_config is None:
            lacking |= {"prepare_update:lora": NO_LORA, "update_weights:lora": NO_LORA}
        config = self.process.config
        wrong: str | None = None
        if config.cache_config.kv_sharing_fast_prefill:
            wrong = _FAST_PREFILL
        elif config.lora_config is not None and config.use_v2_model_runner:
            wrong = _SECOND_RUNNER
        if wrong is not None:
            lacking |= {"generate:prompt_logprobs": wrong, "score": wrong}
        if not config.aux_output_config.enable_return_routed_experts:
            lacking["generate:routed_experts"] = self._no_routed_experts()
        else:
            lacking |= no_cut_rows("stop")
        return lacking

    def _parsers(self) -> Collection[str]:
        return parsers()

    def _calls_of(
        self, name: str, token_ids: list[int], tools: list[dict[str, Any]]
    ) -> tuple[str, list[ParsedCall]]:
        def text(skip_special_tokens: bool) -> str:
            return self._text_of(token_ids, skip_special_tokens=skip_special_tokens)

        if self._parsers_tokenizer is None:  # by the first text, at the start
            self._parsers_tokenizer = cached(self._tokenizer)
        return calls_of(name, self._parsers_tokenizer, tools, text)

    def _kv_tokens(self) -> int | None:
        of_one: int | None = self.process.config.cache_config.kv_cache_size_tokens
        return None if of_one is None else of_one * self.process.replicas

    def _no_routed_experts(self) -> str:
        from vllm.triton_utils import HAS_TRITON

        if not self.process.config.model_config.is_moe:
            return NO_EXPERTS
        return NO_ROUTED if HAS_TRITON else NO_TRITON

    def _no_sleep(self) -> str | None:
        from vllm.platforms import current_platform

        if current_platform.is_cpu():
            return _NO_SLEEP_CPU
        return None if self.process.config.model_config.enable_sleep_mode else _NO_SLEEP

    async def _ranks_answer(self) -> None:
        await self.process.on_cores("collective_rpc", "rl_plane_ping", None, (), None)

    # generation

    def _pieces(self, request: GenerateRequest, prompt: list[int]) -> AsyncGenerator[Piece, None]:
        return self._requests_in_vllm().run(request, prompt, self._lora_of(request))

    async def _raw(self, request: GenerateRequest, prompt: list[int]) -> tuple[Any, Label] | None:
        return await self._requests_in_vllm().pooled(request, prompt)

    def _requests_in_vllm(self) -> Streams:
        self._running()
        assert self._streams is not None, "built with the engine"
        return self._streams

    def _lora_of(self, request: GenerateRequest) -> Any:
        check_adapter(request.adapter, self._loras, "model")
        if request.adapter is None:
            return None
        lora, directory = self._loras[request.adapter], self.process.directory
        # No rank reads this path: each of them has loaded the adapter by `_add_lora`, on other hosts from another path.
        path = str(directory / lora.files) if directory is not None else lora.files
        return lora_request(lora.number, path)

    def _label(self, name: str | None, adapter: str | None) -> Label:
        state = self._states.get(name or "") or _State()
        return Label(state.base, adapter, None if adapter is None else state.adapters.get(adapter))

    async def abort(self, request_ids: list[str] | None) -> int:
        streams = self._requests_in_vllm()
        before, ended = self._abort_tokenized(request_ids), streams.of(request_ids)
        await self.process.ask(streams.abort(ended))
        return before + len(ended)

    async def _pause(self, mode: PauseMode, clear_cache: bool) -> None:
        self._paused = True
        coming: list[VllmStream] = []  # vLLM aborts only what it has
        if mode == "abort":
            self._abort_tokenized(None)
            coming = self._requests_in_vllm().coming()
        await self._freeze(mode)
        if coming:
            await self.process.ask(self._requests_in_vllm().abort(coming))

    async def _freeze(self, mode: PauseMode = "keep") -> None:
        # Not by pause_generation, which adds a sleep: each token has its own label.
        await self.process.ask(self.process.llm.engine_core.pause_scheduler_async(mode=mode, clear_cache=False))

    async def resume(self) -> None:
        self._paused = False  # the last call counts, even if its answer comes late
        await self.process.ask(self.process.llm.resume_generation())

    async def flush_cache(self) -> bool:
        """vLLM refuses while requests run. Frozen requests lose their KV, and compute it again when they continue. The
        KV that vLLM's own connector keeps in host memory (`kv_offloading_size`) is dropped, too."""
        llm = self.process.llm
        return await self.process.ask(
            llm.reset_prefix_cache(reset_running_requests=self._paused, reset_connector=True)
        )

    # weights

    async def before_overwrite(self) -> None:
        self._check_paused()
        await self._forget_base()

    async def after_overwrite(self) -> None:
        await self._add_loras()

    async def swap(self, staging: str, version: WeightVersion, *, keep_kv: bool = False) -> bool:
        """With `keep_kv`, the prefix cache stays too: see `kept_kv`. Otherwise all running requests compute their KV
        again, since vLLM drops the prefix cache only together with theirs."""
        before = self._state
        keep_kv = keep_kv and before.base is not None
        try:
            self._check_paused()
            if keep_kv:
                await self._freeze()  # vLLM's other pauses let requests take KV meanwhile
            await asyncio.to_thread(self.ranks.take, staging)
            await asyncio.to_thread(self.host.take, staging)
        except BaseException:
            await asyncio.to_thread(self._forget, staging)
            raise
        await self._forget_base()
        await self._loaded(staging, await self.process.on_ranks("rl_plane_swap"))
        await self._add_loras()
        kept = await self._keep_kv() if keep_kv else None
        flushed = kept is None and await self._flush(stale=True)
        await self._name_state(version, self._adapter_versions())
        if kept:
            self._requests_in_vllm().keep_kv(kept, before.name, self._state.name, before.base)
        return flushed

    async def _keep_kv(self) -> list[str] | None:
        """Returns vLLM's ids of the requests that keep their KV. None: the cache must be flushed instead."""
        salt = secrets.token_hex(8)  # no request's own
        kept: list[list[str] | None] = await self.process.on_cores(KEEP_KV, salt)
        return None if None in kept else [key for keys in kept for key in keys or ()]

    async def _score(self, sequences: list[list[int]]) -> Any:
        llm = self.process.llm
        await self._freeze()
        scores = await self.process.on_cores(METHOD, sequences)
        if None not in scores:
            return scores_of_replicas(scores)
        # Running requests leave no room.
        if not await self.process.ask(llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True)):
            raise EngineFailed("vLLM did not flush its prefix cache: a request holds KV")
        scores = await self.process.on_cores(METHOD, sequences)
        if None in scores:
            raise EngineFailed("vLLM's KV cache has no room for the sequences")
        return scores_of_replicas(scores)

    def _released_tags(self) -> Collection[str]:
        return self._released.tags

    async def _flush(self, stale: bool) -> bool:
        """`stale`: new requests would find KV of the old weights."""
        flushed = await self.flush_cache()
        if stale and not flushed:
            raise EngineFailed("vLLM did not flush its prefix cache: new requests would reuse older KV")
        return flushed

    def _adapter_versions(self) -> dict[str, WeightVersion]:
        """Returns the versions of the loaded adapters. No request can name another adapter."""
        return {name: version for name, version in self._state.adapters.items() if name in self._loras}

    async def _forget_base(self) -> None:
        """Says that the base weights are of no version from here on."""
        await self._name_state(None, self._adapter_versions())

    async def _add_loras(self) -> None:
        """Loads all adapters again: new base weights have dropped them."""
        for lora in self._loras.values():
            await self._add_lora(lora)

    async def _name_state(self, base: WeightVersion | None, adapters: dict[str, WeightVersion]) -> None:
        """Labels the tokens that follow with these versions."""
        name = f"state-{next(self._numbers)}"
        state = _State(base, adapters, name)
        self._states[name] = state
        while len(self._states) > KEPT_STATES:
            del self._states[next(iter(self._states))]
        try:
            await self.process.ask(self.process.llm.update_weight_version(name))
        except BaseException:
            del self._states[name]  # if the engine has the name nevertheless, its tokens are of unknown weights
            raise
        self._state = state

    def set_version(self, version: WeightVersion) -> None:
        self._state.base = version

    async def swap_adapter(self, name: str, staging: str | None, version: WeightVersion | None) -> bool:
        self._check_paused()
        before = self._loras.get(name)
        if staging is None:
            return await self._unload(name, before)
        try:
            self.info.check_place(name, self._loras)  # vLLM would evict another adapter
        except InvalidRequest:
            await asyncio.to_thread(self._forget, staging)
            raise
        number = next(self._numbers)
        lora = _Lora(before.number if before is not None else number, f"adapter-{number}")
        try:
            await self._on_agents("keep_adapter", staging=staging, files=lora.files)
        except BaseException:
            await self._drop_files(lora)
            await asyncio.to_thread(self._forget, staging)
            raise
        await asyncio.to_thread(self._adapter_taken, staging)
        try:
            assert version is not None, "of an adapter that is loaded"
            await self._add_lora(lora)
            # The cache is keyed by the adapters' numbers, and this one may have the number of an old one.
            flushed = await self._flush(stale=before is not None)
            await self._name_state(self._state.base, self._adapter_versions() | {name: version})
        except BaseException as error:
            await self._take_out(name, lora, before, error)
            raise
        self._loras[name] = lora
        if before is not None:
            await self._drop_files(before)
        return flushed

    async def _on_agents(self, op: str, **body: Any) -> None:
        await asyncio.to_thread(self.process.ranks.rows, op, body)

    async def _drop_files(self, lora: _Lora) -> None:
        """Deletes an adapter's files on all hosts. If a host fails, its files are deleted with the engine's
        directory."""
        with contextlib.suppress(PlaneError):
            await self._on_agents("drop_adapter", files=lora.files)

    def _lora_places(self) -> int | None:
        from vllm.platforms import current_platform

        limits = self.process.config.lora_config
        if limits is None:
            return None
        # On a CPU the last slot stays empty: see `completed`.
        return int(limits.max_loras - 1 if current_platform.is_cpu() else limits.max_cpu_loras or limits.max_loras)

    async def _add_lora(self, lora: _Lora) -> None:
        """Replaces the adapter of this number, if there is one. On a rank where this one does not load, the old one
        stays."""
        await self.process.on_ranks("rl_plane_add_lora", lora.number, lora.files)

    async def _remove_lora(self, lora: _Lora) -> None:
        await self.process.on_ranks("rl_plane_remove_lora", lora.number)

    async def _take_out(self, name: str, lora: _Lora, before: _Lora | None, error: BaseException) -> None:
        try:
            if before is not None:
                await self._put_back(name, before, error)
            else:
                with contextlib.suppress(PlaneError):  # the first error counts
                    await self._remove_lora(lora)
        finally:
            await self._drop_files(lora)

    async def _put_back(self, name: str, lora: _Lora, error: BaseException) -> None:
        """Restores the adapter on every rank, whatever each rank has. If that fails, the ranks may differ: no request
        may use the adapter."""
        try:
            await self._add_lora(lora)
        except EngineDied:
            raise
        except PlaneError as failure:
            await self._end_adapter(name, lora)
            with contextlib.suppress(PlaneError):  # the first error counts
                await self._remove_lora(lora)
            raise AdapterLost.of(name, error, failure) from error

    async def _end_adapter(self, name: str, lora: _Lora) -> None:
        """Removes the adapter's name, and ends its requests."""
        del self._loras[name]
        streams = self._requests_in_vllm()
        await self.process.ask(streams.abort(streams.of_adapter(name)))
        await self._drop_files(lora)

    async def _unload(self, name: str, lora: _Lora | None) -> bool:
        """Does everything that may fail before the adapter is removed. Its version stays in the state until the next
        one: no request can ask for it."""
        flushed = await self.flush_cache()
        if lora is None:
            return flushed
        try:
            await self._remove_lora(lora)
        except BaseException as error:
            await self._put_back(name, lora, error)
            raise
        await self._end_adapter(name, lora)
        return flushed

    def set_adapter_version(self, name: str, version: WeightVersion) -> None:
        check_adapter(name, self._loras, "name")
        self._state.adapters[name] = version

    async def check_weights(self, action: CheckAction, scope: CheckScope = WHOLE) -> list[dict[str, Any]]:
        if action == "reset_tensors":
            return await self._reset()
        if self.info.device != "cpu":
            return await asyncio.to_thread(self.process.ranks.check, action, asdict(scope))
        # On a CPU a check runs the packed layers, which running steps use too.
        return await self.process.on_ranks("rl_plane_check", action, asdict(scope))

    async def _reset(self) -> list[dict[str, Any]]:
        """Freezes the engine meanwhile: the adapters are dropped with the weights, and a step without one would read
        the files that its request began with, which may be deleted."""
        async with self._stopped():
            await self._freeze()
            await self._forget_base()
            rows = await self.process.on_ranks("rl_plane_reset")
            await self._add_loras()
        return rows

    async def release_memory(self, tags: list[str]) -> None:
        """Frozen requests lose their KV, and compute it again when they continue."""
        self.info.require("release_memory", "op")
        for call in self._released.release(tags):
            await self._make(call)

    async def resume_memory(self, tags: list[str]) -> None:
        self.info.require("resume_memory", "op")
        for call in self._released.resume(tags):
            await self._make(call)

    async def _make(self, call: SleepCall) -> None:
        llm = self.process.llm
        match call.method:
            case "sleep":
                await self.process.ask(llm.sleep(level=SLEEP_LEVEL, mode="keep"))
            case "release_kv_cache_memory":
                # vLLM needs an idle scheduler: an abort leaves work for it.
                await self._freeze()
                await self.process.ask(llm.release_kv_cache_memory())
            case "wake_up":
                await self.process.ask(llm.wake_up(sorted(call.tags)))
