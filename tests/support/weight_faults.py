"""Wrong weights, made inside the process of one rank of a real engine right after it has swapped good ones in.

Test support only. It is installed as a third party's transport is, and brings nothing: its `init_transport` reaches
every rank and says which tensors of which rank shall be wrong after the next swaps.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from rl_plane.errors import EngineFailed
from rl_plane.transports.base import TransportContext

BACKEND = "weight_faults"
_METADATA = "Metadata-Version: 2.1\nName: weight-faults\nVersion: 0\n"
_ENTRY_POINTS = f"[rl_plane.transports]\n{BACKEND} = tests.support.weight_faults:WeightFaults\n"


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
    installed = site / "weight_faults-0.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text(_METADATA)
    (installed / "entry_points.txt").write_text(_ENTRY_POINTS)


def fault(engine: str, tensor: str, factor: float, *, rank: int = 0, swaps: int = 1) -> dict[str, Any]:
    """The body of an `init_transport`. After each of the next `swaps` swaps, `rank` multiplies the first of its tensors
    whose name contains `tensor` by `factor`. A factor of -1 flips the tensor."""
    what = {"engine": engine, "tensor": tensor, "factor": factor, "rank": rank, "swaps": swaps}
    return {"backend": BACKEND, "fault": what}


class WeightFaults:
    backend = BACKEND

    def __init__(self, places: TransportContext) -> None:
        self._left = 0

    def init(self, config: Mapping[str, Any]) -> None:
        what = config["fault"]
        if _rank() != what["rank"]:
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

    def destroy(self) -> None:
        """EngineFailed where fewer swaps came than should be wrong."""
        left, self._left = self._left, 0
        if left:
            raise EngineFailed(f"{left} more swaps should have been made wrong")

    def open(self, request: Mapping[str, Any], kind: str) -> Any:
        raise NotImplementedError


def _rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def _multiply(parameters: Iterable[tuple[str, torch.Tensor]], part: str, factor: float) -> None:
    """An engine may keep a tensor in packed form only. Such a parameter is empty."""
    with torch.no_grad():
        next(tensor for name, tensor in parameters if part in name and tensor.numel()).mul_(factor)
