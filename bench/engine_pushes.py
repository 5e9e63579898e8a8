"""SGLang's own ways from a trainer's memory into an engine on a CPU, beside `WeightPublisher` into the same engine:
`update_weights_from_distributed` in a gloo group, and `update_weights_from_tensor`, plain and as one flattened bucket.

The handles of `update_weights_from_tensor` can be opened only by children of the process that made them. So all of it
is in one process and its children: the trainer, the worker, as `rl-plane worker` runs it, and SGLang's scheduler, which
has the model. That scheduler unpickles those handles, which this benchmark has made: it is SGLang's way, and stays
inside its engine. Nothing else here loads a pickle, and what the publisher sends has none.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, closing
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from bench.memory import trained
from rl_plane.bus.server import NatsServer
from rl_plane.publish import WeightPublisher
from worker.engines.base import EngineAdapter, EngineInfo
from worker.process import WorkerProcess
from worker.receive.staging import model_digest
from worker.runtime.engine_loop import EngineLoop
from worker.worker_options import WorkerOptions

HOST = "127.0.0.1"
GROUP = "own"
JOIN_S = 60.0

Weights = Mapping[str, Any]


async def measure_pushed(
    engine: Any, info: EngineInfo, model: Path, rounds: int
) -> dict[str, dict[str, list[float]]]:
    """SGLang's own way → seconds of each round: of its `own`, of our `update`, and for which generation was `held` in
    ours. `engine`: a SglangEngine that was started in this process."""
    weights = trained(model)
    manager = engine.process.manager
    found: dict[str, dict[str, list[float]]] = {way: {"update": [], "held": [], "own": []} for way in OWN}
    async with _publishers(engine, info, model, weights) as publishers, _group(manager) as group:
        for number in range(rounds + 1):
            for way, (backend, push) in OWN.items():
                for tensor in weights.values():
                    tensor.neg_()  # a step of the trainer's
                start = time.perf_counter()
                await push(manager, group, weights)
                own = time.perf_counter() - start
                loaded = None if number else await engine.check_weights("checksum")
                start = time.perf_counter()
                publication = await publishers[backend].publish_async(f"{way} {number}")
                update = time.perf_counter() - start
                if number:
                    (worker,) = publication.result()["workers"]
                    for what, seconds in (("own", own), ("update", update), ("held", worker["swap_s"])):
                        found[way][what].append(seconds)
                elif loaded != await engine.check_weights("checksum"):  # the first one makes buffers, too
                    raise SystemExit(f"{way} has not loaded the weights that were published after it")
    return found


# ---- ours ----


@asynccontextmanager
async def _publishers(
    engine: EngineAdapter, info: EngineInfo, model: Path, weights: Weights
) -> AsyncIterator[dict[str, WeightPublisher]]:
    """By backend, and a worker that serves the engine meanwhile."""
    server, namespace = NatsServer(), f"pushed{secrets.token_hex(2)}"
    await asyncio.to_thread(server.start)
    options = WorkerOptions("sglang", model, server.url, namespace, drain_s=0.0)
    worker = WorkerProcess(options, EngineLoop(), lambda _: None, [secrets.token_hex(8)])
    serving = asyncio.create_task(worker.serve([engine], [info], await asyncio.to_thread(model_digest, model)))
    made: dict[str, WeightPublisher] = {}
    try:
        for backend in {backend for backend, _ in OWN.values()}:
            made[backend] = await asyncio.to_thread(
                WeightPublisher, weights, server.url, namespace=namespace, transport=backend
            )
        yield made
    finally:
        for publisher in made.values():
            await asyncio.to_thread(publisher.close)
        worker.end()
        await serving
        await asyncio.to_thread(server.stop)


# ---- SGLang's own ----


@asynccontextmanager
async def _held(manager: Any) -> AsyncIterator[None]:
    """Pauses generation and opens a session until the block ends, because SGLang's updates from memory need both."""
    from sglang.srt.managers.io_struct import (
        BeginWeightUpdateReqInput,
        ContinueGenerationReqInput,
        EndWeightUpdateReqInput,
        PauseGenerationReqInput,
    )

    await manager.pause_generation(PauseGenerationReqInput(mode="retract"))
    _check(await manager.begin_weight_update(BeginWeightUpdateReqInput()))
    yield
    _check(await manager.end_weight_update(EndWeightUpdateReqInput()))
    await manager.continue_generation(ContinueGenerationReqInput())


async def _hand_over(manager: Any, group: Any, weights: Weights, load_format: str | None = None) -> None:
    from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    def serialized() -> bytes:
        tensors: Any = list(weights.items())
        if load_format is not None:
            bucket = FlattenedTensorBucket(named_tensors=tensors)
            tensors = {"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()}
        handles: bytes = MultiprocessingSerializer.serialize(tensors)
        return handles

    async with _held(manager):
        request = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[await asyncio.to_thread(serialized)], load_format=load_format
        )
        _check(await manager.update_weights_from_tensor(request))


async def _broadcast(manager: Any, group: Any, weights: Weights) -> None:
    import torch.distributed as dist
    from sglang.srt.managers.io_struct import UpdateWeightsFromDistributedReqInput

    def send() -> None:
        sent = [dist.broadcast(tensor, src=0, group=group, async_op=True) for tensor in weights.values()]
        for broadcast in sent:
            broadcast.wait()

    request = UpdateWeightsFromDistributedReqInput(
        names=list(weights),
        dtypes=[str(tensor.dtype).removeprefix("torch.") for tensor in weights.values()],
        shapes=[list(tensor.shape) for tensor in weights.values()],
        group_name=GROUP,
    )
    async with _held(manager):
        answered, _ = await asyncio.gather(
            manager.update_weights_from_distributed(request), asyncio.to_thread(send)
        )
        _check(answered)


@asynccontextmanager
async def _group(manager: Any) -> AsyncIterator[Any]:
    """The trainer is rank 0, the engine rank 1."""
    import torch.distributed as dist
    from sglang.srt.managers.io_struct import DestroyWeightsUpdateGroupReqInput, InitWeightsUpdateGroupReqInput
    from sglang.srt.utils import init_custom_process_group

    with closing(socket.create_server((HOST, 0))) as listener:
        port = listener.getsockname()[1]
    request = InitWeightsUpdateGroupReqInput(
        master_address=HOST, master_port=port, rank_offset=1, world_size=2, group_name=GROUP, backend="gloo"
    )
    # At once, since each waits for the other.
    group, answered = await asyncio.gather(
        asyncio.to_thread(
            init_custom_process_group,
            backend="gloo",
            init_method=f"tcp://{HOST}:{port}",
            timeout=timedelta(seconds=JOIN_S),
            world_size=2,
            rank=0,
            group_name=GROUP,
        ),
        manager.init_weights_update_group(request),
    )
    _check(answered)
    yield group
    _check(await manager.destroy_weights_update_group(DestroyWeightsUpdateGroupReqInput(group_name=GROUP)))
    dist.destroy_process_group(group)


def _check(answered: tuple[bool, str]) -> None:
    done, why = answered
    if not done:
        raise SystemExit(f"SGLang did not take the weights: {why}")


OWN: dict[str, tuple[str, Callable[[Any, Any, Weights], Awaitable[None]]]] = {
    "update_weights_from_distributed, gloo": ("gloo", _broadcast),
    "update_weights_from_tensor": ("ipc", _hand_over),
    "update_weights_from_tensor, flattened_bucket": ("ipc", partial(_hand_over, load_format="flattened_bucket")),
}
"""SGLang's own → our backend that stands beside it, and how."""
