"""Partial versions on the `hf` engine: it loads only the tensors that came, and computes what a full load would."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.engine_runs import receive, reception, version
from tests.support.hf_engines import Start, start
from tests.support.moe import make_moe_model
from worker.engines.common.torch_weights import StagedTensors
from worker.engines.hf.holder import HfHolder
from worker.receive.staging import model_digest
from worker.testing.tiny_model import make_tiny_model

__all__ = ["start"]

pytestmark = pytest.mark.slow

PROMPT = [3, 5, 7, 9, 11, 13]


def dense(path: Path) -> Path:
    return make_tiny_model(path, 1)


def tied(path: Path) -> Path:
    return make_tiny_model(path, 1, tie_word_embeddings=True)


def experts(path: Path) -> Path:
    return make_moe_model(path, [0], 1)


KINDS: list[tuple[Callable[[Path], Path], tuple[str, ...]]] = [
    (dense, ("model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.up_proj.weight", "lm_head.weight")),
    (tied, ("model.embed_tokens.weight", "model.norm.weight")),
    (experts, ("model.layers.1.mlp.experts.3.up_proj.weight", "model.layers.2.mlp.gate.weight")),
]
"""The models, and the tensors that change: parts of what some models fuse, a tied pair, one expert, a router."""


def changed(model: Path, names: Collection[str]) -> tuple[Path, Path]:
    """The model with other values in these tensors: as a whole, and as a partial version."""
    tensors = load_file(model / "model.safetensors")
    torch.manual_seed(len(names))
    some = {
        name: (tensors[name].float() * (1 + torch.rand(tensors[name].shape))).to(tensors[name].dtype)
        for name in names
    }
    whole, part = model / "whole", model / "part"  # beneath the engine's weight root
    shutil.copytree(model, whole)
    save_file({**tensors, **some}, whole / "model.safetensors", metadata={"format": "pt"})
    part.mkdir()
    save_file(some, part / "model.safetensors")
    return whole, part


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor([PROMPT])).logits
    return found


@pytest.mark.parametrize(("make", "names"), KINDS, ids=[make.__name__ for make, _ in KINDS])
async def test_the_logits_are_those_of_a_full_load(
    make: Callable[[Path], Path],
    names: tuple[str, ...],
    start: Start,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from transformers import AutoModelForCausalLM

    model = make(tmp_path / "model")
    whole, part = changed(model, names)
    engine = await start(model)
    engine.set_version(version(0, model))
    loaded: list[set[str]] = []

    class Recorded(HfHolder):
        def load(self, staged: StagedTensors, names: Collection[str] | None = None) -> None:
            loaded.append(set(staged if names is None else names))
            super().load(staged, names)

    monkeypatch.setattr(engine.holder, "__class__", Recorded)
    before = logits(engine.model)

    async def update(path: Path, number: int, served: Path, **fields: Any) -> None:
        await engine.pause("keep", False)
        staging, reply = await receive(engine, reception(path, keep=True, **fields))
        assert reply["digest"] == model_digest(served)
        assert await engine.swap(staging, version(number, served)) is True
        await engine.resume()

    async def partial(number: int) -> None:
        digests = {"base": model_digest(model), "digest": model_digest(whole)}
        await update(part, number, whole, encoding="partial", **digests)

    await update(model, 1, model)
    assert loaded == [set(engine.receiver.weight_spec())]
    await partial(2)
    assert loaded[1:] == [set(names)]
    plain = AutoModelForCausalLM.from_pretrained(whole, dtype="auto", local_files_only=True).eval()
    after = logits(engine.model)
    assert not torch.equal(after, before)
    assert torch.equal(after, logits(plain))
    # A model whose weights are of no version loads everything.
    await update(model, 3, model)
    assert torch.equal(logits(engine.model), before)
    await engine.check_weights("reset_tensors")
    await partial(4)
    assert loaded[-1] == set(engine.receiver.weight_spec())
    assert torch.equal(logits(engine.model), after)
