"""Runs a worker process: the engine loop on the main thread, the NATS loop on a second one, signals and exit codes.

The engine has the main thread because real engines install signal handlers and start children there.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import platform
import secrets
import signal
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from rl_plane._util.plugins import ENGINES, plugins
from rl_plane._util.processes import exit_within, spare_collector
from rl_plane._util.tasks import end_tasks, on_daemon_thread
from rl_plane.bus.connection import SERVICE_CONNECT_S, Bus
from rl_plane.errors import EngineDied, EngineFailed, InvalidRequest, PlaneError, Unsupported
from rl_plane.membership.core import PARSES_CALLS
from rl_plane.protocol.subjects import Subjects, check_instance_id
from rl_plane.protocol.transport_traits import known_transports
from rl_plane.weights.allowed_urls import Allowed
from worker import exit_codes
from worker.engines.base import EngineAdapter, EngineInfo, EngineOptions
from worker.engines.capabilities import CanPool, with_missing
from worker.engines.common.token_checks import lacking_fields
from worker.metrics.metrics_listener import MetricsListener, open_metrics_port
from worker.nodes.facts import node_facts
from worker.nodes.follower_link import FollowerLink
from worker.nodes.head_link import HeadLink
from worker.nodes.node_link import NodeLink, NodePlace
from worker.nodes.node_process import NodeProcess
from worker.nodes.node_settings import NodeSettings
from worker.nodes.spans_hosts import SpansHosts
from worker.receive.receives_weights import ReceivesWeights
from worker.receive.staging import model_digest
from worker.runtime.engine_args import EngineArguments
from worker.runtime.engine_loop import EngineLoop
from worker.runtime.start_notices import StartNotices
from worker.worker import LIVENESS_INTERVAL_S, Worker
from worker.worker_options import WorkerOptions

log = logging.getLogger("worker.process")

MAX_COPIES = 4096


def _load_engine(name: str) -> Any:
    """Imports an engine, and returns the function that builds its adapter."""
    known = plugins(ENGINES)
    if name not in known:
        raise InvalidRequest(
            f"no engine is called {name!r}", field="engine", fix=f"installed are {', '.join(sorted(known))}"
        )
    return known[name].load()


def check_options(options: WorkerOptions) -> None:
    """InvalidRequest for options that are wrong whatever the engine."""
    Subjects(options.namespace, options.component)
    if options.instance_id is not None:
        check_instance_id("instance_id", options.instance_id)
    if options.copies != 1 and options.engine != "fake":
        raise InvalidRequest("only the fake engine can be copied", field="copies", fix="leave it out")
    if not 1 <= options.copies <= MAX_COPIES or (options.copies > 1 and options.instance_id is not None):
        raise InvalidRequest(
            f"copies is {options.copies}", field="copies", fix=f"1 to {MAX_COPIES}; above 1 without an instance id"
        )
    if options.metrics_port is not None and (options.copies > 1 or options.nodes.rank):
        raise InvalidRequest(
            "metrics are of one worker",
            field="metrics_port",
            fix="leave it out beside copies, and give it to the head of several nodes (node_rank 0) alone",
        )
    options.nodes.check()
    if options.task != "generate" and options.nodes.count > 1:
        raise InvalidRequest(
            "an engine that spans hosts serves no pooling model", field="nnodes", fix="leave it out with this task"
        )
    if options.copies > 1 and options.nodes.count > 1:
        raise InvalidRequest("copies and nnodes are both given", field="copies", fix="leave one out")
    of_key = options.credentials.load().instance_id
    if of_key is not None and (options.copies > 1 or options.instance_id not in (None, of_key)):
        raise InvalidRequest(
            f"the key {options.credentials.nkey} belongs to the worker {of_key}",
            field="instance_id",
            fix="leave the instance id and the copies out, or use another key",
        )
    for field, path in (("model", options.model), *(("weight_root", root) for root in options.weight_roots)):
        if not path.is_dir():
            raise InvalidRequest(f"{path} is no directory", field=field, fix="give a directory that exists")
    Allowed.of(options.weight_urls)


def run(options: WorkerOptions, on_ready: Callable[[list[str]], None] | None = None) -> int:
    """Runs until SIGTERM, SIGINT or the engine's death. Returns the exit code. `on_ready` gets the instance ids."""
    check_options(options)
    known_transports()  # imports what packages state of their transports, and would block the loop that serves NATS
    ready = on_ready or (lambda _: None)
    with contextlib.ExitStack() as sockets:
        # It comes first: an engine may take minutes to load, and then a port in use would be a late error.
        metrics = None
        if options.metrics_port is not None:
            metrics = open_metrics_port(options.metrics_host, options.metrics_port, options.metrics_key)
            sockets.enter_context(metrics)
        try:
            return asyncio.run(
                _engine_side(options, ready, metrics) if options.nodes.rank == 0 else _node_side(options, ready)
            )
        finally:
            gc.freeze()  # without it, the collector searches all that an engine imports at the exit, for seconds


