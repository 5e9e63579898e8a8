"""The engine arguments of SGLang (`--engine-arg key=value`): any field of its ServerArgs, with its type."""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

from rl_plane.errors import InvalidRequest
from worker.engines.common.replicas import check_replicas

IN_HOST_MEMORY = "KV kept elsewhere would outlive an update; enable_hierarchical_cache keeps it in host memory"

PLACED_ANEW = "leave it out: the canary of an update does not see experts that move or are copied after it"
OTHER_COPIES = "leave it out: the engine would compute with copies of weights that an update does not reach"
QUANTIZED = "weight updates bring the weights as they are trained"

SHARED_RANKS = "give dp_size: this project has not brought replicas that share their ranks to run"

OURS = {
    "attn_dp_size": SHARED_RANKS,
    "base_gpu_id": "use --device cuda:1",
    "custom_sigquit_handler": "the worker has its own",
    "custom_weight_loader": "weights come by update_weights",
    "device": "use --device",
    "disaggregation_mode": "KV that another engine computed may be of older weights; run engines that do both",
    "dist_init_addr": "use --dist-init-addr",
    "dtype": "use --dtype",
    "elastic_ep_backend": PLACED_ANEW,
    "enable_dp_attention": SHARED_RANKS,
    "enable_elastic_expert_backup": PLACED_ANEW,
    "enable_eplb": PLACED_ANEW,
    "enable_flexkv": IN_HOST_MEMORY,
    "enable_lmcache": IN_HOST_MEMORY,
    "enable_lora": "give max_lora_rank",
    "enable_paged_experts": OTHER_COPIES,
    "enable_pdmux": "leave it out: SGLang computes prompts even while it is paused, and would mix weights",
    "enable_unified_cache_external_linker": IN_HOST_MEMORY,
    "ep_num_redundant_experts": PLACED_ANEW,
    "hicache_storage_backend": IN_HOST_MEMORY,
    "incremental_streaming_output": "the worker reads increments",
    "init_expert_location": PLACED_ANEW,
    "is_embedding": "use --task",
    "kt_weight_path": OTHER_COPIES,
    "load_format": "the model is read from its safetensors files",
    "lora_paths": "load adapters by update_weights",
    "model_path": "use --model",
    "modelopt_checkpoint_restore_path": QUANTIZED,
    "modelopt_quant": QUANTIZED,
    "nnodes": "use --nnodes",
    "node_rank": "use --node-rank",
    "offload_group_size": OTHER_COPIES,
    "ple_offload_embedding": OTHER_COPIES,
    "quantization": QUANTIZED,
    "quantize_and_serve": QUANTIZED,
    "radix_cache_backend": IN_HOST_MEMORY,
    "rl_quant_profile": QUANTIZED,
    "served_model_name": "use --model-name",
    "skip_tokenizer_init": "the worker makes the text",
    "speculative_algorithm": "weight updates would not reach the draft model",
    "stream_interval": "leave it out: tokens of old weights that SGLang holds back would get the label of new ones",
    "tokenizer_path": "the model's own is used",
    "tokenizer_worker_num": "the worker makes the tokens",
    "weight_cache_mode": OTHER_COPIES,
    "weight_version": "the worker labels the weights",
}
"""Arguments that the adapter sets or can't work without, and what to do instead."""

ON_CPU: Mapping[str, Any] = {
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "disable_overlap_schedule": True,
    "disable_cuda_graph": True,
    "lora_backend": "torch_native",
    "sleep_on_idle": True,  # an idle rank would keep a core busy that the other ranks and the trainer need
    "max_total_tokens": 8192,  # by default it takes a share of the machine's memory
}
"""Settings that the CPU build needs. The user's arguments win."""

WITH_LORA: Mapping[str, Any] = {"enable_lora": True, "lora_target_modules": ["all"]}
"""Settings that `max_lora_rank` implies. The user's arguments win."""


