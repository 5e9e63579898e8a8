"""Faults of one rank of an engine, made inside the process that has it (see `rank_plugin`). `init_transport` says which
rank shall fail, and where."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from rl_plane.errors import EngineFailed
from tests.support import rank_plugin
from tests.support.rank_plugin import RankTransport
from worker.receive.rank_agents.agent_server import Method

Change = Literal["swap", "unload"]
"""A change of an adapter."""

_SGLANG = "sglang.srt.lora.lora_manager:LoRAManager"
_VLLM = "vllm.lora.model_manager:LRUCacheLoRAModelManager"
PLACES: dict[str, dict[Change, str]] = {
    "vllm": {"swap": f"{_VLLM}.add_adapter", "unload": f"{_VLLM}.remove_adapter"},
    "sglang": {"swap": f"{_SGLANG}.unload_lora_adapter", "unload": f"{_SGLANG}.unload_lora_adapter"},
}
"""The function of each engine that makes the change, in each rank and not in its steps."""
PUTS_BACK = {"vllm": f"{_VLLM}.add_adapter", "sglang": f"{_SGLANG}.unload_lora_adapter"}
"""The function that undoes the change."""

BACKEND = "faults"


def install(site: Path) -> None:
    """Installs the faults for processes that have `site` in their sys.path."""
    rank_plugin.install(site, BACKEND, __name__, Faults.__name__)


def fault(rank: int, place: str, *, done: bool, times: int = 1) -> dict[str, Any]:
    """For `init_transport`. `place`: `module:Class.method`, which raises so many times in this rank. `done`: when it
    has done what it should."""
    what = {"rank": rank, "place": place, "done": done, "times": times}
    return {"backend": BACKEND, "fault": what}


def faults_for_good(engine: str, change: Change, rank: int) -> list[dict[str, Any]]:
    """The change fails in this rank, and so does what would undo it."""
    places = Counter([PLACES[engine][change], PUTS_BACK[engine]])
    return [fault(rank, place, done=True, times=times) for place, times in places.items()]


def register() -> None:
    """Adds the methods to the agent of a rank that starts in this process."""
    rank_plugin.add_methods(RankFaults().methods())


class RankFaults:
    """The faults of one rank."""

    def __init__(self) -> None:
        self._left: dict[str, int] = {}
        """Place → how often it fails yet."""

    def methods(self) -> dict[str, Method]:
        return {
            "fault": lambda body, cancelled: self.add(body["fault"]),
            "faults_left": lambda body, cancelled: {place: times for place, times in self._left.items() if times},
        }

    def add(self, what: Mapping[str, Any]) -> None:
        place = what["place"]
        if rank_plugin.rank() != what["rank"]:
            return
        module, _, path = place.partition(":")
        kind, _, method = path.partition(".")
        owner = getattr(importlib.import_module(module), kind)
        really = getattr(getattr(owner, method), "really", getattr(owner, method))
        self._left[place] = what["times"]

        def faulty(*arguments: Any, **more: Any) -> Any:
            if not self._left[place]:
                return really(*arguments, **more)
            self._left[place] -= 1
            if what["done"]:
                really(*arguments, **more)
            raise RuntimeError(f"no {method}")

        faulty.really = really  # type: ignore[attr-defined]
        setattr(owner, method, faulty)


class Faults(RankTransport):
    """The transport, in the host agent."""

    backend = BACKEND

    def init(self, config: Mapping[str, Any]) -> None:
        self.ranks.ask("fault", {"fault": config["fault"]})

    def destroy(self) -> None:
        """EngineFailed where something has not failed as often as it should."""
        for left in self.ranks.ask("faults_left"):
            if left:
                raise EngineFailed(f"it did not come to these faults: {left}")
