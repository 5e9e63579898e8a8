"""vLLM's AsyncLLM and its processes: how they start, answer and end."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
from collections.abc import Coroutine, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from rl_plane.errors import EngineDied, EngineFailed, PlaneError
from worker.engines.base import EngineOptions
from worker.engines.common.engine_process import EngineProcess
from worker.engines.vllm.args import check_draft, check_experts, completed, thread_binding
from worker.engines.vllm.here import MARK, Here
from worker.engines.vllm.logits import COUNT, RAISE, end_by_count
from worker.engines.vllm.plugin import take_temperatures_as_they_are
from worker.engines.vllm.pooled_names import name_pooled
from worker.nodes.head_link import HeadLink
from worker.nodes.node_settings import NodeSettings
from worker.receive.rank_agents.agent_server import belong_to_worker
from worker.receive.rank_agents.ranks import check_rows

T = TypeVar("T")

log = logging.getLogger("worker.engines.vllm.processes")

_LOGGING = {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_LOGGING_STREAM": "ext://sys.stderr"}


def quieten() -> None:
    """Sets vLLM's log level. Call it before vLLM is imported."""
    for name, value in _LOGGING.items():
        os.environ.setdefault(name, value)


class VllmProcess(EngineProcess):
    name = "vLLM"
    vital = "VLLM::"

    def __init__(self, options: EngineOptions, arguments: dict[str, Any]) -> None:
        super().__init__(options, arguments)
        self._parallel: Any = None
        """vLLM's parallel config, also of a node that is not the head."""

    @property
    def llm(self) -> Any:
        """vLLM's AsyncLLM. Raises EngineDied once it is dead."""
        return self.engine

    @property
    def replicas(self) -> int:
        """The number of replicas of data parallelism."""
        return int(self._parallel.data_parallel_size)

    @property
    def config(self) -> Any:
        """vLLM's own config."""
        return self.llm.vllm_config

    async def ask(self, work: Coroutine[Any, Any, T]) -> T:
        """Returns the engine's answer, or raises EngineDied if the engine dies meanwhile and would never answer."""
        dead = self._dead
        assert dead is not None, "it is running"
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait([task, dead], return_when=asyncio.FIRST_COMPLETED)  # type: ignore[type-var]
        finally:
            task.cancel()
        if not task.done() or task.cancelled():
            raise self._reason()
        try:
            return await task
        except Exception as error:
            raise self.translated(error) from error

    def translated(self, error: Exception) -> PlaneError:
        from vllm.v1.engine.exceptions import EngineDeadError

        if isinstance(error, PlaneError):
            return error
        if isinstance(error, EngineDeadError):
            self._fail("vLLM says that it is dead")
        if self._dead is not None and self._dead.done():
            return self._reason()
        return EngineFailed(f"{type(error).__name__}: {error}")

    async def on_cores(self, method: str, *arguments: Any) -> list[Any]:
        """Runs a method of vLLM's EngineCore in each replica. Returns one answer per replica, in order: vLLM's own
        calls return the first replica's answer only."""
        return await self.ask(self.llm.engine_core.call_utility_all_async(method, *arguments))

    async def on_ranks(self, method: str, *arguments: Any) -> list[dict[str, Any]]:
        """Runs a method on vLLM's own thread in each rank, to its end in all of them. Returns a row per rank. Raises
        what a rank raised; the error's `rank_results` says which."""
        outcomes = await self.on_cores("collective_rpc", method, None, arguments, None)
        rows = [{"rank": rank, **outcome} for rank, outcome in enumerate(itertools.chain(*outcomes))]
        check_rows(rows)
        return rows

    async def end(self) -> None:
        self._die("the engine was closed")
        engine, self._engine = self._engine, None
        if engine is not None:
            try:
                await asyncio.to_thread(engine.shutdown, *([0] if self._is_head else []))
            except Exception:  # such as one about a process that ends meanwhile
                log.exception("vLLM's own shutdown has failed; its processes are killed now")
        await self._end_processes()

    # building

    def _build(self, directory: Path) -> None:
        from vllm import AsyncEngineArgs
        from vllm.config import StructuredOutputsConfig
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM
        from vllm.v1.engine.coordinator import DPCoordinatorProc

        on_cpu = current_platform.is_cpu()
        arguments = completed(self.arguments, on_cpu)
        # vLLM's own is auto: the first request with a form of the text chooses the library for all later ones.
        arguments.setdefault("structured_outputs_config", StructuredOutputsConfig(backend="xgrammar"))
        nodes = self.options.nodes.settings if self.options.nodes is not None else NodeSettings()
        replicas = int(arguments.get("data_parallel_size", 1))
        ranks = int(arguments.get("tensor_parallel_size", 1)) * int(arguments.get("pipeline_parallel_size", 1))
        ranks = ranks * replicas // nodes.count
        binding = thread_binding(ranks) if on_cpu else None
        eager = on_cpu and arguments["enforce_eager"]
        take_temperatures_as_they_are()  # also here, where requests are made
        if nodes.count > 1:
            host, port = nodes.host_and_port()
            arguments |= {
                "nnodes": nodes.count,
                "node_rank": nodes.rank,
                "master_addr": host,
                "master_port": port,
            }
        given = AsyncEngineArgs(
            model=str(self.options.model),
            dtype=self.options.dtype or _model_dtype(self.options.model),
            worker_extension_cls="worker.engines.vllm.rank.RankExtension",
            distributed_executor_backend="mp",
            **{"disable_log_stats": True} | arguments,
        )
        _check_model(given, replicas)
        if replicas > 1:
            DPCoordinatorProc.run_coordinator = run_coordinator
        here = Here(os.getpid(), str(self.options.model.absolute()), str(directory), nodes.rank * ranks)
        with environment(here, binding, self.options.deterministic, eager):
            if self._is_head:
                self._engine = AsyncLLM.from_engine_args(given)
                self._parallel = self._engine.vllm_config.parallel_config
                end_by_count(self._engine)
                name_pooled(self._engine)
            else:
                from vllm.v1.executor.multiproc_executor import MultiprocExecutor

                config = given.create_engine_config(headless=True)
                self._parallel = config.parallel_config
                self._engine = MultiprocExecutor(config, monitor_workers=False)

    @property
    def _is_head(self) -> bool:
        return self.options.nodes is None or self.options.nodes.settings.rank == 0

    async def _start_agents(self, directory: Path) -> None:
        if isinstance(self.options.nodes, HeadLink):
            await asyncio.to_thread(self.options.nodes.wait_built)
        await self.on_ranks("rl_plane_start")
        await super()._start_agents(directory)

    def _local_ranks(self) -> range:
        if self.replicas > 1:
            return range(int(self._parallel.world_size) * self.replicas)
        count = int(self._parallel.local_world_size)
        return range(count * self._parallel.node_rank_within_dp, count * (self._parallel.node_rank_within_dp + 1))

    def _tell_readers(self, error: EngineDied) -> None:
        if self._engine is not None and self._is_head:
            from vllm.v1.engine.exceptions import EngineDeadError

            self._engine.output_processor.propagate_error(EngineDeadError())


