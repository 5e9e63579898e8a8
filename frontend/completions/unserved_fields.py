"""The fields of OpenAI, vLLM, SGLang and Dynamo that no generation route here serves.

| the body has | the route answers |
|---|---|
| a field of `IGNORED` with a value of its type | as without it |
| a field of this list, with a value that changes nothing | as without it |
| a field of this list with another value | 501, naming the field |
| a field that none of them knows | 400, naming the field |

The list is one for all routes and all objects of a body. A field that some route serves may stand here too: the route's
own model decides.
"""

from __future__ import annotations

import typing
from typing import Any

from pydantic import BaseModel

from rl_plane.errors import InvalidRequest, Unsupported

_ONLY_NULL = (
    # structured output by the names of older versions of vLLM, and options of how it is written
    "guided_json guided_regex guided_choice guided_grammar whitespace_pattern",
    # inputs and outputs that are no text
    "prompt_embeds input_embeds audio images_config video_config features",
    "mm_hashes mm_content_hashes max_dynamic_patch min_dynamic_patch image_max_dynamic_patch",
    "video_max_dynamic_patch encoder_urls num_items_assigned need_wait_for_mm_inputs positional_embed_overrides",
    # templates, reasoning and tools
    "chat_template prediction reasoning_effort verbosity web_search_options thinking task thinking_token_budget",
    "max_thinking_tokens reasoning_ended reasoning_parser_kwargs",
    # names of requests, sessions, adapters and caches
    "request_id rid session_id session_params conversation_id routing_key prompt_cache_key safety_identifier",
    "extra_key cache_salt lora_path lora_id custom_labels external_trace_header received_time",
    # other forms of the prompt, and other scores
    "input_ids token_offsets logprob_token_ids prompt_logprob_token_ids token_ids_logprob trace_decode_token_ids",
    "sampling_logprobs_mode multi_item_delimiter_indices token_indices_to_pool",
    "repetition_detection watermark custom_logit_processor",
    # where the request is computed
    "kv_transfer_params ec_transfer_params kv_hints skip_reading_prefix_cache metadata_upload",
    "bootstrap_host bootstrap_port bootstrap_room bootstrap_pair_key decode_tp_size data_parallel_rank",
    "routed_dp_rank disagg_prefill_dp_rank dp_rank prefill_dp_rank http_worker_ipc",
    "backend_instance_id prefill_worker_id decode_worker_id",
)
_ONLY_FALSE = (
    "use_beam_search echo store return_hidden_states return_token_offsets return_prompt_text return_mm_kwargs",
    "watermarking no_stop_trim return_meta_info return_sampling_mask return_cached_tokens_details",
    "return_spec_tokens_details return_prompt_token_ids return_input_ids_in_sglext return_output_ids_in_sglext",
    "return_flat_raw_output_top_logprobs return_flat_raw_top_logprobs return_text_in_logprobs flat_logprobs",
    "return_indexer_topk return_entropy return_bytes return_token_strs use_audio_in_video background",
    "disable_any_whitespace disable_additional_properties",
    "require_reasoning add_special_tokens continue_final_message greed_sampling use_raw_prompt",
    "continuous_usage_stats include_obfuscation",
)
_ONLY_EMPTY_OBJECT = (
    "chat_template_kwargs chat_template_args mm_processor_kwargs media_io_kwargs vllm_xargs extra_args",
    "custom_params agent_hints",
)
_ONLY_EMPTY_LIST = (
    "tools functions documents logits_processors bad_words content_parts annotations",
    "image_data video_data audio_data",  # AReaL sends an empty list with each prompt of text
)
BOTH = (True, False)

UNSERVED: dict[str, tuple[Any, ...]] = {
    name: neutral
    for lines, neutral in (
        (_ONLY_NULL, ()),
        (_ONLY_FALSE, (False,)),
        (_ONLY_EMPTY_OBJECT, ({},)),
        (_ONLY_EMPTY_LIST, ([],)),
    )
    for name in " ".join(lines).split()
} | {
    "length_penalty": (1,),
    "best_of": (1,),
    "beam_width": (1,),
    "stream_interval": (1,),
    "top_logprobs": (0,),
    "routed_experts_start_len": (0,),
    "routed_experts_prompt_start": (0,),
    "prompt_logprob_start": (0,),
    "suffix": ("",),
    "stop_regex": ([], ""),
    "tool_choice": ("none",),
    "function_call": ("none",),
    "truncation_side": ("left",),
    "output_mode": ("tokens",),
    "mm_payload": ("tensors", "none"),  # replies have none
    "service_tier": ("auto", "default"),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "detokenize": (True,),
    "add_generation_prompt": (True,),
    "include_reasoning": (True,),
    "output_kind": (0, 1, 2),  # `stream` decides
    "separate_reasoning": BOTH,  # a model's reasoning always stands in the text
    "stream_reasoning": BOTH,
    "return_flat_raw_top_logprobs_b64": BOTH,  # the encoding of a field that is refused
    "log_metrics": BOTH,  # the logs of SGLang's own server
    "no_logs": BOTH,
}
"""Field → the values, besides null, that change nothing."""

IGNORED: dict[str, type] = {
    "priority": int,  # engines take requests in the order in which they come, as vLLM does by default
    "metadata": dict,  # a label for OpenAI's own dashboard
    "spaces_between_special_tokens": bool,  # the served tokenizers have no such spaces
}
"""Field → the type of its value. vLLM's server takes each of these fields, and no value of theirs changes a reply."""


def unsupported(field: str, fix: str = "leave it out", what: str = "") -> Unsupported:
    return Unsupported(f"{what or field} is not supported here", field=field, fix=fix)


def without_unserved(body: dict[str, Any], served: type[BaseModel], where: str = "") -> dict[str, Any]:
    """The body without unserved fields whose value changes nothing, and so for the objects in it. Raises Unsupported
    for another value. `where`: the names of the objects around this one, for errors."""
    kept = {}
    for name, value in body.items():
        if name in served.model_fields:
            inner = _model_of(served, name) if isinstance(value, dict) else None
            kept[name] = value if inner is None else without_unserved(value, inner, f"{where}{name}.")
        elif name in IGNORED:
            if value is not None and type(value) is not IGNORED[name]:
                kind = IGNORED[name].__name__
                raise InvalidRequest(
                    f"{where}{name} is not of the type {kind}",
                    field=where + name,
                    fix=f"send {kind}, or leave it out",
                )
        elif name not in UNSERVED:
            kept[name] = value
        elif value is not None and not any(_same(value, neutral) for neutral in UNSERVED[name]):
            raise unsupported(where + name)
    return kept


def _model_of(served: type[BaseModel], name: str) -> type[BaseModel] | None:
    """The model of a field that is an object."""
    annotation = served.model_fields[name].annotation
    for one in (annotation, *typing.get_args(annotation)):
        if isinstance(one, type) and issubclass(one, BaseModel):
            return one
    return None


def _same(value: Any, neutral: Any) -> bool:
    """Equality in which true differs from 1."""
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)
