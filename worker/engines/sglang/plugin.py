"""What SGLang loads in each of its processes (entry point `sglang.srt.plugins`): little, and only for our engines."""

from __future__ import annotations

import json
import os
from typing import Any

MARK = "RL_PLANE_SGLANG"
"""In the environment of the processes that the adapter starts: what they must know, as JSON."""

METHOD = "rl_plane"
"""The scheduler's method that a remote call of the adapter's names."""


def register() -> None:
    told = os.environ.get(MARK)
    if told is None:
        return
    if json.loads(told)["worker"] != os.getpid():
        from worker.receive.rank_agents.agent_server import belong_to_worker

        belong_to_worker()
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from worker.engines.sglang.logits import tell, telling

    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.__init__", _serve_rank, HookType.AROUND)
    HookRegistry.register(
        "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch", _seed, HookType.AFTER
    )
    HookRegistry.register("sglang.srt.layers.sampler.multinomial_with_seed", _sample, HookType.AROUND)
    HookRegistry.register(
        "sglang.srt.managers.scheduler.Scheduler.get_output_streamer_class", telling, HookType.AFTER
    )
    HookRegistry.register(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager.update_request_meta_info", tell, HookType.AROUND
    )


def child_failed(number: int, frame: Any) -> None:
    """In place of SGLang's handler of SIGQUIT, by which it ends the process: the adapter sees that a child ended."""


def lora_reference(name: str, lora_id: str) -> Any:
    from sglang.srt.lora.lora_registry import LoRARef

    return LoRARef(lora_id=lora_id, lora_name=name, lora_path=name, pinned=False)


def _serve_rank(build: Any, scheduler: Any, *arguments: Any, **options: Any) -> None:
    from worker.engines.sglang.logits import Observer
    from worker.engines.sglang.scheduler import Rank

    told = json.loads(os.environ[MARK])
    if told["device"] == "cpu":
        _without_pinned_memory()
    build(scheduler, *arguments, **options)
    scheduler.tp_worker.model_runner.sampling_observer = Observer()
    rank = Rank(scheduler, told)
    setattr(scheduler, METHOD, rank.call)
    rank.serve()


def _without_pinned_memory() -> None:
    """SGLang's LoRA code asks for it always, and so does what keeps routed experts; torch's build for CPUs has none."""
    import torch
    from sglang.srt.mem_cache.pool_host import common

    def without(make: Any) -> Any:
        return lambda *arguments, pin_memory=False, **options: make(*arguments, **options)

    for name in ("tensor", "empty", "zeros", "ones", "arange", "full"):
        setattr(torch, name, without(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda tensor, *arguments, **options: tensor
    common.ALLOC_MEMORY_FUNCS["cpu"] = common.alloc_with_pin_memory


def _seed(info: Any, cls: Any, batch: Any, vocab_size: int) -> None:
    """SGLang looks at seeds in its deterministic mode only, which has no backend for a CPU."""
    import torch

    if info.sampling_seed is None and info.temperatures.device.type == "cpu":
        seeds = [request.sampling_params.sampling_seed or 0 for request in batch.reqs]
        info.sampling_seed = torch.tensor(seeds, dtype=torch.int64)


def _sample(original: Any, logprobs: Any, seed: Any, positions: Any) -> Any:
    """SGLang's own needs a kernel that its build for CPUs lacks. One draw per row, of its seed and position alone."""
    import torch

    if logprobs.device.type != "cpu":
        return original(logprobs, seed, positions)
    noise = torch.empty(logprobs.shape, dtype=torch.float64)
    for row, (number, position) in enumerate(zip(seed.tolist(), positions.tolist(), strict=True)):
        generator = torch.Generator().manual_seed(hash((number, position)))
        noise[row].exponential_(generator=generator)
    return torch.argmax(logprobs.to(torch.float64) - noise.log(), dim=1, keepdim=True)
