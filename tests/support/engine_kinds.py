"""Describes `vllm` and `sglang` for tests of both: how they differ, and how a test makes each of them fail."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import psutil
import pytest

from rl_plane.errors import EngineFailed
from worker.engines.base import EngineInfo, EngineOptions
from worker.engines.common.rank_engine import RankEngine
from worker.engines.sglang import adapter as sglang
from worker.engines.sglang.streams import SglangStream
from worker.engines.vllm import adapter as vllm
from worker.engines.vllm import processes as vllm_process
from worker.engines.vllm.here import Here


@dataclass(frozen=True)
class Failure:
    """A failure that a test builds into the engine, and the error that follows."""

    owner: Any
    name: str
    broken: Callable[..., Any]
    why: str
    unreachable: Callable[[], set[str]] = set
    """Adapters that the engine has after it, and no request can name."""

    @contextlib.contextmanager
    def happening(self) -> Iterator[None]:
        """Builds the failure in. The engine works again afterwards."""
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(self.owner, self.name, self.broken)
            yield


BATCH_TOKENS = 64
"""A longer prompt is computed in parts."""

Failures = dict[Literal["load", "swap", "unload"], list[Failure]]
"""The failures of each change of an adapter: `load` beside `x`, which is there already; `swap` and `unload` of `x`."""


@dataclass(frozen=True)
class Kind:
    name: str
    build: Callable[[EngineOptions], OffersMemory]
    arguments: dict[str, str]
    bad_arguments: dict[str, str]
    processes: str
    """The begin of the names of its processes."""
    ranks: str
    """The begin of the names of the processes that have the model."""
    max_model_len: int
    adapts_head: bool
    """Takes an adapter of `lm_head`."""
    lacks: frozenset[str]
    """Fields of a request that it refuses."""
    places: int | None
    """The number of adapters that it takes. None: more than a test loads."""
    slow_submission: Callable[[Any, pytest.MonkeyPatch, asyncio.Event, asyncio.Event], None]
    """(engine, …, waits, go): from now on requests wait for `go` on their way into the engine."""
    failures: Callable[[Any], Failures]
    no_modes: dict[str, str]
    """Arguments that speak against both modes for GPUs."""
    cached_tokens: Callable[[pytest.MonkeyPatch], list[int]]
    """Returns a list that grows with each request that ends: the tokens of its prompt that the engine found in its
    cache."""
    modes: Callable[[EngineOptions], tuple[bool, bool]]
    """Returns whether an engine of these options is built to be deterministic, and to release memory."""

    def options(self, model: Path, **extra: str) -> EngineOptions:
        """Weights may be read from beside the model."""
        return EngineOptions(model, device="cpu", extra=self.arguments | extra, weight_roots=(model.parent,))

    def pids(self, engine: Any) -> list[int]:
        found: list[int] = engine.process.pids()
        return found

    def rank_pids(self, engine: Any) -> list[int]:
        return [pid for pid in self.pids(engine) if psutil.Process(pid).name().startswith(self.ranks)]

    def directory(self, engine: Any) -> Path:
        found: Path = engine.process.directory
        return found

    def children(self) -> set[int]:
        """The engine's processes that this process has started."""
        every = psutil.Process().children(recursive=True)
        return {child.pid for child in every if child.name().startswith(self.processes)}


class OffersMemory(RankEngine[Any]):
    """An engine on a CPU. While `offers_memory` is set, it takes calls that release memory. They do everything but free
    memory."""

    offers_memory = False

    @property
    def info(self) -> EngineInfo:
        info = super().info
        if not self.offers_memory:
            return info
        refused = ("release_memory", "resume_memory")
        return replace(info, lacks={op: why for op, why in info.lacks.items() if op not in refused})


class OfferingVllm(OffersMemory, vllm.VllmEngine):
    """The `vllm` engine of these tests."""