async def _engine_side(
    options: WorkerOptions, on_ready: Callable[[list[str]], None], metrics: socket.socket | None
) -> int:
    arguments = EngineArguments(options.engine_args, options.engine_args_file)
    instance_ids = [_instance_id(options) for _ in range(options.copies)]
    notices = StartNotices(
        options.nats_url,
        Subjects(options.namespace, options.component),
        instance_ids[0],
        options.engine,
        options.credentials,
    )
    notices.begin()
    try:
        return await _with_notices(options, arguments, instance_ids, on_ready, metrics, notices)
    finally:
        notices.end()


def checked_engine(adapter: object) -> EngineAdapter:
    """Returns an engine that a package has built. Python finds its missing methods only if it is an EngineAdapter."""
    if not isinstance(adapter, EngineAdapter):
        name = type(adapter).__name__
        raise InvalidRequest(
            f"the engine's class {name} is no EngineAdapter", field="engine", fix=f"class {name}(…, EngineAdapter)"
        )
    return adapter


def check_receiver(adapter: EngineAdapter) -> None:
    """Refuses an engine that has started without a receiver of weights: each update would fail."""
    if not isinstance(getattr(adapter, "receiver", None), ReceivesWeights):
        raise InvalidRequest(
            f"the engine's class {type(adapter).__name__} has no receiver of weights",
            field="engine",
            fix="set self.receiver in `start`, or derive from WeightsInRanks",
        )


async def _with_notices(
    options: WorkerOptions,
    arguments: EngineArguments,
    instance_ids: list[str],
    on_ready: Callable[[list[str]], None],
    metrics: socket.socket | None,
    notices: StartNotices,
) -> int:
    notices.phase(f"importing the engine {options.engine}")
    build = _load_engine(options.engine)
    nodes = HeadLink(*_link_of(options, arguments)) if options.nodes.count > 1 else None
    weights = _weights_at(options.model)
    with _telling_nodes(nodes), arguments.named():
        adapters: list[EngineAdapter] = [
            checked_engine(build(_engine_options(options, arguments, nodes))) for _ in range(options.copies)
        ]
        if nodes is not None:
            _spanning(options, adapters[0])
    if options.task != "generate" and not all(isinstance(adapter, CanPool) for adapter in adapters):
        raise Unsupported(
            f"the engine {options.engine} serves models that generate, and no pooling models",
            field="task",
            fix="leave it out, or use hf, vllm or sglang",
        )
    process = WorkerProcess(options, EngineLoop(), on_ready, instance_ids, nodes, metrics)
    loop = asyncio.get_running_loop()
    why, code = "its worker failed", exit_codes.ERROR
    try:
        if nodes is not None:
            notices.phase("waiting for the engine's other hosts")
            await asyncio.to_thread(nodes.start)
            await asyncio.to_thread(nodes.gather)
            # A rank that waits for another host's ranks may block this process for long.
            nodes.on_lost(lambda why: exit_within(exit_codes.EXIT_MARGIN_S, exit_codes.ENGINE_DEAD))
        notices.phase("loading the model")
        with arguments.named():
            infos = [with_missing(adapter, await adapter.start()) for adapter in adapters]
        for adapter, info in zip(adapters, infos, strict=True):
            _check_logprobs_mode(options, info)
            if info.pipeline_stage is None:
                check_receiver(adapter)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, process.told_to_end)
        engines = any(info.pipeline_stage is None for info in infos)
        tied = {name: of for info in infos for name, of in info.tied.items()}
        notices.phase("hashing the model's files")
        digest = await _digest_of(options.model, tied, adapters) if engines else ""
        if nodes is not None:
            await asyncio.to_thread(nodes.check_digests, tied, digest)
        if engines and _weights_at(options.model) != weights:
            code = process.model_changed()
        else:
            notices.end()
            code = await process.serve(adapters, infos, digest)
        why = f"its worker ended with exit code {code}"
        return code
    except EngineDied as error:
        why, code = error.message, process.engine_died(error)
        return code
    except PlaneError as error:
        why = error.message
        if isinstance(error, InvalidRequest):
            code = exit_codes.WRONG_SETTING
        raise
    finally:
        if nodes is not None:
            await asyncio.to_thread(nodes.tell_end, why, code)
        for adapter in adapters:
            await adapter.close()
        if nodes is not None:
            await asyncio.to_thread(nodes.close)


