"""A WeightHolder for engines without adapters and without tied tensors: subclass it, and implement the rest."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from rl_plane._util.tasks import Cancelled
from rl_plane.errors import Unsupported
from rl_plane.protocol.versions import TensorSpec
from worker.receive.weight_holder import Staged, TensorStream


class BaseWeights(ABC):
    @abstractmethod
    def weight_spec(self) -> Mapping[str, TensorSpec]:
        """Every tensor that a full checkpoint must hold, by its checkpoint name."""

    @abstractmethod
    def stage(self, tensors: TensorStream, cancelled: Cancelled) -> Staged:
        """Copies the tensors into host memory while generation continues. Their names, shapes and dtypes have been
        checked. If the update allows a cast, the dtypes may differ from the spec. Raises EngineFailed when
        `cancelled()`."""

    @abstractmethod
    def overwrite(self, tensors: TensorStream, cancelled: Cancelled) -> None:
        """Writes the tensors over the served weights as they arrive. The engine is paused. When this raises, its
        weights are of no version."""

    def tied_tensors(self) -> Mapping[str, str]:
        return {}

    def adapter_spec(self, config: Mapping[str, Any]) -> Mapping[str, TensorSpec]:
        raise Unsupported("this engine has no LoRA", field="target.kind", fix="publish base weights")

    def stage_adapter(self, config: Mapping[str, Any], tensors: TensorStream, cancelled: Cancelled) -> Staged:
        raise Unsupported("this engine has no LoRA", field="target.kind", fix="publish base weights")