class OfferingSglang(OffersMemory, sglang.SglangEngine):
    """The `sglang` engine of these tests."""


def _slow_vllm(engine: Any, monkeypatch: pytest.MonkeyPatch, waits: asyncio.Event, go: asyncio.Event) -> None:
    really = engine.process.llm.add_request

    async def slow(*arguments: Any, **more: Any) -> Any:
        waits.set()
        await go.wait()
        return await really(*arguments, **more)

    monkeypatch.setattr(engine.process.llm, "add_request", slow)


def _slow_sglang(engine: Any, monkeypatch: pytest.MonkeyPatch, waits: asyncio.Event, go: asyncio.Event) -> None:
    manager = engine.process.manager
    really = manager.generate_request

    async def slow(*arguments: Any) -> AsyncIterator[Any]:
        waits.set()
        await go.wait()
        async for out in really(*arguments):
            yield out

    monkeypatch.setattr(manager, "generate_request", slow)


def _failures_of_vllm(engine: Any) -> Failures:
    process, llm = engine.process, engine.process.llm
    really, lost = process.on_ranks, list[str]()

    async def no_flush(**_: Any) -> bool:
        raise RuntimeError("no flush")

    async def lost_file(method: str, *arguments: Any) -> Any:
        if method == "rl_plane_add_lora" and not lost:
            lost.append(arguments[1])
            os.unlink(process.directory / arguments[1] / "adapter_model.safetensors")
        return await really(method, *arguments)

    async def not_there(method: str, *arguments: Any) -> Any:
        return await really(method, *([99] if method == "rl_plane_remove_lora" else arguments))

    async def no_removal(method: str, *arguments: Any) -> Any:
        rows = await really(method, *arguments)
        if method == "rl_plane_remove_lora":  # of one rank, as when another one fails
            raise EngineFailed("no removal")
        return rows

    async def no_name(name: str) -> None:
        raise RuntimeError("no name")

    flush, name = (
        Failure(llm, "reset_prefix_cache", no_flush, "no flush"),
        Failure(llm, "update_weight_version", no_name, "no name"),
    )
    put = [flush, name, Failure(process, "on_ranks", lost_file, "adapter")]
    away = [
        Failure(process, "on_ranks", not_there, "none of this number"),
        Failure(process, "on_ranks", no_removal, "no removal"),
    ]
    return {"load": put, "swap": put, "unload": [flush, *away]}


def _failures_of_sglang(engine: Any) -> Failures:
    process = engine.process
    really = process.call

    def once(what: str, done: bool) -> Failure:
        """`done`: what fails has happened in this rank, as when another one's fails."""
        left, put = [what], set[str]()

        async def call(op: str, **arguments: str) -> None:
            fails = op in left
            if fails:
                left.remove(op)
            if done or not fails:
                await really(op, **arguments)
                if op == "put_adapter":
                    put.add(arguments["lora_id"])
                else:
                    put.discard(arguments["lora_id"])
            if fails:
                raise EngineFailed(f"no {op}")

        return Failure(process, "call", call, f"no {what}", put.copy)

    return {
        "load": [once("put_adapter", done=True)],
        "swap": [once("put_adapter", done=True), *(once("remove_adapter", done) for done in (False, True))],
        "unload": [once("remove_adapter", done) for done in (False, True)],
    }


def _modes_of_vllm(options: EngineOptions) -> tuple[bool, bool]:
    from vllm.platforms import current_platform

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(current_platform), "is_cpu", lambda _: False)  # the modes are for GPUs
        given = vllm.VllmEngine(options).process.arguments
    with vllm_process.environment(Here(0, "", "", 0), None, options.deterministic, False):
        return os.environ.get("VLLM_BATCH_INVARIANT") == "1", given.get("enable_sleep_mode", False)


def _modes_of_sglang(options: EngineOptions) -> tuple[bool, bool]:
    given = sglang.SglangEngine(options).process.arguments
    return given.get("enable_deterministic_inference", False), given.get("enable_memory_saver", False)