def run_coordinator(**how: Any) -> None:
    """The process that tells the replicas of each other. It loads no plugin of vLLM, so it would outlive a worker that
    is killed."""
    from vllm.v1.engine.coordinator import DPCoordinatorProc

    belong_to_worker()
    DPCoordinatorProc.run_coordinator(**how)


def _check_model(given: Any, replicas: int) -> None:
    """Refuses a model that brings a draft model, or that replicas can't serve, before any process starts. vLLM knows
    the model once it has made its config, inside `from_engine_args`."""
    make = given.create_engine_config

    def checked(*arguments: Any, **more: Any) -> Any:
        config = make(*arguments, **more)
        check_draft(config)
        check_experts(replicas, bool(config.model_config.is_moe))
        return config

    given.create_engine_config = checked


def _model_dtype(model: Path) -> str:
    """The checkpoint's dtype: vLLM would replace float32 by a smaller one."""
    from transformers import AutoConfig

    dtype = AutoConfig.from_pretrained(model, local_files_only=True).get_text_config().dtype
    return str(dtype).removeprefix("torch.") if dtype is not None else "auto"


@contextlib.contextmanager
def environment(here: Here, binding: str | None, deterministic: bool, eager: bool) -> Iterator[None]:
    """Sets the environment of vLLM's processes. `eager`: nothing is compiled."""
    kept = dict(os.environ)
    os.environ[MARK] = json.dumps(asdict(here))
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # this process has threads
    os.environ.pop("VLLM_ALLOW_INSECURE_SERIALIZATION", None)  # it would unpickle what comes
    os.environ[COUNT] = "1"
    os.environ.pop(RAISE, None)
    if deterministic:  # whatever else this process was given: `describe` says so
        os.environ["VLLM_BATCH_INVARIANT"] = "1"
    for name, value in (
        ("VLLM_NO_USAGE_STATS", "1"),
        ("HF_HUB_OFFLINE", "1"),
        ("VLLM_RPC_BASE_PATH", here.directory),
        ("VLLM_CPU_OMP_THREADS_BIND", binding),
        # Else its sampler is compiled with the first request for logprobs: all wait for a quarter of a minute.
        ("TORCHDYNAMO_DISABLE", "1" if eager else None),
    ):
        if value is not None:
            os.environ.setdefault(name, value)
    plugins = os.environ.get("VLLM_PLUGINS")
    if plugins is not None:
        os.environ["VLLM_PLUGINS"] = f"{plugins},rl_plane"
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(kept)
