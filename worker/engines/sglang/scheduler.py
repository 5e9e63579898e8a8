"""Our part inside SGLang's scheduler process, one per rank: the work that happens between two steps.

The adapter calls it by SGLang's own remote call. Every rank gets a call at the same place among its other requests, so
the ranks of one model stay in step.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rl_plane._util.tasks import Cancelled
from rl_plane.errors import EngineFailed, PlaneError
from worker.engines.sglang.holder import SglangHolder, SglangStagedAdapter
from worker.engines.sglang.kept_kv import KeptKv
from worker.engines.sglang.pipeline import stands_still
from worker.engines.sglang.scorer import score_between_steps
from worker.receive.rank_agents.agent_server import AgentServer

LOOK_S = 0.5
"""Seconds between two looks at whether the adapter still waits for an outcome."""


class Rank:
    """`told`: what the adapter has put under `plugin.MARK`."""

    make_holder: Callable[[Path, Any], SglangHolder] = SglangHolder
    look_s = LOOK_S

    def __init__(self, scheduler: Any, told: Mapping[str, Any]) -> None:
        model = Path(told["model"])
        self._scheduler = scheduler
        self._holder = self.make_holder(model, scheduler)
        self._kept = KeptKv(scheduler)
        self._outcome: dict[str, Any] = {}
        """The result of the last call, or its `error`: SGLang passes on the first rank's error alone, and only as
        text."""
        self._called = 0
        """The number of the last call that has ended."""
        self._ended = threading.Condition()
        rank, directory = _number(), Path(told["directory"])
        methods = self._holder.agent_methods(directory, rank)
        methods |= {"outcome": self._tell_outcome}
        self._agent = AgentServer.of_rank(directory, rank, methods)

    def serve(self) -> None:
        self._agent.start()

    def call(self, op: str, call: str, **arguments: Any) -> None:
        """Runs on the scheduler's thread. Raises the error that it also stores as the outcome. `call`: the number by
        which the adapter asks for the outcome."""
        try:
            self._run(op, arguments)
        finally:
            with self._ended:
                self._called = int(call)
                self._ended.notify_all()

    def _run(self, op: str, arguments: dict[str, Any]) -> None:
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
        with self._ended:
            while body["call"] > self._called and not cancelled():
                self._ended.wait(self.look_s)
        return self._outcome

    # between two steps

    def _stands_still(self) -> dict[str, Any]:
        return {"still": stands_still(self._scheduler)}

    def _updatable(self) -> None:
        self._holder.check_updates()

    def _ready(self) -> None:
        """Does everything that may fail before the weights are touched."""
        self._holder.check_updates()
        self._forget_cache()

    def _swap(self, key: str) -> dict[str, Any]:
        self._relabel(key)
        return {"copied": self._holder.swap()}

    def _reset(self, key: str) -> None:
        self._forget_cache()
        self._relabel(key)
        self._holder.reset()

    def _score(self, sequences: str) -> dict[str, Any]:
        """Running requests keep their KV, if it leaves room for the sequences.

        `sequences`: as JSON, since SGLang's remote call takes flat arguments only."""
        asked = json.loads(sequences)
        room = self._kept.room_for(asked)
        if forgets := not room:
            self._forget_cache()
            room = self._scheduler.max_total_num_tokens
        return {"scores": score_between_steps(self._scheduler, asked, room), "forgot": forgets}

    def _keep(self, salt: str) -> dict[str, Any]:
        return {"kept": self._kept.keep(salt)}

    def _put_adapter(self, staging: str, name: str, lora_id: str) -> None:
        staged = self._holder.take_adapter(staging)
        assert isinstance(staged, SglangStagedAdapter), "an adapter"
        self._holder.put_adapter(staged, name, lora_id)

    def _remove_adapter(self, lora_id: str) -> None:
        self._holder.remove_adapter(lora_id)

    def _put_back_adapter(self, lora_id: str) -> None:
        self._holder.put_back_adapter(lora_id)

    def _forget_adapter(self, lora_id: str) -> None:
        self._holder.forget_adapter(lora_id)

    def _relabel(self, key: str) -> None:
        """Labels the tokens that follow as those of other weights."""
        self._scheduler.record_weight_version_change(new_version=key)

    def _forget_cache(self) -> None:
        """Makes running requests compute their KV again: no request uses KV of the old weights."""
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        scheduler = self._scheduler
        if not stands_still(scheduler):
            raise EngineFailed("the engine is not paused")
        scheduler.pause_generation(PauseGenerationReqInput(mode="retract"))
        if not scheduler.flush_cache():
            raise EngineFailed("SGLang refused to flush its cache")


def _number() -> int:
    """The number of this rank among all ranks of the engine."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    before = int(parallel.dp_rank or 0) * parallel.pp_size * parallel.tp_size
    return int(before + parallel.pp_rank * parallel.tp_size + parallel.tp_rank)
