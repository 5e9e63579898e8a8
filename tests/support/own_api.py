"""Records an engine's replies through its own API, in a process of its own, with nothing of this project in it.

python -m tests.support.own_api hf|vllm|sglang MODEL REQUESTS.json REPLIES.json

A request has `prompt`, `tokens`, `temperature` and `seed`; a reply `tokens`, `logprobs` and `prompt_logprobs`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

Asked = dict[str, Any]


def hf(model: str, requests: list[Asked]) -> list[Asked]:
    """transformers' `generate`: greedy only."""
    import torch
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype="auto", local_files_only=True).eval()
    replies = []
    for request in requests:
        prompt = torch.tensor([request["prompt"]])
        with torch.no_grad():
            out = loaded.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=request["tokens"],
                min_new_tokens=request["tokens"],
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
            )
            rows = loaded(prompt).logits[0, :-1].float().log_softmax(-1)
        tokens = out.sequences[0, prompt.shape[1] :].tolist()
        made = [
            float(row[0].float().log_softmax(-1)[token]) for row, token in zip(out.logits, tokens, strict=True)
        ]
        scored = [float(row[token]) for row, token in zip(rows, request["prompt"][1:], strict=True)]
        replies.append({"tokens": tokens, "logprobs": made, "prompt_logprobs": [None, *scored]})
    return replies


def vllm(model: str, requests: list[Asked]) -> list[Asked]:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # a second process would import all of it again
    from vllm import LLM, SamplingParams

    llm = LLM(model, dtype="bfloat16", enforce_eager=True, kv_cache_memory_bytes=32 << 20, max_model_len=512)
    replies = []
    for request in requests:
        sampling = SamplingParams(
            temperature=request["temperature"],
            seed=request["seed"],
            max_tokens=request["tokens"],
            ignore_eos=True,
            logprobs=0,
            prompt_logprobs=0,
        )
        (out,) = llm.generate([{"prompt_token_ids": request["prompt"]}], sampling, use_tqdm=False)
        (choice,) = out.outputs
        tokens = list(choice.token_ids)
        made = [step[token].logprob for token, step in zip(tokens, choice.logprobs, strict=True)]
        scored = [
            None if step is None else step[token].logprob
            for token, step in zip(request["prompt"], out.prompt_logprobs, strict=True)
        ]
        replies.append({"tokens": tokens, "logprobs": made, "prompt_logprobs": scored})
    return replies


def sglang(model: str, requests: list[Asked]) -> list[Asked]:
    os.environ["SGLANG_RETURN_ORIGINAL_LOGPROB"] = "1"
    from sglang import Engine

    engine = Engine(
        model_path=model,
        device="cpu",
        attention_backend="torch_native",
        sampling_backend="pytorch",
        disable_overlap_schedule=True,
        disable_cuda_graph=True,
        max_total_tokens=4096,
        skip_tokenizer_init=True,
        log_level="error",
    )
    replies = []
    for request in requests:
        out = engine.generate(
            input_ids=request["prompt"],
            sampling_params={
                "temperature": request["temperature"],
                "sampling_seed": request["seed"],
                "max_new_tokens": request["tokens"],
                "ignore_eos": True,
            },
            return_logprob=True,
            logprob_start_len=0,
        )
        meta = out["meta_info"]
        replies.append(
            {
                "tokens": list(out["output_ids"]),
                "logprobs": [value for value, *_ in meta["output_token_logprobs"]],
                "prompt_logprobs": [value for value, *_ in meta["input_token_logprobs"]],
            }
        )
    engine.shutdown()
    return replies


if __name__ == "__main__":
    name, model, requests_path, replies_path = sys.argv[1:]
    asked = {"hf": hf, "vllm": vllm, "sglang": sglang}[name]
    answers = asked(model, json.loads(Path(requests_path).read_text()))
    Path(replies_path).write_text(json.dumps(answers))
