"""The weights and the adapters of the `hf` engine, as a Receiver stages and overwrites them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rl_plane._util.tasks import Cancelled
from rl_plane.errors import Unsupported
from rl_plane.protocol.versions import TensorSpec
from worker.engines.common.torch_weights import ModelWeights
from worker.engines.hf.peft_layers import NO_PEFT, ModelAdapters, have_peft
from worker.receive.weight_holder import TensorStream


class HfHolder(ModelWeights):
    def __init__(self, model: Any, saved: Mapping[str, TensorSpec], before_overwrite: Callable[[], None]) -> None:
        super().__init__(model, saved, before_overwrite)
        self.adapters = ModelAdapters(model, self.weight_spec())

    def adapter_spec(self, config: Mapping[str, Any]) -> Mapping[str, TensorSpec]:
        if not have_peft():
            raise Unsupported(NO_PEFT, field="target.kind", fix="install rl-plane[hf] beside the worker")
        return self.adapters.spec(config)

    def stage_adapter(self, config: Mapping[str, Any], tensors: TensorStream, cancelled: Cancelled) -> Any:
        return self.adapters.stage(config, tensors, cancelled)
