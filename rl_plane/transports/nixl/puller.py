"""The agent of a receiver, with the memory into which it reads."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rl_plane.transports.nixl.wire import RegisteredMemory, make_agent


@dataclass(frozen=True, slots=True)
class _RegisteredPlace:
    owner: Callable[[], Any]
    """Returns the object that owns the memory. None: it is gone."""
    registered: Any


class Puller:
    """An agent with its registered memory: buffers of its own, and the memory of places.

    The memory of places stays registered for the next update, which often has the same places: with RDMA, registering
    takes as long as reading. Between two updates this object does not keep that memory from being freed."""

    def __init__(self, host: str) -> None:
        """`host`: this machine's address on the network of the source."""
        self.host = host
        self.agent = make_agent(host)
        # After the agent, so that this memory is freed after it: until the agent has ended, bytes may still arrive.
        self._buffers: list[RegisteredMemory] = []
        self._owners: Sequence[Any] = ()
        self._places: dict[int, _RegisteredPlace] = {}
        """The registered memory. The key is the `id` of the object that owns the memory."""

    def buffers(self, count: int, nbytes: int) -> Sequence[RegisteredMemory]:
        if len(self._buffers) < count or self._buffers[0].nbytes < nbytes:
            for memory in self._buffers:
                self.agent.deregister_memory(memory.registered)
            self._buffers.clear()  # first, to make room in memory
            self._buffers = [RegisteredMemory(self.agent, nbytes) for _ in range(count)]
        return self._buffers

    def register(self, places: Sequence[memoryview]) -> None:
        """Registers the whole memory in which the places are, as far as it is not registered, and holds it until
        `release`. Raises nixl's error if the memory can't be registered."""
        owners = {id(place.obj): place.obj for place in places if place.nbytes}
        for key, one in list(self._places.items()):
            if key not in owners or one.owner() is not owners[key]:
                del self._places[key]
                self.agent.deregister_memory(one.registered)
        for key, owner in owners.items():
            if key not in self._places:
                region = (ctypes.addressof(ctypes.c_char.from_buffer(owner)), memoryview(owner).nbytes, 0, "")
                self._places[key] = _RegisteredPlace(
                    _reference(owner), self.agent.register_memory([region], "DRAM")
                )
        self._owners = list(owners.values())

    def release(self) -> None:
        """Lets the memory of the places be freed. No read is under way."""
        self._owners = ()


def _reference(owner: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(owner)
    except TypeError:  # a bytearray: the next update registers its memory anew
        return lambda: None
