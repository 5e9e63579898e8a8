"""What holds a rank's weights in the engines' processes, with stand-ins for the engines and for a GPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch

from worker.engines import sglang_holder
from worker.engines.hf_weights import StagedTensors
from worker.engines.rank_holder import RankHolder
from worker.engines.sglang_holder import SglangHolder
from worker.engines.vllm_holder import VllmHolder
from worker.tiny_model import make_tiny_model

GPU = torch.device("cuda", 1)


class Model(torch.nn.Linear):  # type: ignore[misc]
    """Puts what it loads in the place of what it had, as a layer does that quantizes its weights."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.loads = self._put

    def _put(self, tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            setattr(self, name, torch.nn.Parameter(tensor.clone(), requires_grad=False))

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.loads(dict(tensors))


class Runner:
    """Of either engine."""

    def __init__(self, device: torch.device) -> None:
        self.model, self.device, self.weight_updater = Model(), device, self
        self.model_config = SimpleNamespace(dtype=torch.bfloat16)
        self.server_args = SimpleNamespace(enable_lora=False)

    def reload_weights(self, weights_iterator: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.model.load_weights(weights_iterator)

    def begin_weight_update(self) -> None: ...

    def end_weight_update(self, run_post_load: bool) -> None: ...


def holder_of(kind: str, directory: Path, runner: Runner) -> Any:
    model = make_tiny_model(directory / "model", 1, "bfloat16")
    if kind == "vllm":
        return VllmHolder(model, directory, runner, 1)
    updater = SimpleNamespace(_select_runners=lambda: [("target", runner)])
    tp_worker = SimpleNamespace(model_runner=runner)
    return SglangHolder(model, SimpleNamespace(tp_worker=tp_worker, weight_updater=updater))


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_check_is_of_what_the_last_load_has_put_in_place(tmp_path: Path, kind: str) -> None:
    runner = Runner(torch.device("cpu"))
    holder, first = holder_of(kind, tmp_path, runner), runner.model.weight.detach().clone()
    before = holder.checks.checksum()
    holder.checks.snapshot()
    holder.swap(StagedTensors({"weight": first + 1}))
    assert holder.checks.checksum() != before
    assert holder.checks.compare() == ["weight"]
    holder.swap(StagedTensors({"weight": first, "scale": torch.ones(1)}))
    assert holder.checks.compare() == ["scale"]
    del runner.model.scale
    assert (holder.checks.checksum(), holder.checks.compare()) == (before, [])
    del runner.model.bias
    assert holder.checks.compare() == ["bias"]


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_weights_are_written_on_the_ranks_own_gpu_between_two_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Also where it is the agent's thread that writes."""
    calls: list[tuple[str, Any]] = []

    @contextmanager
    def on(device: torch.device) -> Iterator[None]:
        calls.append(("on", device))
        yield
        calls.append(("off", device))

    monkeypatch.setattr(sglang_holder, "model_device", lambda model: GPU)
    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: calls.append(("settled", device)))
    runner = Runner(GPU)
    holder: RankHolder = holder_of(kind, tmp_path, runner)
    monkeypatch.setattr(holder, "_copies", lambda tensors, cast, cancelled: tensors)
    runner.model.loads = lambda tensors: calls.append(("load", sorted(tensors)))
    written = [("on", GPU), ("settled", GPU), ("load", ["weight"]), ("settled", GPU), ("off", GPU)]
    new = {"weight": torch.ones(2, 2)}
    holder.swap(StagedTensors(new))
    assert calls == written
    calls.clear()
    holder.overwrite(list(new.items()), False, lambda: False)
    assert calls == written
