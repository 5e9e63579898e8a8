"""The weights of the `fake` engine, as a Receiver stages and overwrites them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from rl_plane._util.tasks import Cancelled
from rl_plane.errors import EngineFailed
from rl_plane.protocol.hashers import hex_digest
from rl_plane.protocol.versions import DEFAULT_ALGORITHM, HostTensor, TensorSpec, algorithm_of
from worker.engines.common.lora import lora_spec, parse_lora, target_modules
from worker.engines.fake.config import FakeConfig
from worker.engines.fake.fake_model import FakeAdapter, FakeTensor, FakeWeights, linear_modules
from worker.receive.weight_holder import TensorStream, WeightHolder

STEP_S = 0.02
"""Seconds between two looks for a cancel during a delay on a thread."""


class HeldWeights(Protocol):
    """The part of a FakeEngine that its holder reads and writes."""

    config: FakeConfig

    def weight_spec(self) -> Mapping[str, TensorSpec]: ...

    def half_written(self) -> AbstractContextManager[dict[str, FakeTensor]]:
        """Gives the served tensors, to be overwritten one by one: weights of no version. Raises EngineFailed if the
        engine is not paused."""


class FakeHolder(WeightHolder):
    def __init__(self, engine: HeldWeights) -> None:
        self._engine = engine

    def weight_spec(self) -> Mapping[str, TensorSpec]:
        return self._engine.weight_spec()

    def stage(self, tensors: TensorStream, cancelled: Cancelled) -> FakeWeights:
        return FakeWeights(self._taken(tensors, cancelled))

    def overwrite(self, tensors: TensorStream, cancelled: Cancelled) -> None:
        """Waits `stage_delay_s` before the first tensor, as `stage` does."""
        with self._engine.half_written() as mixed:
            self._delay(cancelled)
            for name, tensor in tensors:
                if cancelled():
                    raise EngineFailed("the overwrite was cancelled")
                mixed[name] = self._copied(tensor)
                if self._engine.config.fail_overwrite:
                    raise EngineFailed("fail_overwrite is set")
            if cancelled():
                raise EngineFailed("the overwrite was cancelled")

    def adapter_spec(self, config: Mapping[str, Any]) -> Mapping[str, TensorSpec]:
        specs = self.weight_spec()
        lora, linear = parse_lora(config), linear_modules(specs)
        dtypes = {module: specs[f"{module}.weight"].dtype for module in linear}
        return lora_spec(lora, target_modules(lora, linear), linear, dtypes)

    def stage_adapter(self, config: Mapping[str, Any], tensors: TensorStream, cancelled: Cancelled) -> FakeAdapter:
        return FakeAdapter(self._taken(tensors, cancelled), config)

    def _taken(self, tensors: TensorStream, cancelled: Cancelled) -> dict[str, FakeTensor]:
        self._delay(cancelled)
        if self._engine.config.fail_stage:
            raise EngineFailed("fail_stage is set")
        config = self._engine.config
        staged, room = {}, config.staging_bytes
        for name, tensor in tensors:
            if cancelled():
                raise EngineFailed("staging was cancelled")
            room -= tensor.spec.nbytes
            if room < 0:
                raise EngineFailed(f"there are more than {config.staging_bytes} bytes to stage")
            staged[name] = self._copied(tensor)
        if cancelled():
            raise EngineFailed("staging was cancelled")
        return staged

    def _delay(self, cancelled: Cancelled) -> None:
        deadline = time.monotonic() + self._engine.config.stage_delay_s
        while not cancelled() and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(STEP_S, left))

    def _copied(self, tensor: HostTensor) -> FakeTensor:
        # Hashed here, too: a token must tell which bytes are really in the engine.
        algorithm = algorithm_of(tensor.digest) if tensor.digest is not None else DEFAULT_ALGORITHM
        data = bytearray(tensor.data) if self._engine.config.hold_bytes else None
        return FakeTensor(tensor.spec, hex_digest(tensor.data, algorithm), data)
