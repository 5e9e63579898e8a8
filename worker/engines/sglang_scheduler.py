"""Our part inside SGLang's scheduler process, one for each rank: what is done between two steps.

The adapter asks for it by SGLang's own remote call, which every rank gets at the same place among its other
requests: the ranks of one model stay in step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rl_plane.errors import EngineFailed, PlaneError
from worker.engines.hf_weights import StagedTensors
from worker.engines.sglang_holder import SglangHolder, StagedAdapter
from worker.receiver import Receiver, load_transports
from worker.reception import Staged


class Rank:
    def __init__(self, scheduler: Any, model: Path, weight_roots: list[Path]) -> None:
        self._scheduler = scheduler
        self.holder = SglangHolder(model, scheduler)
        self.receiver = Receiver(self.holder, load_transports([*weight_roots, model]))
        self._taken: Staged | None = None
        self.outcome: PlaneError | None = None
        """Of the last call: what SGLang passes on is the first rank's alone."""

    def call(self, op: str, **arguments: Any) -> None:
        """On the scheduler's thread. Raises what it also keeps as the outcome."""
        self.outcome = None
        try:
            getattr(self, f"_{op}")(**arguments)
        except PlaneError as error:
            self.outcome = error
            raise
        except Exception as error:
            self.outcome = EngineFailed(f"{type(error).__name__}: {error}")
            raise self.outcome from error

    def _receive(self, path: str, staging: str, kind: Any = "base") -> None:
        from worker.reception import Reception

        self.receiver.open(Reception(staging, {"backend": "filesystem", "path": path}, kind=kind))
        self.receiver.receive(staging, lambda: False)

    def _ready(self, staging: str) -> None:
        """What may fail before anything is touched."""
        self._taken = self.receiver.take(staging)
        self._forget_cache()

    def _swap(self, key: str) -> None:
        staged, self._taken = self._taken, None
        assert isinstance(staged, StagedTensors), "base weights"
        self._relabel(key)
        self.holder.swap(staged)

    def _reset(self, key: str) -> None:
        self._forget_cache()
        self._relabel(key)
        self.holder.reset()

    def _put_adapter(self, staging: str, name: str, lora_id: str) -> None:
        staged = self.receiver.take(staging)
        assert isinstance(staged, StagedAdapter), "an adapter"
        self.holder.put_adapter(staged, name, lora_id)

    def _remove_adapter(self, name: str, lora_id: str) -> None:
        self.holder.remove_adapter(name, lora_id)

    def _relabel(self, key: str) -> None:
        self._scheduler.record_weight_version_change(new_version=key)

    def _forget_cache(self) -> None:
        """Running requests are to compute their KV anew: no KV of the weights that go is used by anybody."""
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        scheduler = self._scheduler
        if not scheduler._engine_paused:
            raise EngineFailed("the engine is not paused")
        scheduler.pause_generation(PauseGenerationReqInput(mode="retract"))
        if not scheduler.flush_cache():
            raise EngineFailed("SGLang refused to flush its cache")
