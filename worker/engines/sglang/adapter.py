"""The `sglang` engine: SGLang's Engine, built in this process, on a CPU or on GPUs.

SGLang's tokenizer manager runs in this process, on the engine loop. Each rank of the model is a scheduler process of
SGLang, in which our plugin (`plugin.py`) starts an agent and does the work that must happen between two steps.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import secrets
from collections.abc import AsyncGenerator, Collection
from dataclasses import asdict, dataclass
from typing import Any

from rl_plane.errors import EngineDied, EngineFailed, InvalidRequest, PlaneError, Unsupported
from rl_plane.protocol.generation import GenerateRequest
from rl_plane.protocol.versions import WeightVersion
from rl_plane.protocol.worker_ops import EngineLoadReply, ParsedCall
from rl_plane.weights.checkpoint import open_checkpoint
from worker.engines.base import AdapterLost, EngineInfo, EngineOptions, PauseMode
from worker.engines.capabilities import WHOLE, CheckAction, CheckScope, FullEngine
from worker.engines.common.checkpoint_spec import check_tensors
from worker.engines.common.lora import NO_LORA
from worker.engines.common.pieces import Piece
from worker.engines.common.rank_engine import RankEngine
from worker.engines.common.replicas import scores_of_replicas
from worker.engines.common.request_gate import requests_of
from worker.engines.common.spans import Label
from worker.engines.common.token_checks import NO_EXPERTS, NO_ROUTED, check_adapter, most_tops, no_cut_rows
from worker.engines.common.tool_call_parsing import ARGUMENT
from worker.engines.sglang.args import check_cpu, check_nodes, parse_arguments
from worker.engines.sglang.limits import RAW_EMBEDDING, check_model, check_pooling, lora_targets_on_cpu
from worker.engines.sglang.lora_references import lora_reference
from worker.engines.sglang.processes import SglangProcess
from worker.engines.sglang.scorer import NO_PIPELINE
from worker.engines.sglang.sglang_tool_parsers import AUTO, calls_of, parsers
from worker.engines.sglang.streams import Experts, Feeder

FLUSH_WAIT_S = 2.0
"""Seconds that a flush waits for the engine to notice that it is idle: right after a request it has not noticed yet."""

UNUSED_WAIT_S = 5.0
"""Seconds that the aborted requests of an adapter may take to leave the engine."""

NO_SAVER = "start it on a GPU with --enable-memory-saver"
NO_SEEDS = "SGLang looks at seeds in its deterministic mode only: start it with --deterministic"
NO_SEEDS_CPU = "only SGLang's pytorch sampler takes seeds: start it with --engine-arg sampling_backend=pytorch"

NO_GRAMMARS = "the engine was started without grammars: start it without --engine-arg grammar_backend=none"

PENALIZED = (
    "SGLang counts a request's tokens anew after each update, and its logprobs would be of penalized logits"
)

NO_CHOICE = {
    "generate:min_tokens": "SGLang counts a request's tokens anew after each update, and bars what its tokenizer says",
    "generate:min_p": "SGLang has this for requests without a seed only, and ends itself",
    "generate:frequency_penalty": PENALIZED,
    "generate:presence_penalty": PENALIZED,
    "generate:repetition_penalty": PENALIZED,
    "generate:allowed_token_ids": "SGLang has this by custom logit processors only: pickled code",
    "generate:bad_words_token_ids": "SGLang has this by custom logit processors only: pickled code",
}


@dataclass(slots=True)
class LoadedAdapter:
    """A loaded adapter."""

    engine_name: str
    """Its name in the engine. A name is never used twice."""
    lora_id: str
    version: WeightVersion | None


def build(options: EngineOptions) -> FullEngine:
    return SglangEngine(options)


def lacking_seeds(on_cpu: bool, backend: str, deterministic: bool) -> dict[str, str]:
    """The reason why requests can't have seeds, if they can't. On a CPU, where SGLang has no deterministic mode, our
    plugin hands its pytorch sampler the seeds."""
    if deterministic or (on_cpu and backend == "pytorch"):
        return {}
    return {"generate:seed": NO_SEEDS_CPU if on_cpu else NO_SEEDS}


def _process_of(options: EngineOptions) -> SglangProcess:
    options.check_model()
    check_model(options.model)
    device, _, gpu = _device(options.device).partition(":")
    on_cpu = device == "cpu"
    if on_cpu:
        options.refuse_modes("SGLang has this on GPUs only", "leave it out on a CPU")
    named = {
        "enable_deterministic_inference": options.deterministic,
        "enable_memory_saver": options.memory_saver,
    }
    extra = dict(options.extra) | {name: "true" for name, given in named.items() if given}
    arguments = parse_arguments(extra)
    check_nodes(arguments, options.hosts)
    if on_cpu:
        check_cpu(arguments)
    if on_cpu and arguments.get("enable_lora"):
        asked = arguments["lora_target_modules"] if "lora_target_modules" in extra else None
        arguments["lora_target_modules"] = lora_targets_on_cpu(options.model, asked)
    return SglangProcess(options, arguments, device, int(gpu or 0))


class SglangEngine(RankEngine[SglangProcess]):
    def __init__(self, options: EngineOptions, process: SglangProcess | None = None) -> None:
        """`process`: the default is SGLang's own, built from the options."""
        super().__init__(options, process or _process_of(options))
        self._on_cpu = self.process.device == "cpu"
        self._feeder: Feeder | None = None
        self._numbers = itertools.count(1)
        self._version: WeightVersion | None = None
        """The version of the served weights. None: no version."""
        self._adapters: dict[str, LoadedAdapter] = {}
        self._released: set[str] = set()
        self._changing = asyncio.Lock()
        """Held by a change of an adapter to its end, even if its caller gives up."""
        self._memory = asyncio.Lock()
        """Held by a release or resume of memory to its end, even if its caller gives up: SGLang ends itself if one of
        them comes twice."""

    # life

    async def _start(self) -> EngineInfo:
        self.engine_loop = asyncio.get_running_loop()
        await asyncio.to_thread(self._check_model)
        await asyncio.to_thread(self._load_tokenizer)
        await asyncio.to_thread(self._read_head)
        if self._head is not None:
            check_pooling(self._options.model, self._head)
            self.process.arguments["is_embedding"] = True
        parser = self._options.extra.get(ARGUMENT)
        if parser is not None and parser != AUTO:
            await self._use_parser(parser)
        await self.process.start()
        manager = self.process.manager
        if parser == AUTO:
            await self._use_parser(manager.config_value(ARGUMENT) or AUTO)
        experts = Experts.of(manager.model_config.hf_text_config)
        self._feeder = Feeder(manager, self._eos, self._adapter_in_engine, self._label, experts)
        self.process.on_death(self._feeder.fail)
        await self.process.call("updatable")
        return self._describe()

    def _parsers(self) -> Collection[str]:
        return parsers()

    def _calls_of(
        self, name: str, token_ids: list[int], tools: list[dict[str, Any]]
    ) -> tuple[str, list[ParsedCall]]:
        return calls_of(name, self._tokenizer, tools, self._text_of(token_ids, skip_special_tokens=False))

    def _check_model(self) -> None:
        """Checks the model's files before SGLang loads them, since SGLang's own errors say less."""
        open_checkpoint(self._options.model, field="model").close()
        check_tensors(self._options.model, self._options.task)

    def _describe(self) -> EngineInfo:
        import sglang

        engine, config = self.process.engine, self.process.manager.model_config
        arguments = engine.server_args
        lacking = dict(NO_CHOICE)
        if not arguments.enable_lora:
            lacking |= {"prepare_update:lora": NO_LORA, "update_weights:lora": NO_LORA}
        if self._on_cpu or not arguments.enable_memory_saver:
            lacking |= {"release_memory": NO_SAVER, "resume_memory": NO_SAVER}
        if arguments.pp_size > 1:
            lacking["score"] = NO_PIPELINE
        lacking |= lacking_seeds(
            self._on_cpu, arguments.sampling_backend, arguments.enable_deterministic_inference
        )
        if arguments.grammar_backend == "none":
            lacking["generate:structured_output"] = NO_GRAMMARS
        if not arguments.enable_return_routed_experts:
            has_experts = bool(getattr(config.hf_text_config, "num_experts_per_tok", None))
            lacking["generate:routed_experts"] = NO_ROUTED if has_experts else NO_EXPERTS
        else:
            lacking |= no_cut_rows("stop") | no_cut_rows("stop_token_ids", "ignore_eos")
        return EngineInfo(
            engine="sglang",
            engine_version=sglang.__version__,
            model=self._options.model.absolute().name,
            dtype=str(config.dtype).removeprefix("torch."),
            device=str(arguments.device),
            world_size=arguments.tp_size * arguments.pp_size * self.process.replicas,
            tp_size=arguments.tp_size,
            pp_size=arguments.pp_size,
            dp_size=self.process.replicas,
            vocab_size=config.vocab_size,
            max_model_len=int(engine._scheduler_init_result.scheduler_infos[0]["max_req_input_len"]),
            lacks=lacking | self._lacking_in_common(),
            transports=self.host.transports,
            tied=self.model.tied,
            deterministic=arguments.enable_deterministic_inference,
            memory_saver=arguments.enable_memory_saver,
            max_lora_rank=arguments.max_lora_rank if arguments.enable_lora else None,
            logprobs_mode=self._options.logprobs_mode,
            max_prompt_top_logprobs=most_tops(config.vocab_size),
            kv_tokens=self._kv_tokens(),
            dimension=self._head.dimension if self._head is not None else None,
            labels=self._head.labels if self._head is not None else (),
        )

    def _kv_tokens(self) -> int | None:
        of_one = self.process.engine._scheduler_init_result.scheduler_infos[0].get("max_total_num_tokens")
        return None if of_one is None else int(of_one) * self.process.replicas

    async def engine_load(self) -> EngineLoadReply | None:
        found = await self.process.ask(self.process.manager.get_loads())
        if not found:
            return None  # the scheduler has written nothing yet
        return EngineLoadReply(
            running=sum(load.num_running_reqs for load in found),
            waiting=sum(load.num_waiting_reqs for load in found),
            kv_usage=sum(load.token_usage for load in found) / len(found),
            preemptions=None,
            tokens_per_s=sum(load.gen_throughput for load in found),
        )

    async def _ranks_answer(self) -> None:
        await self.process.ask(self.process.manager.get_internal_state())

    def _requests_in_sglang(self) -> Feeder:
        self._running()
        assert self._feeder is not None, "start sets it"
        return self._feeder

    # generation

    def _pieces(self, request: GenerateRequest, prompt: list[int]) -> AsyncGenerator[Piece, None]:
        return self._requests_in_sglang().run(request, prompt)

    async def _raw(self, request: GenerateRequest, prompt: list[int]) -> tuple[Any, Label] | None:
        pooling = request.pooling
        if pooling is not None and pooling.task == "embed" and not pooling.activation:
            raise Unsupported(RAW_EMBEDDING, field="use_activation", fix="leave it out, or use hf or vllm")
        return await self._requests_in_sglang().pooled(request, prompt)

    def _label(self, adapter: str | None) -> Label:
        if adapter is None:
            return Label(self._version)
        loaded = self._adapters.get(adapter)
        return Label(self._version, adapter, loaded.version if loaded is not None else None)

    def _adapter_in_engine(self, name: str | None) -> str | None:
        check_adapter(name, self._adapters, "model")
        return None if name is None else self._adapters[name].engine_name

    async def abort(self, request_ids: list[str] | None) -> int:
        feeder = self._requests_in_sglang()
        streams = requests_of(feeder.streams, request_ids)
        before = self._abort_tokenized(request_ids)
        await feeder.abort(streams)
        return before + len(streams)

    async def _pause(self, mode: PauseMode, clear_cache: bool) -> None:
        """`keep` is SGLang's in_place; with `clear_cache` it is SGLang's retract: running requests lose their KV and
        compute it again after `resume`."""
        if mode == "wait":
            await self._drain()
        elif mode == "abort":
            # Retracted requests only wait, so they end at once. Others would end after the next step.
            await self._freeze("retract")
            await self.abort(None)
        else:
            await self._freeze("retract" if clear_cache else "in_place")

    async def _freeze(self, how: str = "in_place") -> None:
        feeder = self._requests_in_sglang()
        feeder.close()
        self._paused = True
        if self.info.pp_size > 1:
            await self._pause_sglang("in_place")
            await self._await_steps()
        await self._pause_sglang(how)  # also again in place: then the tokens of the last steps have come
        if how == "retract":
            feeder.forget_kv()

    async def _pause_sglang(self, how: str) -> None:
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        await self.process.manager.pause_generation(PauseGenerationReqInput(mode=how))
        await self._ranks_answer()  # then the first stage is paused, and the others are before their next step

    async def _await_steps(self) -> None:
        """Waits until no step of the pipeline is under way. Each of its batches ends its step in one round of the
        loop, and each call takes one pass of the round."""
        arguments = self.process.engine.server_args
        for _ in range(arguments.pp_size + arguments.pp_async_batch_depth + 1):
            if all(row["still"] for row in await self.process.call("stands_still")):
                return
        raise EngineFailed("the pipeline makes steps while it is paused")

    async def _thaw(self) -> None:
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        await self.process.manager.continue_generation(ContinueGenerationReqInput())
        self._paused = False

    async def _drain(self) -> None:
        feeder = self._requests_in_sglang()
        feeder.close()
        if self._paused:
            await self._thaw()
        feeder.feed_begun()
        while running := [stream.feeding for stream in feeder.begun() if stream.feeding is not None]:
            await asyncio.wait(running)
        await self._freeze("retract")  # in_place would keep the last step, and refuse a flush

    async def resume(self) -> None:
        async with self._changing:  # a change continues after its caller is gone
            if self._paused:
                await self._thaw()
            self._requests_in_sglang().open()

    async def flush_cache(self) -> bool:
        """SGLang refuses while requests run. Frozen requests are retracted: they compute their KV again."""
        if self._paused:
            await self._freeze("retract")
        elif self._requests_in_sglang().submitted():
            return False
        wait_s = None if self._paused else FLUSH_WAIT_S
        return await self.process.ask(self._flush(wait_s))

    async def _flush(self, wait_s: float | None) -> bool:
        """Flushes the caches of all replicas. SGLang's own call returns the answer of the first replica only."""
        from sglang.srt.managers.io_struct import FlushCacheReqInput

        manager = self.process.manager
        replies = await manager.flush_cache_communicator(FlushCacheReqInput(timeout_s=wait_s))
        flushed = all(reply.success for reply in replies)
        if flushed and manager.mm_processor is not None:
            manager.mm_processor.clear_preprocess_cache()
        return flushed

    # weights

    async def before_overwrite(self) -> None:
        self._check_paused()
        await self._freeze("retract")
        await self._relabel(None)

    async def _relabel(self, version: WeightVersion | None) -> None:
        key = self._next_key()
        await self.process.call("relabel", key=key)
        self._requests_in_sglang().key, self._version = key, version

    def _next_key(self) -> str:
        return f"rl-plane-{next(self._numbers)}"

    async def swap(self, staging: str, version: WeightVersion, *, keep_kv: bool = False) -> bool:
        """With `keep_kv`, the prefix cache stays too: see `kept_kv`. Otherwise it retracts running requests: they
        compute their KV again."""
        self._check_paused()
        return await self.process.ask(self._swap(staging, version, keep_kv))

    async def _swap(self, staging: str, version: WeightVersion, keep_kv: bool) -> bool:
        """Returns whether the prefix cache was flushed."""
        kept = None
        try:
            if keep_kv and self._version is not None:
                await self._freeze()  # all tokens of the old weights have come when this returns
                kept = await self._keep_kv(self._version)
            if kept is None:
                await self._freeze("retract")
            await asyncio.to_thread(self.ranks.take, staging)
            await self.process.call("ready" if kept is None else "updatable")
            await asyncio.to_thread(self.host.take, staging)
        except PlaneError:
            await asyncio.to_thread(self.discard, staging)  # in the ranks that were not ready
            raise
        key = self._next_key()
        self._requests_in_sglang().key, self._version = key, None  # half-way, the weights are of no version
        await self._loaded(staging, await self.process.call("swap", key=key))
        self._version = version
        return kept is None

    async def _keep_kv(self, version: WeightVersion) -> list[str] | None:
        """Returns SGLang's ids of the requests that keep the KV of these weights. None: they can't keep it."""
        rows = await self.process.call("keep", salt=secrets.token_hex(8))  # no request's own
        replicas = self._by_replica(rows)
        if any(row["kept"] != ranks[0]["kept"] for ranks in replicas for row in ranks):
            raise EngineFailed("SGLang's ranks hold KV of different requests")
        of_each: list[list[str] | None] = [ranks[0]["kept"] for ranks in replicas]
        kept = None if None in of_each else [rid for rids in of_each for rid in rids or ()]
        for stream in self._requests_in_sglang().streams.values():
            stream.kv = (stream.kv or version) if stream.rid in (kept or ()) else None
        return kept

    async def _score(self, sequences: list[list[int]]) -> Any:
        await self._freeze()
        rows = await self.process.call("score", sequences=json.dumps(sequences))
        if any(row["forgot"] for row in rows):
            if not all(row["forgot"] for row in rows):
                # In one replica all requests have lost their KV. So they do in each.
                await self.process.call("ready")
            self._requests_in_sglang().forget_kv()
        return scores_of_replicas([ranks[0]["scores"] for ranks in self._by_replica(rows)])

    def _by_replica(self, rows: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
        size = len(rows) // self.process.replicas
        return [rows[start : start + size] for start in range(0, len(rows), size)]

    def _released_tags(self) -> Collection[str]:
        return self._released

    def set_version(self, version: WeightVersion) -> None:
        self._version = version

    # adapters

    async def swap_adapter(self, name: str, staging: str | None, version: WeightVersion | None) -> bool:
        """Gives each adapter a new name in the engine, and so a prefix cache of its own. The new adapter is loaded
        beside the old one, which is removed when that has worked. If the old one can't be removed, the new one is."""
        self._check_paused()
        await self.process.ask(self._change_adapter(name, staging, version))
        return False  # no request finds the KV of the old one

    async def _change_adapter(self, name: str, staging: str | None, version: WeightVersion | None) -> None:
        async with self._changing:
            await self._swap_adapter(name, staging, version)

    async def _swap_adapter(self, name: str, staging: str | None, version: WeightVersion | None) -> None:
        old = self._adapters.get(name)
        fresh: LoadedAdapter | None = None
        # A waiting request ends at once when it is aborted: no later step would want the adapter.
        await self._freeze("retract")
        if staging is not None:
            number = next(self._numbers)
            fresh = LoadedAdapter(f"{name}@{number}", f"rl-plane-adapter-{number}", version)
        try:
            if fresh is not None and staging is not None:
                try:
                    await self.process.call(
                        "put_adapter", staging=staging, name=fresh.engine_name, lora_id=fresh.lora_id
                    )
                except BaseException:
                    await asyncio.to_thread(self._forget, staging)
                    raise
                await asyncio.to_thread(self._adapter_taken, staging)
            if old is not None:
                await self._retire(name, old, replaced=fresh is not None)
        except BaseException:
            if fresh is not None:  # one rank may have it while another one failed
                with contextlib.suppress(PlaneError):  # the first error counts
                    await self.process.call("forget_adapter", lora_id=fresh.lora_id)
            raise
        if fresh is not None:
            await self.process.manager.lora_registry.register(lora_reference(fresh.engine_name, fresh.lora_id))
            self._adapters[name] = fresh
        else:
            self._adapters.pop(name, None)

    async def _retire(self, name: str, old: LoadedAdapter, replaced: bool) -> None:
        """Removes an adapter that may have requests. A request can't change to another adapter: if it is replaced, the
        new adapter is asked for the rest."""
        registry, feeder = self.process.manager.lora_registry, self._requests_in_sglang()
        if replaced:
            await feeder.begin_again([one for one in feeder.submitted() if one.adapter == old.engine_name])
        else:
            await feeder.abort([one for one in feeder.streams.values() if one.request.adapter == name])
        feeder.end_left(old.engine_name)
        await registry.unregister(old.engine_name)
        try:
            async with asyncio.timeout(UNUSED_WAIT_S):
                await registry.wait_for_unload(old.lora_id)
        except BaseException as error:
            await registry.register(lora_reference(old.engine_name, old.lora_id))
            if isinstance(error, TimeoutError):
                raise EngineFailed(f"requests of {old.engine_name} did not end in {UNUSED_WAIT_S:g} s") from error
            raise
        try:
            await self.process.call("remove_adapter", lora_id=old.lora_id)
        except BaseException as error:
            await self._put_back(name, old, error)
            raise
        with contextlib.suppress(PlaneError):  # it is removed; only its memory stays
            await self.process.call("forget_adapter", lora_id=old.lora_id)

    async def _put_back(self, name: str, old: LoadedAdapter, error: BaseException) -> None:
        """Restores an adapter that a rank may have removed while another one failed. A request for it would end a rank
        without it."""
        try:
            await self.process.call("put_back_adapter", lora_id=old.lora_id)
        except EngineDied:
            raise
        except PlaneError as failure:
            del self._adapters[name]
            feeder = self._requests_in_sglang()
            await feeder.abort([one for one in feeder.streams.values() if one.request.adapter == name])
            with contextlib.suppress(PlaneError):  # the first error counts
                await self.process.call("forget_adapter", lora_id=old.lora_id)
            raise AdapterLost.of(name, error, failure) from error
        await self.process.manager.lora_registry.register(lora_reference(old.engine_name, old.lora_id))

    def set_adapter_version(self, name: str, version: WeightVersion) -> None:
        check_adapter(name, self._adapters, "name")
        self._adapters[name].version = version

    async def check_weights(self, action: CheckAction, scope: CheckScope = WHOLE) -> list[dict[str, Any]]:
        if action != "reset_tensors":
            return await self.process.ask(asyncio.to_thread(self.process.ranks.check, action, asdict(scope)))
        async with self._stopped():
            await self._freeze("retract")
            key = self._next_key()
            self._requests_in_sglang().key, self._version = key, None
            await self.process.call("reset", key=key)
        return self._rows()

    # memory

    async def release_memory(self, tags: list[str]) -> None:
        """Retracts frozen requests: they compute their KV again."""
        self.info.require("release_memory", "op")
        await self._freeze("retract")  # SGLang ends the process if a request runs
        await self.process.ask(self._release(tags))

    async def _release(self, tags: list[str]) -> None:
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

        async with self._memory:
            wanted = [tag for tag in tags if tag not in self._released]
            if wanted:
                manager, asked = self.process.manager, ReleaseMemoryOccupationReqInput(tags=_sglang_tags(wanted))
                await manager.release_memory_occupation(asked)
                self._released.update(wanted)

    async def resume_memory(self, tags: list[str]) -> None:
        self.info.require("resume_memory", "op")
        await self.process.ask(self._take_back(tags))

    async def _take_back(self, tags: list[str]) -> None:
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        async with self._memory:
            wanted = [tag for tag in tags if tag in self._released]
            if "weights" in wanted:
                await self._relabel(None)
            if wanted:
                manager, asked = self.process.manager, ResumeMemoryOccupationReqInput(tags=_sglang_tags(wanted))
                await manager.resume_memory_occupation(asked)
                self._released.difference_update(wanted)


def _sglang_tags(tags: list[str]) -> list[str]:
    """SGLang's tags. Its graphs hold the addresses of the weights, so they are released and resumed together."""
    return [*tags, "cuda_graph"] if "weights" in tags else tags


def _device(asked: str) -> str:
    import torch

    if asked == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = asked.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdecimal()):
        raise InvalidRequest(f"unknown device {asked[:64]}", field="device", fix="cpu, cuda or cuda:0")
    return asked
