"""Pauses, aborts and counts requests whose tokens an engine makes one by one on the engine loop.

`generate` calls `enter` once, `turn` before each token, and `leave` at the end. The engine's `pause`, `resume`, `abort`
and `load` call the gate's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from rl_plane.errors import InvalidRequest
from rl_plane.protocol.generation import FinishReason, GenerateRequest
from rl_plane.protocol.versions import WeightVersion
from worker.engines.base import PauseMode

R = TypeVar("R")


@dataclass(eq=False, slots=True)
class GatedRequest:
    """One request that has entered the gate."""

    request: GenerateRequest
    admitted: bool = False
    """It has had its first turn. Requests that have not wait while the engine is paused, in every mode."""
    ended: FinishReason | None = None
    """Set when the request is ended from outside: its next delta is the last one."""
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    kv: WeightVersion | None = None
    """The base weights of the oldest KV that the request keeps, if they have been replaced since."""
    has_token: bool = False
    """It has made a token. The engine sets it."""


def requests_of(requests: Mapping[str, R], ids: Iterable[str] | None) -> list[R]:
    """Returns the running requests with these ids (None: all), each of them once."""
    return [requests[one] for one in dict.fromkeys(requests if ids is None else ids) if one in requests]


class RequestGate:
    """The requests of one engine, and whether they may make tokens."""

    def __init__(self) -> None:
        self._requests: dict[str, GatedRequest] = {}
        self._frozen = False  # no token is made
        self._queueing = False  # new requests wait; without _frozen: a `wait` lets the running ones end
        self._drained = asyncio.Event()

    @property
    def is_paused(self) -> bool:
        return self._frozen and self._queueing

    def enter(self, request: GenerateRequest) -> GatedRequest:
        """Raises InvalidRequest if a request of this id is running."""
        if request.id in self._requests:
            raise InvalidRequest(
                f"a request with id {request.id!r} is running",
                field="id",
                fix="give each request an id of its own",
            )
        one = self._requests[request.id] = GatedRequest(request)
        return one

    def keep_kv(self, version: WeightVersion | None) -> None:
        """Notes that the requests with tokens keep KV of `version` over a swap. None: they compute all of it again."""
        for one in self._requests.values():
            one.kv = (one.kv or version) if version is not None and one.has_token else None

    def leave(self, one: GatedRequest) -> None:
        """Forgets a request. Calling it again does nothing."""
        if self._requests.get(one.request.id) is one:
            del self._requests[one.request.id]
        if not any(other.admitted for other in self._requests.values()):
            self._drained.set()

    async def turn(self, one: GatedRequest, delay_s: float = 0.0) -> None:
        """Waits until this request may make a token, at least `delay_s` seconds, or until it is ended. Other tasks get
        a turn meanwhile."""
        await self._pass(one)
        loop = asyncio.get_running_loop()
        due = loop.time() + delay_s
        await asyncio.sleep(0)
        while one.ended is None and (left := due - loop.time()) > 0:
            one.wake.clear()
            try:
                async with asyncio.timeout(left):
                    await one.wake.wait()
            except TimeoutError:
                pass
        await self._pass(one)

    async def _pass(self, one: GatedRequest) -> None:
        # The loop looks again after each wait: another pause may come between the wake-up and this task's turn.
        while one.ended is None and (self._frozen or (self._queueing and not one.admitted)):
            one.wake.clear()
            await one.wake.wait()
        one.admitted = True

    def abort(self, request_ids: Iterable[str] | None, reason: FinishReason = "abort") -> int:
        """Ends these requests (None: all). Returns how many of them were running or waiting."""
        ended = requests_of(self._requests, request_ids)
        for one in ended:
            one.ended = reason
            one.wake.set()
            self.leave(one)
        return len(ended)

    def abort_adapter(self, name: str) -> int:
        """Ends the requests of this adapter."""
        return self.abort([key for key, one in self._requests.items() if one.request.adapter == name])

    async def pause(self, mode: PauseMode) -> None:
        """Pauses, as `EngineAdapter.pause` says. A `wait` that is cancelled leaves the gate as it was."""
        if mode == "abort":
            self.abort(None)
        elif mode == "wait":
            await self._drain()
            if not self._queueing:
                return  # a resume came later, and counts
        elif mode != "keep":
            raise InvalidRequest(
                f"the pause mode is {str(mode)[:64]!r}", field="mode", fix="use keep, wait or abort"
            )
        self._frozen = self._queueing = True

    async def _drain(self) -> None:
        """Waits for the running requests. Requests that an earlier `keep` froze continue, so that they can end."""
        before = (self._frozen, self._queueing)
        self._frozen, self._queueing = False, True
        self._wake()
        try:
            while self._queueing and any(one.admitted for one in self._requests.values()):
                self._drained.clear()
                await self._drained.wait()
        except BaseException:
            self._frozen, self._queueing = before
            self._wake()
            raise

    def resume(self) -> None:
        self._frozen = self._queueing = False
        self._drained.set()
        self._wake()

    def load(self) -> tuple[int, int]:
        """(running, waiting) requests. Any thread may ask."""
        requests = list(self._requests.values())
        admitted = sum(one.admitted for one in requests)
        return admitted, len(requests) - admitted

    def _wake(self) -> None:
        for one in self._requests.values():
            one.wake.set()