def _check_logprobs_mode(options: WorkerOptions, info: EngineInfo) -> None:
    """Refuses a mode that the engine does not know and has ignored: trainers would compute with other logprobs."""
    if info.logprobs_mode != options.logprobs_mode:
        raise Unsupported(
            f"the engine {options.engine} gives {info.logprobs_mode} with this model, not {options.logprobs_mode}",
            field="logprobs_mode",
            fix="leave it out, or use hf, vllm or sglang with a model that generates",
        )


@contextlib.contextmanager
def _telling_nodes(link: NodeLink | None) -> Iterator[None]:
    """Tells the other nodes when the engine refuses this node's settings: they would wait for it. It blocks the loop,
    on which nothing runs yet."""
    try:
        yield
    except PlaneError as error:
        if link is not None:
            link.tell_refusal(error)
        raise


def _engine_options(options: WorkerOptions, arguments: EngineArguments, nodes: NodeLink | None) -> EngineOptions:
    return EngineOptions(
        options.model,
        options.dtype,
        options.device,
        arguments.texts,
        options.weight_roots,
        options.nats_url,
        options.namespace,
        options.component,
        options.deterministic,
        options.enable_memory_saver,
        options.credentials,
        options.weight_urls,
        nodes,
        options.task,
        options.logprobs_mode,
    )


def _link_of(
    options: WorkerOptions, arguments: EngineArguments
) -> tuple[NodePlace, NodeSettings, float, dict[str, Any]]:
    """Returns what the link of any node needs: its place in NATS, its settings, and the facts that all share."""
    subjects = Subjects(options.namespace, options.component)
    place = NodePlace(options.nats_url, subjects, _instance_id(options), options.credentials)
    shared = {
        "nnodes": options.nodes.count,
        "dist_init_addr": options.nodes.address,
        "dtype": options.dtype,
        "task": options.task,
        "logprobs_mode": options.logprobs_mode,
        "the kind of device": options.device.partition(":")[0],
        "deterministic": options.deterministic,
        "enable_memory_saver": options.enable_memory_saver,
        **{f"engine_arg {key}": text for key, text in sorted(arguments.texts.items())},
    }
    facts = node_facts(options.engine, options.model, shared)
    return place, options.nodes, options.engine_hang_s, facts


def _instance_id(options: WorkerOptions) -> str:
    """A key that belongs to one worker names its instance id."""
    given = options.instance_id or options.credentials.load().instance_id
    if given is not None:
        return given
    if options.nodes.count > 1:
        return options.nodes.instance_id(Subjects(options.namespace, options.component))
    return secrets.token_hex(8)


def _spanning(options: WorkerOptions, adapter: EngineAdapter) -> SpansHosts:
    if not isinstance(adapter, SpansHosts):
        raise Unsupported(
            f"the engine {options.engine} runs on one host",
            field="nnodes",
            fix="leave it out, or use vllm or sglang",
        )
    return adapter


