"""The weights of the `hf` engines, as a Receiver stages and overwrites them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rl_plane._util.tasks import Cancelled
from rl_plane.errors import Unsupported
from rl_plane.protocol.versions import TensorSpec
from worker.engines.common.torch_weights import ModelWeights, StagedTensors
from worker.engines.hf.peft_layers import NO_PEFT, HfStagedAdapter, ModelAdapters, have_peft
from worker.receive.weight_holder import TensorStream, WeightHolder


class HfBaseHolder(WeightHolder):
    """A WeightHolder without adapters. `forget_weights()` says that the weights are of no version from here on."""

    def __init__(self, weights: ModelWeights, forget_weights: Callable[[], None]) -> None:
        self.weights = weights
        self._forget_weights = forget_weights

    def weight_spec(self) -> Mapping[str, TensorSpec]:
        return self.weights.spec

    def tied_tensors(self) -> Mapping[str, str]:
        return self.weights.tied

    def stage(self, tensors: TensorStream, cancelled: Cancelled) -> StagedTensors:
        return self.weights.stage(tensors, cancelled)

    def overwrite(self, tensors: TensorStream, cancelled: Cancelled) -> None:
        self._forget_weights()
        self.weights.overwrite(tensors, cancelled)


class HfHolder(HfBaseHolder):
    """A WeightHolder with adapters."""

    def __init__(self, weights: ModelWeights, adapters: ModelAdapters, forget_weights: Callable[[], None]) -> None:
        super().__init__(weights, forget_weights)
        self.adapters = adapters

    def adapter_spec(self, config: Mapping[str, Any]) -> Mapping[str, TensorSpec]:
        if not have_peft():
            raise Unsupported(NO_PEFT, field="target.kind", fix="install rl-plane[hf] beside the worker")
        return self.adapters.spec(config)

    def stage_adapter(
        self, config: Mapping[str, Any], tensors: TensorStream, cancelled: Cancelled
    ) -> HfStagedAdapter:
        return self.adapters.stage(config, tensors, cancelled)
