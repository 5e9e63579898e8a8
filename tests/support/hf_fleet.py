"""Helpers of `tests/engines/test_hf_fleet.py` and of other tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx

from tests.conftest import Plane
from tests.support.frontend_process import ask
from worker.testing.tiny_adapter import make_witness_adapter, witness_adapter_next_token
from worker.testing.tiny_model import make_witness_model, witness_next_token

PROMPT = [5, 6, 7]

TOKENS = 12

ENDLESS = 8000
"""More than a worker makes while an update comes."""

START_S = 120.0
"""Processes that import torch side by side on two cores, among other tests."""

HEAL_S = 60.0


def chain(start: int, count: int, base: int, adapter: int | None = None) -> list[int]:
    """Returns the tokens that the witnesses generate after `start`."""
    tokens: list[int] = []
    for _ in range(count):
        start = witness_next_token(base, start) if adapter is None else witness_adapter_next_token(adapter, start)
        tokens.append(start)
    return tokens


class Witnesses:
    def __init__(self, plane: Plane) -> None:
        self.plane = plane
        self.weights = plane.tmp / "weights"
        self.first = self.base(1)

    def base(self, seed: int) -> Path:
        return make_witness_model(self.weights / f"witness{seed}", seed)

    def adapter(self, seed: int) -> Path:
        return make_witness_adapter(self.first, self.weights / f"adapter{seed}", seed)

    def spawn(self, count: int, **options: Any) -> list[str]:
        started = [self.plane.spawn(ready=False, engine="hf", model=self.first, **options) for _ in range(count)]
        return [one.wait_ready(START_S).instance_id for one in started]


async def proven(http: httpx.AsyncClient, ids: list[str], base: int, **adapters: int) -> None:
    """Each worker serves this base and these adapters."""
    models: list[tuple[str | None, int | None]] = [(None, None), *adapters.items()]
    for one in ids:
        for model, seed in models:
            body = {
                "max_tokens": TOKENS,
                "temperature": 0,
                "return_token_ids": True,
                "nvext": {"instance_id": one},
            }
            reply = await ask(http, **body, **({"model": model} if model else {}), prompt_token_ids=PROMPT)
            (choice,) = reply["choices"]
            assert choice["token_ids"] == chain(PROMPT[-1], TOKENS, base, seed), (one, model)
            (span,) = choice["weight_versions"]
            assert span.get("adapter", {}).get("name") == model
    listed = (await http.get("/v1/models")).json()["data"]
    assert [model["id"] for model in listed][1:] == sorted(adapters)