async def _node_side(options: WorkerOptions, on_ready: Callable[[list[str]], None]) -> int:
    """Runs a node that is not the head: its part of the engine, and the answers to the head."""
    arguments = EngineArguments(options.engine_args, options.engine_args_file)
    build = _load_engine(options.engine)
    weights = _weights_at(options.model)

    def digest(tied: Mapping[str, str]) -> str:
        found = model_digest(options.model, tied=tied)
        if _weights_at(options.model) != weights:
            raise EngineFailed("the model's files changed while the engine loaded them: start all nodes again")
        return found

    link = FollowerLink(*_link_of(options, arguments), digest)
    with _telling_nodes(link), arguments.named():
        adapter = _spanning(options, checked_engine(build(_engine_options(options, arguments, link))))
    assert isinstance(adapter, EngineAdapter)
    try:
        await asyncio.to_thread(link.start)
        await asyncio.to_thread(link.join)
        return await NodeProcess(link, adapter).run(lambda: on_ready([link.instance_id]))
    finally:
        await adapter.close()
        await asyncio.to_thread(link.close)


def _weights_at(model: Path) -> tuple[Path, list[tuple[str, tuple[int, ...]]]]:
    """Returns the identity of the weight files. If it is the same before and after the start, the engine has loaded
    what was hashed. To hash a large model a second time would take minutes."""
    real = model.resolve()
    return real, [(file.name, _identity(file)) for file in sorted(real.glob("*.safetensors*"))]


def _identity(file: Path) -> tuple[int, ...]:
    try:
        status = file.stat()
    except OSError:  # the file is gone, or its reader reports the error
        return ()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


async def _digest_of(model: Path, tied: Mapping[str, str], adapters: Iterable[EngineAdapter]) -> str:
    """Hashes the model's files, which takes minutes for a large model. EngineDied if an engine dies meanwhile.

    InvalidWeights if the engine ties tensors that differ in the files: it would serve other weights than the digest
    says."""
    hashing = on_daemon_thread(lambda: model_digest(model, tied=tied), "digest")
    living = asyncio.create_task(_until_one_dies(adapters))
    first: set[asyncio.Future[Any]] = {hashing, living}
    try:
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        return hashing.result() if hashing.done() else await living
    finally:
        await end_tasks([living])


async def _until_one_dies(adapters: Iterable[EngineAdapter]) -> NoReturn:
    """Raises EngineDied when an engine dies. It leaves an engine that hangs to the worker's engine watch."""
    while True:
        for adapter in adapters:
            try:
                await adapter.liveness()
            except EngineFailed as error:
                raise EngineDied(error.message) from error
            except TimeoutError:
                continue  # it hangs
        await asyncio.sleep(LIVENESS_INTERVAL_S)


