"""The WeightHolder of the host agent: it holds no model. The ranks have that, and load what is staged here."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_plane._util.tasks import Cancelled
from rl_plane.errors import EngineFailed, PlaneError
from rl_plane.protocol.versions import TensorSpec
from worker.receive.host_agent.windows import WINDOW_BYTES, Windows
from worker.receive.rank_agents.agent_client import CANCEL_WAIT_S, AgentClient
from worker.receive.rank_agents.model_description import ModelDescription, specs_from_wire
from worker.receive.weight_holder import TensorStream

OVERWRITE_S = 86_400.0
"""A day. The caller of an update in place cancels it much earlier; this only ensures that no thread waits for ever."""


@dataclass(frozen=True, slots=True)
class HostStaged:
    """A fact about staged weights that a rank must know, beside their bytes."""

    config: Mapping[str, Any] | None
    """The PEFT config of an adapter; None for base weights."""


class HostHolder:
    """A WeightHolder for the ranks of one engine, whose sockets are in `directory`."""

    def __init__(self, directory: Path, model: ModelDescription, window_bytes: int = WINDOW_BYTES) -> None:
        self._model = model
        self._window_bytes = window_bytes
        self._ranks = AgentClient.of_ranks(directory, model.ranks, first=model.first)
        self._first = AgentClient.of_ranks(directory, 1, first=model.first)
        self.windows: Windows | None = None
        """The windows of the update in place that is under way."""

    def weight_spec(self) -> Mapping[str, TensorSpec]:
        return self._model.tensors

    def tied_tensors(self) -> Mapping[str, str]:
        return self._model.tied

    def stage(self, tensors: TensorStream, cancelled: Cancelled) -> HostStaged:
        _read(tensors, cancelled)
        return HostStaged(None)

    def adapter_spec(self, config: Mapping[str, Any]) -> Mapping[str, TensorSpec]:
        (spec,) = self._first.ask("adapter_spec", {"config": dict(config)})
        return specs_from_wire(spec)

    def stage_adapter(self, config: Mapping[str, Any], tensors: TensorStream, cancelled: Cancelled) -> HostStaged:
        _read(tensors, cancelled)
        return HostStaged(config)

    def overwrite(self, tensors: TensorStream, cancelled: Cancelled) -> None:
        """Passes the tensors to all ranks, which load them as they come. Returns when all of them have."""
        windows = self.windows = Windows(self._model.ranks, self._window_bytes)
        errors: list[PlaneError] = []
        failed = threading.Event()

        def load() -> None:
            try:
                self._ranks.ask("overwrite", cancelled=failed.is_set, timeout_s=OVERWRITE_S)
            except PlaneError as error:
                errors.append(error)

        def check() -> None:
            if errors:
                raise errors[0]
            if not loading.is_alive():
                raise EngineFailed("the ranks ended the overwrite before all weights had come")
            if cancelled():
                raise EngineFailed("the overwrite was cancelled")

        loading = threading.Thread(target=load, name="overwrite", daemon=True)
        loading.start()
        try:
            for name, tensor in tensors:
                windows.put(name, tensor, check)
            windows.end(check)
            while loading.is_alive():
                loading.join(0.5)
                if cancelled():
                    raise EngineFailed("the overwrite was cancelled")
            if errors:
                raise errors[0]
        except BaseException as error:
            windows.fail(
                error if isinstance(error, PlaneError) else EngineFailed(f"{type(error).__name__}: {error}")
            )
            failed.set()
            loading.join(2 * CANCEL_WAIT_S)
            raise
        finally:
            self.windows = None


def _read(tensors: TensorStream, cancelled: Cancelled) -> None:
    """Reads the stream to its end: the receiver puts each tensor into the staging area."""
    for _ in tensors:
        if cancelled():
            raise EngineFailed("staging was cancelled")
