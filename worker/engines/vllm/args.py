"""The engine arguments of vLLM (`--engine-arg key=value`): any of its own arguments, typed as on its command line."""

from __future__ import annotations

import argparse
import json
import os
import secrets
from collections.abc import Collection, Mapping
from typing import Any, NoReturn

from rl_plane.errors import InvalidRequest, Unsupported
from worker.engines.base import EngineOptions
from worker.engines.common.pooling_head import PoolingHead
from worker.engines.common.replicas import check_replicas
from worker.engines.common.tool_call_parsing import ARGUMENT

ONE_HOST = "data_parallel_size says how many replicas there are: all of them are processes of this machine"
OWN_BALANCER = "give data_parallel_size: vLLM spreads the requests over the replicas itself"

NO_DRAFT = "weight updates would not reach the draft model"

OURS = {
    "data_parallel_address": ONE_HOST,
    "data_parallel_backend": ONE_HOST,
    "data_parallel_external_lb": OWN_BALANCER,
    "data_parallel_hybrid_lb": OWN_BALANCER,
    "data_parallel_multi_port_external_lb": OWN_BALANCER,
    "data_parallel_rank": OWN_BALANCER,
    "data_parallel_rpc_port": ONE_HOST,
    "data_parallel_size_local": ONE_HOST,
    "data_parallel_start_rank": ONE_HOST,
    "distributed_executor_backend": "a worker's ranks are processes of this machine",
    "convert": "use --task",
    "dtype": "use --dtype",
    "elastic_ep_max_dp_size": "an update would put experts where they no longer are",
    "enable_elastic_ep": "an update would put experts where they no longer are",
    "enable_eplb": "an update would put experts where they no longer are",
    "kv_offloading_backend": "kv_offloading_size keeps KV in host memory, which an update flushes",
    "kv_transfer_config": "KV kept elsewhere would outlive an update; kv_offloading_size keeps it in host memory",
    "load_format": "the model is read from its safetensors files",
    "logprobs_mode": "use --logprobs-mode",
    "model": "use --model",
    "master_addr": "use --dist-init-addr",
    "master_port": "use --dist-init-addr",
    "nnodes": "use --nnodes",
    "node_rank": "use --node-rank",
    "offload_backend": "cpu_offload_gb keeps weights in host memory, where an update reaches them",
    "offload_group_size": "cpu_offload_gb keeps weights in host memory, where an update reaches them",
    "pooler_config": "the model's own files say how it pools",
    "quantization": "weight updates bring the weights as they are trained",
    "runner": "use --task",
    "served_model_name": "use --model-name",
    "skip_tokenizer_init": "the worker has a tokenizer of its own",
    "spec_method": NO_DRAFT,
    "spec_model": NO_DRAFT,
    "spec_tokens": NO_DRAFT,
    "speculative_config": NO_DRAFT,
    "tokenizer": "the model's own is used",
    "weight_transfer_config": "weights come by update_weights",
    "worker_cls": "it would not be vLLM's own",
    "worker_extension_cls": "the worker has its own",
}
"""Arguments that the adapter sets or can't work without, and what to do instead."""

NO_TRITON = "vLLM tells them by its second model runner only, which needs Triton: this build has none"

CPU_KV_CACHE_BYTES = 256 << 20
"""Without a bound, vLLM takes most of the machine's memory."""

MAX_SEED = 1 << 31
"""NumPy takes 32 bits, and a rank seeds it too."""

LORA_SLOTS = 4
"""The number of adapters that may be loaded at once, unless the user says otherwise."""