def _cached_by_vllm(patch: pytest.MonkeyPatch) -> list[int]:
    from vllm.v1.engine.output_processor import RequestOutputCollector

    found, put = [], RequestOutputCollector.put

    def seen(self: Any, output: Any) -> None:
        if output.finished:
            found.append(output.num_cached_tokens)
        put(self, output)

    patch.setattr(RequestOutputCollector, "put", seen)
    return found


def _cached_by_sglang(patch: pytest.MonkeyPatch) -> list[int]:
    found, take = [], SglangStream.take

    def seen(self: SglangStream, out: dict[str, Any], *more: Any) -> bool:
        if out["meta_info"]["finish_reason"] is not None:
            found.append(out["meta_info"]["cached_tokens"])
        return take(self, out, *more)

    patch.setattr(SglangStream, "take", seen)
    return found


VLLM = Kind(
    name="vllm",
    build=OfferingVllm,
    arguments={
        "kv_cache_memory_bytes": str(32 << 20),
        "max_model_len": "2048",
        "max_lora_rank": "64",
        "max_loras": "2",
        "max_num_batched_tokens": str(BATCH_TOKENS),
        "max_num_seqs": "64",
    },
    bad_arguments={
        "nonsense": "1",
        "max_model_len": "many",
        "enforce_eager": "perhaps",
        "worker_extension_cls": "x",
        "kv_transfer_config": '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}',
        "kv_offloading_backend": "lmcache",
        "enable_eplb": "true",
        "enable_elastic_ep": "true",
        "offload_group_size": "2",
        "offload_backend": "prefetch",
        "spec_method": "ngram",
        "spec_model": "/draft",
        "spec_tokens": "2",
        "lora_target_modules": "model.layers.0.self_attn.q_proj",
    },
    processes="VLLM::",
    ranks="VLLM::Worker",
    max_model_len=2048,
    adapts_head=True,
    lacks=frozenset({"routed_experts"}),
    places=2,
    slow_submission=_slow_vllm,
    failures=_failures_of_vllm,
    no_modes={"enable_sleep_mode": "false"},
    cached_tokens=_cached_by_vllm,
    modes=_modes_of_vllm,
)

SGLANG = Kind(
    name="sglang",
    build=OfferingSglang,
    arguments={"context_length": "2048", "max_lora_rank": "64", "chunked_prefill_size": str(BATCH_TOKENS)},
    bad_arguments={
        "nonsense": "1",
        "tp_size": "two",
        "disable_radix_cache": "perhaps",
        "attention_backend": "by_hand",
        "skip_tokenizer_init": "false",
        "hicache_storage_backend": "file",
        "enable_lmcache": "true",
        "enable_flexkv": "true",
        "enable_unified_cache_external_linker": "true",
        "radix_cache_backend": "flexkv",
        "weight_cache_mode": "client",
        "enable_paged_experts": "true",
        "kt_weight_path": "/experts",
        "offload_group_size": "2",
        "enable_eplb": "true",
        "ep_num_redundant_experts": "2",
        "init_expert_location": "random",
        "elastic_ep_backend": "mooncake",
        "quantize_and_serve": "true",
    },
    processes="sglang::",
    ranks="sglang::scheduler",
    max_model_len=2042,
    adapts_head=False,
    lacks=frozenset(
        {
            "min_tokens",
            "allowed_token_ids",
            "bad_words_token_ids",
            "min_p",
            "frequency_penalty",
            "presence_penalty",
            "repetition_penalty",
            "routed_experts",
        }
    ),
    places=None,
    slow_submission=_slow_sglang,
    failures=_failures_of_sglang,
    no_modes={"enable_deterministic_inference": "false", "enable_memory_saver": "false"},
    cached_tokens=_cached_by_sglang,
    modes=_modes_of_sglang,
)
