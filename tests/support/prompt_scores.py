"""Scored prompts as trainers' own clients ask for them and read them, and their check against plain transformers."""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
from asyncio.subprocess import PIPE
from pathlib import Path
from typing import Any

import httpx
import torch

from tests.support.paths import ROOT
from tests.support.reference import logits_of

TRL_TOPS = 100
"""TRL's default for the teacher's likeliest tokens."""


def rows_of(base: Path, prompt: list[int]) -> torch.Tensor:
    """[tokens - 1, vocabulary]: the log-softmax at each token after the first, by plain transformers."""
    return logits_of(base, prompt[:1], prompt[1:]).log_softmax(-1)


def check_rows(
    rows: list[dict[str, Any] | None],
    prompt: list[int],
    truth: torch.Tensor,
    count: int,
    within: float,
    *,
    ranks: bool,
) -> None:
    """Checks vLLM's form of a scored prompt. `within`: how far a logprob may be off. `ranks`: the engine knows the rank
    of each token."""
    assert (rows[0], len(rows)) == (None, len(prompt))
    for token, row, true in zip(prompt[1:], rows[1:], truth, strict=True):
        assert row is not None
        own, *_ = row
        assert own == str(token)
        tops = sorted((one["rank"], int(key), one["logprob"]) for key, one in row.items() if _is_top(one, count))
        assert [rank for rank, _, _ in tops] == list(range(1, count + 1))
        assert len(row) == count + (not _is_top(row[own], count))
        for key, one in row.items():
            assert abs(one["logprob"] - float(true[int(key)])) < within, key
        least = float(true.topk(max(1, count)).values[-1])
        assert all(float(true[key]) > least - 2 * within for _, key, _ in tops)
        value, rank = float(true[token]), row[own]["rank"]
        if ranks or _is_top(row[own], count):
            assert int((true > value + 2 * within).sum()) < rank <= int((true >= value - 2 * within).sum())
        else:
            assert rank == (count + 1 if count else None)


def _is_top(one: dict[str, Any], count: int) -> bool:
    return one["rank"] is not None and one["rank"] <= count


async def ask_trl(
    url: str, instance_ids: list[str], sequences: list[list[int]], prompts: list[int], within_s: float
) -> dict[str, dict[str, Any]]:
    """Scores sequences by TRL's own client at each of these workers. Returns its replies by the workers' ids."""
    asked = {"url": url, "instance_ids": instance_ids, "sequences": sequences, "prompts": prompts}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.support.trl_scores"),
        cwd=ROOT,
        stdin=PIPE,
        stdout=PIPE,
        stderr=PIPE,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "TORCHDYNAMO_DISABLE": "1"},
    )
    async with asyncio.timeout(within_s):
        output, errors = await process.communicate(json.dumps(asked).encode())
    assert process.returncode == 0, errors.decode()[-3000:]
    found: dict[str, dict[str, Any]] = json.loads(output.splitlines()[-1])
    return found


def check_trl(
    found: dict[str, Any],
    sequences: list[list[int]],
    prompts: list[int],
    truths: list[torch.Tensor],
    within: float,
) -> None:
    """Checks what TRL's distillation trainer gets of its teacher."""
    for number, (sequence, start, truth) in enumerate(zip(sequences, prompts, truths, strict=True)):
        true = truth[start - 1 :]
        ids = torch.tensor(found["logprob_token_ids"][number])
        values = torch.tensor(found["logprobs"][number])
        assert values.shape == ids.shape == (len(sequence) - start, TRL_TOPS)
        assert float((values - true.gather(1, ids)).abs().max()) < within
        assert bool((values[:, :-1] >= values[:, 1:]).all())
        actual = torch.tensor(found["actual_logprobs"][number])[:, 0]
        assert found["actual_token_ids"][number] == [[token] for token in sequence[start:]]
        assert float((actual - true.gather(1, torch.tensor(sequence[start:])[:, None])[:, 0]).abs().max()) < within


async def check_skyrl(
    http: httpx.AsyncClient,
    model: str,
    prompt: list[int],
    truth: torch.Tensor,
    count: int,
    within: float,
) -> str:
    """The request of SkyRL's `sample(topk_prompt_logprobs=count)`, and its `convert_vllm_prompt_logprobs`. Returns the
    worker's id."""
    sampling = {"n": 1, "logprobs": 0, "output_kind": 2, "prompt_logprobs": count, "max_tokens": 1}
    body = {"sampling_params": sampling, "model": model, "token_ids": prompt}
    response = await http.post("/inference/v1/generate", json=body, headers={"X-Session-ID": str(prompt[0])})
    reply = response.raise_for_status().json()
    raw = reply["prompt_logprobs"]
    own = [
        (row.get(str(token)) or {}).get("logprob") if row is not None else None
        for token, row in zip(prompt, raw, strict=True)
    ]
    tops = [
        sorted(((int(key), one["logprob"]) for key, one in row.items()), key=lambda pair: -pair[1])[:count]
        if row is not None
        else None
        for row in raw
    ]
    assert (own[0], tops[0]) == (None, None)
    for value, token, pairs, true in zip(own[1:], prompt[1:], tops[1:], truth, strict=True):
        assert value is not None
        assert pairs is not None
        assert abs(value - float(true[token])) < within
        likeliest = true.topk(count).values.tolist()
        assert all(math.isclose(one, float(true[key]), abs_tol=within) for key, one in pairs)
        assert all(
            math.isclose(one, other, abs_tol=within) for (_, one), other in zip(pairs, likeliest, strict=True)
        )
    return str(reply["choices"][0]["instance_id"])