def parse_arguments(extra: Mapping[str, str]) -> dict[str, Any]:
    if not extra:
        return {}
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):  # type: ignore[misc,unused-ignore]
        def error(self, message: str) -> NoReturn:
            raise ValueError(message)

    parser = AsyncEngineArgs.add_cli_args(Parser(add_help=False))
    known = {action.dest: action for action in parser._actions if action.option_strings}
    values = {}
    for key, text in extra.items():
        if key == ARGUMENT:
            continue  # an argument of vLLM's server, which `vllm_tool_parsers.py` reads
        if key in OURS:
            raise InvalidRequest(f"{key} can't be set here", field=f"engine_arg.{key}", fix=OURS[key])
        if key not in known:
            raise InvalidRequest(
                f"vLLM has no argument {key[:64]!r}",
                field=f"engine_arg.{key[:64]}",
                fix="name one of its engine arguments, such as tensor_parallel_size or gpu_memory_utilization",
            )
        try:
            values[key] = getattr(parser.parse_args(_as_typed_in(known[key], text)), key)
        except (ValueError, argparse.ArgumentError) as error:
            raise InvalidRequest(
                f"{key}={text[:64]}: {error}", field=f"engine_arg.{key}", fix="give a value that vLLM takes"
            ) from error
    return values


def _as_typed_in(action: Any, text: str) -> list[str]:
    option = max(action.option_strings, key=lambda one: (not one.startswith("--no-"), len(one)))
    if action.nargs == 0:
        if text not in ("true", "false"):
            raise ValueError("say true or false")
        has_off = isinstance(action, argparse.BooleanOptionalAction)
        off = [f"--no-{option.removeprefix('--')}"] if has_off else []
        return [option] if text == "true" else off
    if action.nargs in ("+", "*"):
        return [option, *_items(text)]
    return [f"{option}={text}"]


def _items(text: str) -> list[str]:
    if not text.startswith("["):
        return text.split(",")
    return [item if isinstance(item, str) else json.dumps(item) for item in json.loads(text)]


def completed(arguments: dict[str, Any], on_cpu: bool) -> dict[str, Any]:
    """The arguments, with our defaults where vLLM's own are wrong for us."""
    found = dict(arguments)
    # Requests without a seed draw by it. vLLM's own is 0: all workers would make the same samples of one prompt, and
    # again after a restart. All ranks share one seed, since they must draw alike.
    found.setdefault("seed", secrets.randbelow(MAX_SEED))
    if on_cpu:
        found.setdefault("enforce_eager", True)  # compiling takes a minute, and gives a CPU little
        if "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
            found.setdefault("kv_cache_memory_bytes", CPU_KV_CACHE_BYTES)
    if "max_lora_rank" in found:
        found.setdefault("enable_lora", True)
    if found.get("enable_lora"):
        found.setdefault("max_loras", LORA_SLOTS)
        if on_cpu:
            # On a CPU, vLLM gives requests without an adapter the adapter of the last slot. One more slot stays empty.
            found["max_loras"] = 1 + max(found["max_loras"], found.pop("max_cpu_loras", None) or 0)
    return found


def pooling_arguments(head: PoolingHead) -> dict[str, Any]:
    """The arguments by which vLLM serves a pooling model."""
    from vllm.config import PoolerConfig

    found: dict[str, Any] = {"runner": "pooling"}
    if head.task == "embed":
        found["pooler_config"] = PoolerConfig(seq_pooling_type=head.position.upper())
    return found


def check_settings(options: EngineOptions, arguments: Mapping[str, Any]) -> None:
    """Raises InvalidRequest for settings with which vLLM can't start. It starts nothing, and asks no other node."""
    from vllm.platforms import current_platform
    from vllm.triton_utils import HAS_TRITON

    if arguments.get("enable_return_routed_experts") and not HAS_TRITON:
        raise InvalidRequest(NO_TRITON, field="engine_arg.enable_return_routed_experts", fix="leave it out")
    check_lora_targets(arguments)
    on_cpu = current_platform.is_cpu()
    check_device(options.device, on_cpu)
    if on_cpu:
        options.refuse_modes("vLLM has this on GPUs only", "leave it out on a CPU")
        check_cpu(arguments)
    check_nodes(arguments, options.hosts)


