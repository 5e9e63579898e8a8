"""Records which experts the `hf` engine sends each token to: transformers' routers hand them to their layer's
experts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from rl_plane.protocol.routed_experts import RoutedExperts, width_of

_LAYER = re.compile(r"\.layers\.(\d+)\..*\bexperts$")


class Sent:
    """The experts of the tokens of one forward."""

    def __init__(self, layers: int, experts: int) -> None:
        self.by_layer: dict[int, torch.Tensor] = {}
        self._layers = layers
        self._width = width_of(experts)

    def rows(self, place: slice) -> RoutedExperts:
        """The rows of these tokens. A layer without experts has zeros."""
        some = next(iter(self.by_layer.values()))[place]
        count, top_k = some.shape
        found = torch.zeros((count, self._layers, top_k), dtype=torch.uint8 if self._width == 1 else torch.uint16)
        for layer, chosen in self.by_layer.items():
            found[:, layer] = chosen[place].to("cpu", found.dtype)
        return RoutedExperts(layers=self._layers, top_k=top_k, width=self._width, data=found.numpy().tobytes())


class ExpertRecorder:
    """Hooks into the experts of a model, and records while `recording` is entered."""

    def __init__(self, model: Any) -> None:
        self.experts = 0
        """The largest number of experts of a layer. 0: the model has none."""
        self._layers = int(model.config.get_text_config().num_hidden_layers)
        self._sent: Sent | None = None  # None: no request asks
        for name, module in model.named_modules():
            # Experts take (hidden states, chosen experts, weights of the experts).
            if (found := _LAYER.search(f".{name}")) and isinstance(
                count := getattr(module, "num_experts", None), int
            ):
                self.experts = max(self.experts, count)
                module.register_forward_pre_hook(self._hook(int(found[1])))

    def _hook(self, layer: int) -> Any:
        def take(module: Any, arguments: tuple[Any, ...]) -> None:
            if self._sent is not None:
                self._sent.by_layer[layer] = arguments[1]

        return take

    @contextmanager
    def recording(self) -> Iterator[Sent]:
        """Records one forward."""
        sent = self._sent = Sent(self._layers, self.experts)
        try:
            yield sent
        finally:
            self._sent = None
