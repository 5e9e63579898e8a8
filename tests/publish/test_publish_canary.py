"""The canary of a WeightPublisher: the trainer's own model says what the engines must compute."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from rl_plane.errors import CanaryFailed, InvalidRequest
from rl_plane.publish import DirectorySource, ModuleSource, WeightPublisher, expected_logprobs
from worker.testing.tiny_model import make_witness_model

if TYPE_CHECKING:
    from torch.nn import Module

    from tests.conftest import Plane
else:
    Module = torch.nn.Module

SEQUENCES = [[3, 5, 7, 9], [11, 13]]
START_S = 150.0
POLICY = {"gate_timeout_s": 60.0}
"""A worker that is late at the gate, on a busy machine, takes the version by itself, and the answer has no values."""


class Toy(Module):  # type: ignore[misc]
    """A bigram model with one layer that computes something else in train mode, and another layer that stays in eval
    mode."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(16, 16)
        self.noise = torch.nn.Dropout(0.5)
        self.frozen = torch.nn.Dropout(0.5).eval()

    def forward(self, input_ids: Any) -> Any:
        return self.frozen(self.noise(self.table(input_ids)))


def load(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def refusal(source: Any, **options: Any) -> dict[str, Any]:
    with pytest.raises(InvalidRequest) as caught:
        WeightPublisher(source, "nats://127.0.0.1:9", **options)
    return caught.value.facts


def test_the_expected_values_are_those_of_eval_mode_and_each_module_gets_its_mode_back() -> None:
    model = Toy()
    found = expected_logprobs(model, SEQUENCES)
    scores = torch.log_softmax(model.table.weight.detach().float(), dim=-1)
    wanted = [[float(scores[one, two]) for one, two in itertools.pairwise(row)] for row in SEQUENCES]
    for row, other in zip(found, wanted, strict=True):
        assert row == pytest.approx(other, abs=1e-6)
    assert (model.training, model.noise.training, model.frozen.training) == (True, True, False)
    assert model.table.weight.grad is None


def test_a_canary_that_can_not_be_computed_is_refused_with_its_fix(tmp_path: Path) -> None:
    model = Toy()
    assert refusal(ModuleSource(model), canary=[[1]])["field"] == "canary.sequences.0"
    assert refusal(ModuleSource(model), canary="on")["field"] == "canary.sequences"
    assert refusal(ModuleSource(model), canary=[3, 5, 7])["field"] == "canary.sequences.0"
    assert refusal(ModuleSource(model), canary=SEQUENCES, policy={"canary": "off"})["field"] == "canary"
    assert refusal(ModuleSource(model), tolerance=0.1)["field"] == "tolerance"
    facts = refusal(DirectorySource(tmp_path), canary=SEQUENCES)
    assert facts["field"] == "canary"
    assert "canary(model, version)" in facts["fix"]
    sharded = ModuleSource(model)
    sharded.collective = True
    assert "expected_logprobs" in refusal(sharded, canary=SEQUENCES)["fix"]


def test_a_token_outside_the_vocabulary_is_refused_before_the_model_computes() -> None:
    model = Toy()
    model.config = SimpleNamespace(vocab_size=model.table.num_embeddings)
    with pytest.raises(InvalidRequest) as caught:
        expected_logprobs(model, [[1, 2], [1, model.table.num_embeddings]])
    assert caught.value.facts["field"] == "canary.sequences.1.1"


@pytest.mark.timeout(300)
@pytest.mark.slow
@pytest.mark.parallel
async def test_the_trainers_model_judges_what_an_engine_computes(plane: Plane) -> None:
    paths = [make_witness_model(plane.tmp / "weights" / f"seed{seed}", seed) for seed in range(3)]
    spawned = plane.spawn(ready=False, engine="hf", model=paths[0])
    await asyncio.to_thread(spawned.wait_ready, START_S)
    client = await plane.client()
    one, two = load(paths[1]), load(paths[2])
    root = plane.tmp / "weights" / "published"
    async with WeightPublisher(one, client, root=root, policy=POLICY, canary=SEQUENCES) as publisher:
        reply = (await publisher.publish_async("one")).result()
        assert reply["canary"]["against"] == "trainer"
        assert 0 <= reply["canary"]["difference"] < 1e-3
        assert reply["canary"]["mismatch_kl"] < 1e-4

    def other(model: Any, version: str | None) -> dict[str, Any]:
        assert (model, version) == (one, "wrong")
        return {"sequences": SEQUENCES, "expected": expected_logprobs(two, SEQUENCES)}

    async with WeightPublisher(one, client, root=root, policy=POLICY, canary=other, tolerance=0.02) as publisher:
        with pytest.raises(CanaryFailed) as caught:
            await publisher.publish_async("wrong")
    assert caught.value.facts["canary"]["tolerance"] == 0.02
    assert caught.value.facts["version"]["label"] == "one"
    async with WeightPublisher(
        one, client, root=root, policy=POLICY, canary=other, on_canary_failure="warn"
    ) as publisher:
        reply = (await publisher.publish_async("wrong")).result()
        assert "warning" in reply["canary"]
    async with WeightPublisher(one, client, root=root, policy=POLICY, canary="off") as publisher:
        reply = (await publisher.publish_async("off")).result()
        assert "canary" not in reply