def parse_arguments(extra: Mapping[str, str]) -> dict[str, Any]:
    from sglang.srt.server_args import ServerArgs

    hints = typing.get_type_hints(ServerArgs, include_extras=True)
    fields = {
        name: field for field in ServerArgs.__struct_fields__ for name in (field, *_other_names(hints[field]))
    }
    values: dict[str, Any] = dict(WITH_LORA) if "max_lora_rank" in extra else {}
    for name, text in extra.items():
        key = fields.get(name, name)
        if key in OURS:
            raise InvalidRequest(f"{name} can't be set here", field=f"engine_arg.{name}", fix=OURS[key])
        if name not in fields:
            raise InvalidRequest(
                f"SGLang has no argument {name[:64]!r}",
                field=f"engine_arg.{name[:64]}",
                fix="name a field of its ServerArgs, such as tp_size or mem_fraction_static",
            )
        values[key] = _typed(name, text, hints[key])
    return values


def check_cpu(arguments: Mapping[str, Any]) -> None:
    """Raises InvalidRequest for what SGLang's CPU build can't run."""
    if arguments.get("ep_size", 1) != 1:
        raise InvalidRequest(
            "SGLang's CPU kernels for experts read at the place -1 for those of another rank",
            field="engine_arg.ep_size",
            fix="leave it out: with tp_size alone each rank has a part of every expert",
        )


def check_nodes(arguments: Mapping[str, Any], nodes: int) -> None:
    """Raises InvalidRequest for a model that SGLang can't divide among so many nodes. A node has whole stages of the
    pipeline, or a part of one stage."""
    check_replicas(int(arguments.get("dp_size", 1)), nodes, "dp_size")
    stages, parts = (int(arguments.get(name, 1)) for name in ("pp_size", "tp_size"))
    for name, size in (("pp_size", stages), ("tp_size", parts)):
        if size < 1:
            raise InvalidRequest(f"{name} is {size}", field=f"engine_arg.{name}", fix="give 1 or more")
    nodes_of_stage, rest = divmod(nodes, stages)
    if stages % nodes and (rest or parts % nodes_of_stage):
        raise InvalidRequest(
            f"a model with pp_size {stages} and tp_size {parts} can't be divided among {nodes} nodes",
            field="nnodes",
            fix="use a pp_size that nnodes divides; or a pp_size that divides nnodes, with a tp_size that "
            "nnodes/pp_size divides",
        )


def _other_names(annotated: Any) -> list[str]:
    """The names that SGLang's command line has for a field: `tensor_parallel_size` for `tp_size`."""
    _, details = _parts(annotated)
    options = [getattr(details, "cli_name", None), *(getattr(details, "aliases", None) or ())]
    return [option.lstrip("-").replace("-", "_") for option in options if option]


def _parts(annotated: Any) -> tuple[Any, Any]:
    """A field's type, and SGLang's other details of it."""
    if typing.get_origin(annotated) is typing.Annotated:
        kind, details, *_ = typing.get_args(annotated)
        return kind, details
    return annotated, None


def _typed(name: str, text: str, annotated: Any) -> Any:
    kind, details = _parts(annotated)
    choices = getattr(details, "choices", None)
    try:
        value = (getattr(details, "type_parser", None) or _reader(kind))(text)
    except (ValueError, TypeError) as error:  # the errors of msgspec and json are ValueErrors
        raise InvalidRequest(
            f"{name}={text[:64]} is not {_shown(kind)}", field=f"engine_arg.{name}", fix="give such a value"
        ) from error
    if choices and value not in choices and not isinstance(value, (list, set)):
        raise InvalidRequest(
            f"{name}={text[:64]} is not known to SGLang",
            field=f"engine_arg.{name}",
            fix=f"one of {', '.join(map(str, choices))}",
        )
    return value


def _reader(kind: Any) -> Callable[[str], Any]:
    import msgspec

    members = typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)

    def read(text: str) -> Any:
        value = json.loads(text) if text[:1] in ("[", "{") else text
        for member in sorted(members, key=lambda one: one is str):  # a string only if no other type fits
            try:
                return msgspec.convert(value, member, strict=False)
            except msgspec.ValidationError:
                continue
        raise ValueError(text)

    return read


def _shown(kind: Any) -> str:
    return str(getattr(kind, "__name__", kind)).replace("typing.", "")
