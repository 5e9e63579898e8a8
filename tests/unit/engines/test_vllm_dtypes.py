"""The types of parameters that a load of vLLM shows, with a stand-in for the model and its files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch

from worker.engines.vllm.dtypes import dtypes_of_load, watch_loads

SAVED = {
    "layers.0.a_proj.weight": torch.ones(2, 4, dtype=torch.bfloat16),
    "layers.0.b_proj.weight": torch.ones(2, 4, dtype=torch.bfloat16),
    "layers.0.router.bias": torch.ones(4, dtype=torch.float32),
    "layers.1.router.bias": torch.ones(4, dtype=torch.float32),
    "layers.1.experts.7.weight": torch.ones(4, 4, dtype=torch.bfloat16),
    "elsewhere": torch.ones(4, dtype=torch.float32),
}


class Model(torch.nn.Module):  # type: ignore[misc,unused-ignore]
    """One tensor has another name, one has other types, two are parts of one parameter, and two are on another rank."""

    def __init__(self) -> None:
        super().__init__()
        self.joined = torch.zeros(4, 4, dtype=torch.bfloat16)
        self.correction = torch.zeros(4, dtype=torch.float32)
        self.experts = torch.zeros(2, 4, 2, dtype=torch.float32)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            match name.removeprefix("layers."):
                case "0.a_proj.weight":
                    self.joined[:2].copy_(tensor)
                case "0.b_proj.weight":
                    self.joined[2:].copy_(tensor)
                case "0.router.bias":
                    self.correction.copy_(tensor)
                case "1.experts.7.weight":
                    self.experts[1].copy_(tensor.narrow(1, 2, 2))


@pytest.mark.engines("vllm")
@pytest.mark.filterwarnings("ignore:::(torch|vllm|transformers|multiprocessing)")  # theirs, not ours
def test_each_tensor_has_the_type_of_the_parameter_that_it_goes_to(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    def load(loader: Any, model: Any, config: Any) -> None:
        model.load_weights(loader.get_all_weights(config, model))

    def read(loader: Any, config: Any, model: Any) -> Iterator[tuple[str, torch.Tensor]]:
        yield from SAVED.items()

    monkeypatch.setattr(DefaultModelLoader, "load_weights", load)
    monkeypatch.setattr(DefaultModelLoader, "get_all_weights", read)
    watch_loads()
    loader: Any = object.__new__(DefaultModelLoader)
    loader.load_weights(Model(), None)
    assert dtypes_of_load() == {
        "layers.0.a_proj.weight": torch.bfloat16,
        "layers.0.b_proj.weight": torch.bfloat16,
        "layers.0.router.bias": torch.float32,
        "layers.1.router.bias": torch.float32,  # on another stage: as in the layer before
        "layers.1.experts.7.weight": torch.float32,
    }