class WorkerProcess:
    """Runs the NATS loop on the second thread, with one connection and one Worker for each adapter."""

    def __init__(
        self,
        options: WorkerOptions,
        engine: EngineLoop,
        on_ready: Callable[[list[str]], None],
        instance_ids: list[str],
        nodes: HeadLink | None = None,
        metrics: socket.socket | None = None,
    ) -> None:
        """`instance_ids`: one for each adapter. `metrics`: the socket at which the metrics are served."""
        self._options = options
        self._engine = engine
        self._instance_ids = instance_ids
        self._nodes = nodes
        self._metrics = metrics
        self._on_ready = on_ready
        self._end_wanted = threading.Event()
        self._wake: Callable[[], None] = lambda: None
        self._exit_code = exit_codes.OK

    def told_to_end(self) -> None:
        """Ends the process on a signal."""
        exit_within(self._options.drain_s + exit_codes.EXIT_MARGIN_S)
        self.end()

    def end(self) -> None:
        """Makes the workers drain and leave. Any thread may call it."""
        self._end_wanted.set()
        with contextlib.suppress(RuntimeError):  # the NATS loop has ended already
            self._wake()

    def _failed(self, why: str, exit_code: int) -> None:
        log.error("%s", why)
        self._exit_code = exit_code
        exit_within(exit_codes.EXIT_MARGIN_S, exit_code)  # to close an engine that hangs may take for ever
        self.end()

    def engine_died(self, error: EngineDied) -> int:
        """Ends the process because an engine died at the start. Returns the exit code."""
        self._failed(f"the engine is dead: {error.message}", exit_codes.ENGINE_DEAD)
        return self._exit_code

    def model_changed(self) -> int:
        """Ends the process because the model changed during the start. Returns the exit code."""
        self._failed(
            f"the weights at {self._options.model} changed while the engine loaded them: start the worker again, best "
            "with a directory that does not change (--model)",
            exit_codes.MODEL_CHANGED,
        )
        return self._exit_code

    async def serve(self, adapters: list[EngineAdapter], infos: list[EngineInfo], digest: str) -> int:
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        here = asyncio.get_running_loop()

        def nats_thread() -> None:
            try:
                asyncio.run(self._nats_side(adapters, infos, digest))
                here.call_soon_threadsafe(ended.set_result, None)
            except BaseException as error:
                here.call_soon_threadsafe(ended.set_exception, error)

        thread = threading.Thread(target=nats_thread, name="nats")
        thread.start()
        try:
            await ended
        finally:
            self.end()
            thread.join()
        return self._exit_code

    async def _nats_side(self, adapters: list[EngineAdapter], infos: list[EngineInfo], digest: str) -> None:
        loop = asyncio.get_running_loop()
        end = asyncio.Event()

        def wake() -> None:
            loop.call_soon_threadsafe(end.set)

        self._wake = wake
        workers: list[Worker] = []
        listener: MetricsListener | None = None
        try:
            for adapter, info, instance_id in zip(adapters, infos, self._instance_ids, strict=True):
                if self._end_wanted.is_set():
                    return
                workers.append(await self._worker(adapter, info, digest, instance_id))
                listener = await self._serve_metrics(workers[-1])
                starting = asyncio.create_task(workers[-1].start())
                ending = asyncio.create_task(end.wait())
                # A worker that heals may take long to start. It must end at once on a signal.
                await asyncio.wait({starting, ending}, return_when=asyncio.FIRST_COMPLETED)
                await end_tasks([ending])
                if not starting.done():
                    await end_tasks([starting])
                    return
                try:
                    await starting
                except PlaneError as error:
                    if isinstance(error, EngineDied):
                        self.engine_died(error)
                    elif self._exit_code == exit_codes.OK:  # otherwise the engine watch has set the exit code
                        raise
                    return
            spare_collector()
            self._on_ready([worker.state.instance_id for worker in workers])
            if not self._end_wanted.is_set():
                await end.wait()
            if self._exit_code == exit_codes.OK:
                await asyncio.gather(*(worker.drain(self._options.drain_s, "leaving") for worker in workers))
        finally:
            if listener is not None:
                listener.close()
            await asyncio.gather(*(worker.stop() for worker in workers))

    async def _serve_metrics(self, worker: Worker) -> MetricsListener | None:
        if self._metrics is None:
            return None
        from worker.metrics.worker_metrics import WorkerMetrics  # the engine is loaded now

        listener = MetricsListener(
            self._metrics, WorkerMetrics(worker).text_for_scraper, self._options.metrics_key
        )
        await listener.start()
        return listener

    async def _worker(self, adapter: EngineAdapter, info: EngineInfo, digest: str, instance_id: str) -> Worker:
        options = self._options
        bus = await Bus.connect(options.nats_url, instance_id, SERVICE_CONNECT_S, options.credentials)
        return Worker(
            bus,
            Subjects(options.namespace, options.component),
            adapter,
            self._engine,
            info,
            member_info={
                "engine": info.engine,
                "engine_version": info.engine_version,
                "model": options.model_name or info.model,
                "model_path": str(options.model.resolve()),
                "host": platform.node(),
                "pid": os.getpid(),
                "world_size": info.world_size if info.pipeline_stage is None else 0,  # trainers sum it
                "max_model_len": info.max_model_len,
                "transports": list(info.transports),
                "refused_fields": lacking_fields(info.lacks),
                "logprobs_mode": info.logprobs_mode,
                "max_prompt_top_logprobs": info.max_prompt_top_logprobs,
                "kv_tokens": info.kv_tokens,
                PARSES_CALLS: "parse_tool_calls" not in info.lacks,
                "task": options.task,
                "dimension": info.dimension,
                "labels": list(info.labels),
                **({} if info.pipeline_stage is None else {"pipeline_stage": info.pipeline_stage}),
                "witnesses": info.witnesses,
                **({} if self._nodes is None else {"nodes": self._nodes.rows()}),
            },
            model_digest=digest,
            engine_hang_s=options.engine_hang_s,
            liveness_timeout_s=options.liveness_timeout_s,
            weight_roots=options.weight_roots,
            on_end=self._failed,
        )
