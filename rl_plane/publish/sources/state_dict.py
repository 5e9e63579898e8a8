"""The weights of a state dict."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from rl_plane.errors import InvalidRequest
from rl_plane.publish.sources.base import Names, Taken
from rl_plane.publish.sources.torch_tensors import is_gathered, stated_collective, take_held, take_state

if TYPE_CHECKING:
    import torch


class StateDictSource:
    """A mapping of name to tensor, or a function that makes one for each version."""

    adapter = False

    def __init__(
        self,
        state: Mapping[str, torch.Tensor] | Callable[[], Mapping[str, torch.Tensor]],
        *,
        dtype: torch.dtype | None = None,
        names: Names = None,
        collective: bool | None = None,
    ) -> None:
        """`collective`: True if every rank has to take part. None: it follows from the tensors. For a function it must
        be given where the trainer has several ranks."""
        self._state = state
        self._dtype = dtype
        self._names = names
        if callable(state):
            self.collective = stated_collective(collective)
            return
        if any(hasattr(tensor, "local_shards") for tensor in state.values()):
            raise InvalidRequest(
                "a sharded state dict of FSDP1 is a copy: the next version would send the same weights again",
                field="state",
                fix="give the module, or a function that makes the state dict, with collective=True",
            )
        self.collective = any(map(is_gathered, state.values())) if collective is None else collective

    def take(self) -> Taken:
        if callable(self._state):  # it may make new tensors each time, so none can be read in place
            return take_state(self._state(), self._dtype, self._names)
        return take_held(self._state, self._dtype, self._names)
