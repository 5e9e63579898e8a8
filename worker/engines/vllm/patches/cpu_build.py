"""Corrections of vLLM's CPU build. The plugin applies them where vLLM runs on a CPU, and nowhere else."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import Any

from worker.engines.common.shared_names import shared_names

POLL_S = 2e-5
"""Seconds between two polls: far below the time of a step, and enough for other processes to run."""


def poll_politely() -> None:
    """Makes vLLM's processes sleep between two polls of each other.

    vLLM's own way is sched_yield, on the cores that every process needs: on Linux 6.18 no other process runs for
    seconds then, NATS included.
    """
    from vllm.distributed.device_communicators import shm_broadcast

    shm_broadcast.sched_yield = lambda: time.sleep(POLL_S)


def delete_names_of_ranks() -> None:
    """Deletes the names of the memory by which ranks exchange tensors, once every rank has mapped it. vLLM deletes them
    when a rank ends by itself."""
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    really = _CPUSHMDistributed._init_cpu_shm

    def share(group: Any) -> int:
        handle = really(group)  # returns in no rank before all have mapped the memory of all
        for name in shared_names([os.getpid()], group.group_name):
            name.unlink(missing_ok=True)  # another rank may have deleted it
        return int(handle)

    _CPUSHMDistributed._init_cpu_shm = share


def correct_experts() -> None:
    """Makes fused experts right after a reload, with expert parallelism too, and lets a mixture of experts start with
    LoRA."""
    _pack_reloaded_experts()
    _compute_own_experts()
    _keep_experts_on_the_cpu_kernel()
    _adapt_no_experts()


def _pack_reloaded_experts() -> None:
    """Makes every load of fused experts end with packed weights.

    vLLM's CPU kernel reads the experts' weights in a packed layout. vLLM packs them at the first load only: it takes a
    later load for a load that keeps the kernel, and copies the weights as the checkpoint has them. The kernel then
    reads the wrong elements.
    """
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    really = UnquantizedFusedMoEMethod._setup_kernel

    def set_up_kernel(method: Any, layer: Any, w13: Any, w2: Any) -> None:
        is_reload = method.moe_kernel is not None
        really(method, layer, w13, w2)
        if is_reload and method.unquantized_backend == UnquantizedMoeBackend.CPU:
            method.moe_kernel.fused_experts.process_weights_after_loading(layer)

    UnquantizedFusedMoEMethod._setup_kernel = set_up_kernel


def _compute_own_experts() -> None:
    """Makes a rank take its own experts only, as expert parallelism wants.

    vLLM's CPU kernels take the number of an expert among all ranks for its place in this rank, and read past the end
    of the weights. Here they get the place. For an expert of another rank they compute this rank's first expert, which
    counts with the weight 0.
    """
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe
    from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEExperts

    def own(really: Any) -> Any:
        def apply(experts: Any, **given: Any) -> None:
            places, others = given["expert_map"], None
            if places is not None:
                chosen = places[given["topk_ids"].long()].to(given["topk_ids"].dtype)
                others = chosen < 0
                weights = given["topk_weights"].masked_fill(others, 0)
                given |= {"topk_ids": chosen.clamp(min=0), "topk_weights": weights, "expert_map": None}
            really(experts, **given)
            # Then the kernel takes no weights, and a token has one expert.
            if others is not None and given["apply_router_weight_on_input"]:
                given["output"].masked_fill_(others, 0)

        return apply

    kinds: list[Any] = [kind for kind in vars(cpu_moe).values() if isinstance(kind, type)]
    for kind in kinds:
        if issubclass(kind, FusedMoEExperts) and "apply" in vars(kind):
            kind.apply = own(kind.apply)


def _keep_experts_on_the_cpu_kernel() -> None:
    """Keeps experts on the CPU kernel. With LoRA, vLLM chooses its Triton kernel for experts, on a CPU too, where there
    is no Triton."""
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as method

    really = method.select_unquantized_moe_backend

    def select(moe_config: Any) -> Any:
        return really(moe_config=replace(moe_config, is_lora_enabled=False))

    method.select_unquantized_moe_backend = select


def _adapt_no_experts() -> None:
    """Gives experts no adapters, since vLLM's CPU kernel for experts takes none. Every other module keeps its own."""
    from vllm.lora import model_manager
    from vllm.model_executor.layers.fused_moe import MoERunner

    really = model_manager.get_supported_lora_modules

    def supported(model: Any) -> list[str]:
        experts = {name.rpartition(".")[2] for name, one in model.named_modules() if isinstance(one, MoERunner)}
        return [name for name in really(model) if name not in experts]

    model_manager.get_supported_lora_modules = supported