def check_lora_targets(arguments: Mapping[str, Any]) -> None:
    """Raises InvalidRequest if adapters may change one module of a kind, and not the others: vLLM would drop the
    adapter's part for the others."""
    named = [name for name in arguments.get("lora_target_modules") or () if "." in name]
    if named:
        raise InvalidRequest(
            f"lora_target_modules has {named[0][:64]!r}, which is a part of some modules' names only",
            field="engine_arg.lora_target_modules",
            fix="give last parts of names only, such as q_proj",
        )


def check_nodes(arguments: Mapping[str, Any], nodes: int) -> None:
    """Raises InvalidRequest for a model that vLLM can't divide among so many nodes."""
    check_replicas(int(arguments.get("data_parallel_size", 1)), nodes, "data_parallel_size")
    ranks = int(arguments.get("tensor_parallel_size", 1)) * int(arguments.get("pipeline_parallel_size", 1))
    if ranks % nodes:
        raise InvalidRequest(
            f"{ranks} ranks can't be divided among {nodes} nodes",
            field="nnodes",
            fix="tensor_parallel_size times pipeline_parallel_size must be a multiple of it",
        )


def check_device(device: str, on_cpu: bool) -> None:
    """Raises InvalidRequest for a device that this build of vLLM does not take."""
    name, _, index = device.partition(":")
    known = "cpu" if on_cpu else "cuda"
    if name not in ("auto", known):
        why = f"this build of vLLM has no {device}"
    elif index not in ("", "0"):
        why = f"vLLM begins with the first device that it sees, not with {device}"
    else:
        return
    raise InvalidRequest(why, field="device", fix=f"use {known}; CUDA_VISIBLE_DEVICES says which")


def check_cpu(arguments: Mapping[str, Any]) -> None:
    """Raises InvalidRequest for a setting that starts on a CPU, and then ends the engine."""
    if arguments.get("pipeline_parallel_size", 1) != 1:
        raise InvalidRequest(
            "vLLM's CPU build fails at the first request of a second pipeline stage: this argument is for GPUs",
            field="engine_arg.pipeline_parallel_size",
            fix="leave it out on a CPU",
        )


def check_draft(config: Any) -> None:
    """Raises Unsupported if the model brings a draft model. `config`: vLLM's finished config."""
    if config.speculative_config is not None:
        raise Unsupported(
            f"the model's own config asks for speculative decoding: {NO_DRAFT}",
            field="model",
            fix="give the model whose tokens the draft model guesses",
        )


def check_experts(replicas: int, has_experts: bool) -> None:
    """Raises InvalidRequest for replicas of a mixture of experts where vLLM's build can't pass tokens among them."""
    from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
    from vllm.platforms import current_platform
    from vllm.utils.import_utils import resolve_obj_by_qualname

    if replicas == 1 or not has_experts:
        return
    communicator = resolve_obj_by_qualname(current_platform.get_device_communicator_cls())
    for name in ("all_gatherv", "reduce_scatterv"):
        if getattr(communicator, name) is getattr(DeviceCommunicatorBase, name):
            raise InvalidRequest(
                f"the replicas of a mixture of experts compute its experts together, and vLLM has no {name} for "
                f"{current_platform.device_type}",
                field="engine_arg.data_parallel_size",
                fix="run one worker for each replica",
            )


def thread_binding(ranks: int, cores: Collection[int] | None = None) -> str | None:
    """Returns the value of `VLLM_CPU_OMP_THREADS_BIND` for this number of ranks on a CPU, which share its cores. None:
    vLLM's own choice. `cores`: the default is the cores of this process."""
    cores = sorted(os.sched_getaffinity(0) if cores is None else cores)
    if ranks == 1 or len(cores) < ranks:
        return None
    share = len(cores) // ranks
    return "|".join(",".join(map(str, cores[rank * share : (rank + 1) * share])) for rank in range(ranks))
