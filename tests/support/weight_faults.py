"""Wrong weights, made inside the process of one rank of a real engine right after it has swapped good ones in.

`init_transport` says which tensors of which rank shall be wrong after the next swaps. For `hf` the transport runs where
the model is; in the other engines it reaches the ranks as `rank_plugin` says.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from rl_plane.errors import EngineFailed
from rl_plane.transports.base import TransportContext
from tests.support import rank_plugin
from tests.support.rank_plugin import RankTransport
from worker.receive.rank_agents.agent_server import Method

BACKEND = "weight_faults"


def _vllm_parameters(holder: Any) -> Iterable[tuple[str, torch.Tensor]]:
    parameters: Iterable[tuple[str, torch.Tensor]] = holder._runner.get_model().named_parameters()
    return parameters


def _sglang_parameters(holder: Any) -> Iterable[tuple[str, torch.Tensor]]:
    parameters: Iterable[tuple[str, torch.Tensor]] = (
        holder._scheduler.tp_worker.model_runner.model.named_parameters()
    )
    return parameters


def _hf_parameters(weights: Any) -> Iterable[tuple[str, torch.Tensor]]:
    targets: Mapping[str, torch.Tensor] = weights.targets
    return targets.items()


SWAPS: dict[str, tuple[str, Callable[[Any], Iterable[tuple[str, torch.Tensor]]]]] = {
    "hf": ("worker.engines.common.torch_weights:ModelWeights.load", _hf_parameters),
    "sglang": ("worker.engines.sglang.holder:SglangHolder.swap", _sglang_parameters),
    "vllm": ("worker.engines.vllm.holder:VllmHolder.swap", _vllm_parameters),
}
"""Engine → the method by which a rank swaps staged weights in (`module:Class.method`), and what gives the parameters of
the object that has the method."""


def install(site: Path) -> None:
    """Installs the faults for processes that have `site` in their sys.path."""
    rank_plugin.install(site, BACKEND, __name__, WeightFaults.__name__)


def fault(engine: str, tensor: str, factor: float, *, rank: int = 0, swaps: int = 1) -> dict[str, Any]:
    """The body of an `init_transport`. After each of the next `swaps` swaps, `rank` multiplies the first of its tensors
    whose name contains `tensor` by `factor`. A factor of -1 flips the tensor."""
    what = {"engine": engine, "tensor": tensor, "factor": factor, "rank": rank, "swaps": swaps}
    return {"backend": BACKEND, "fault": what}


def register() -> None:
    """Adds the methods to the agent of a rank that starts in this process."""
    rank_plugin.add_methods(RankWeights().methods())


class RankWeights:
    """The faults of the rank that is in this process."""

    def __init__(self) -> None:
        self._left = 0
        """The number of swaps that shall still be wrong."""

    def methods(self) -> dict[str, Method]:
        return {
            "weight_fault": lambda body, cancelled: self.add(body["fault"]),
            "weight_faults_left": lambda body, cancelled: self.clear(),
        }

    def add(self, what: Mapping[str, Any]) -> None:
        if rank_plugin.rank() != what["rank"]:
            return
        place, parameters = SWAPS[what["engine"]]
        module, _, path = place.partition(":")
        kind, _, method = path.partition(".")
        owner = getattr(importlib.import_module(module), kind)
        really = getattr(getattr(owner, method), "really", getattr(owner, method))
        self._left = what["swaps"]

        def swap(holder: Any, *arguments: Any, **more: Any) -> Any:
            outcome = really(holder, *arguments, **more)
            if self._left:
                self._left -= 1
                _multiply(parameters(holder), what["tensor"], what["factor"])
            return outcome

        swap.really = really  # type: ignore[attr-defined]
        setattr(owner, method, swap)

    def clear(self) -> int:
        """Ends the faults. Returns how many swaps should still have been wrong."""
        left, self._left = self._left, 0
        return left


class WeightFaults(RankTransport):
    backend = BACKEND

    def __init__(self, places: TransportContext) -> None:
        super().__init__(places)
        self._here = RankWeights()
        """For `hf`, whose model is in this process."""
        self._in_ranks = False
        """Whether ranks have faults."""

    def init(self, config: Mapping[str, Any]) -> None:
        if config["fault"]["engine"] == "hf":
            self._here.add(config["fault"])
        else:
            self._in_ranks = True
            self.ranks.ask("weight_fault", {"fault": config["fault"]})

    def destroy(self) -> None:
        """EngineFailed where fewer swaps came than should be wrong."""
        left = self._here.clear()
        if self._in_ranks:
            left += sum(self.ranks.ask("weight_faults_left"))
        if left:
            raise EngineFailed(f"{left} more swaps should have been made wrong")


def _multiply(parameters: Iterable[tuple[str, torch.Tensor]], part: str, factor: float) -> None:
    """An engine may keep a tensor in packed form only. Such a parameter is empty."""
    with torch.no_grad():
        next(tensor for name, tensor in parameters if part in name and tensor.numel()).mul_(factor)
