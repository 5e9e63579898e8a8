"""Our part inside SGLang's scheduler process, one for each rank: what is done between two steps.

The adapter asks for it by SGLang's own remote call, which every rank gets at the same place among its other
requests: the ranks of one model stay in step.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_plane.errors import EngineFailed, PlaneError
from rl_plane.transports.receiver_base import Places
from rl_plane.transports.reception import Cancelled, Staged
from worker.engines.common.torch_weights import StagedTensors
from worker.engines.sglang.holder import SglangHolder, StagedAdapter, model_device
from worker.engines.sglang.scorer import score_between_steps
from worker.receive.rank_agents.agent_server import AgentServer, receiver_methods
from worker.receive.weight_receiver import Receiver, load_transports


class Rank:
    """`told`: by the adapter, see `plugin.MARK`."""

    def __init__(self, scheduler: Any, told: Mapping[str, Any]) -> None:
        model = Path(told["model"])
        self._scheduler = scheduler
        self._holder = SglangHolder(model, scheduler)
        device = str(model_device(scheduler.tp_worker.model_runner.model))
        self._receiver = Receiver(self._holder, load_transports(Places.from_wire(told["places"]), device))
        self._taken: Staged | None = None
        self._outcome: dict[str, Any] = {}
        """What the last call gave, or its `error`: SGLang passes on the first rank's error alone, and of that the
        words."""
        rank = _number()
        methods = receiver_methods(self._receiver, rank) | {"check": self._check, "outcome": self._tell_outcome}
        self._agent = AgentServer(Path(told["directory"]), rank, methods)

    def serve(self) -> None:
        self._agent.start()

    def call(self, op: str, **arguments: Any) -> None:
        """On the scheduler's thread. Raises what it also keeps in the outcome."""
        try:
            self._outcome = getattr(self, f"_{op}")(**arguments) or {}
        except PlaneError as error:
            self._outcome = {"error": error.to_wire()}
            raise
        except Exception as error:
            failure = EngineFailed(f"{type(error).__name__}: {error}")
            self._outcome = {"error": failure.to_wire()}
            raise failure from error

    def _tell_outcome(self, body: Mapping[str, Any], cancelled: Cancelled) -> dict[str, Any]:
        return self._outcome

    def _check(self, body: Mapping[str, Any], cancelled: Cancelled) -> dict[str, Any]:
        return self._holder.checks.row(body["action"])

    # between two steps

    def _updatable(self) -> None:
        self._holder.check_updates()

    def _ready(self, staging: str) -> None:
        """What may fail before anything is touched."""
        self._holder.check_updates()
        self._taken = self._receiver.take(staging)
        self._forget_cache()

    def _swap(self, key: str) -> None:
        staged, self._taken = self._taken, None
        assert isinstance(staged, StagedTensors), "base weights"
        self._relabel(key)
        self._holder.swap(staged)

    def _reset(self, key: str) -> None:
        self._forget_cache()
        self._relabel(key)
        self._holder.reset()

    def _score(self, sequences: str, lora_id: str) -> dict[str, Any]:
        """`sequences`: as JSON, since SGLang's remote call takes flat arguments only. `lora_id`: empty for the base."""
        self._forget_cache()
        return {"scores": score_between_steps(self._scheduler, json.loads(sequences), lora_id or None)}

    def _put_adapter(self, staging: str, name: str, lora_id: str) -> None:
        staged = self._receiver.take(staging)
        assert isinstance(staged, StagedAdapter), "an adapter"
        self._holder.put_adapter(staged, name, lora_id)

    def _remove_adapter(self, lora_id: str) -> None:
        self._holder.remove_adapter(lora_id)

    def _put_back_adapter(self, lora_id: str) -> None:
        self._holder.put_back_adapter(lora_id)

    def _forget_adapter(self, lora_id: str) -> None:
        self._holder.forget_adapter(lora_id)

    def _relabel(self, key: str) -> None:
        """What is made from now on is by other weights."""
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


def _number() -> int:
    """Of this rank among all of the model."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return int(parallel.pp_rank * parallel.tp_size + parallel.tp_rank)
