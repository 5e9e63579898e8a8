"""Makes one definition of a typed method of the fleet serve an asynchronous client and a blocking one."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, cast, overload

P = ParamSpec("P")
R = TypeVar("R")
Reply = TypeVar("Reply", covariant=True)


@dataclass(frozen=True, slots=True)
class FleetRequest(Generic[R]):
    """A request to the fleet. `R` is the type of its reply."""

    op: str
    body: dict[str, Any]
    request_id: str = ""


class AsyncRun(ABC):
    """A client whose methods are awaited."""

    @abstractmethod
    async def run(
        self, op: str, body: dict[str, Any] | None = None, request_id: str = "", *, timeout_s: float | None = None
    ) -> dict[str, Any]:
        """Carries out any op of `rl_plane.protocol.fleet_ops.FLEET_OPS`.

        Args:
            op: The op's name.
            body: Its fields and those of the selection, as over HTTP.
            request_id: Makes an update idempotent: a repeated call returns the first answer.
            timeout_s: Seconds until the call is cancelled. None: the op's own bounds.

        Raises:
            DeadlineExceeded: the call has not ended within `timeout_s`.
        """


class BlockingRun(ABC):
    """A client whose methods block."""

    @abstractmethod
    def run(
        self, op: str, body: dict[str, Any] | None = None, request_id: str = "", *, timeout_s: float | None = None
    ) -> dict[str, Any]:
        """Carries out any op. The arguments and errors are those of `AsyncRun.run`."""


class FleetMethod(Protocol[P, Reply]):
    """The type of a method of the fleet: how the method is called follows from the client that has it."""

    @overload
    def __get__(self, client: AsyncRun, owner: type) -> Callable[P, Coroutine[Any, Any, Reply]]: ...

    @overload
    def __get__(self, client: BlockingRun, owner: type) -> Callable[P, Reply]: ...

    def __get__(self, client: Any, owner: type) -> Any: ...


def fleet_method(build: Callable[Concatenate[Any, P], FleetRequest[R]]) -> FleetMethod[P, R]:
    """Makes a method that carries out the request that `build` returns, by the `run` of its client."""

    @functools.wraps(build)
    def method(client: AsyncRun | BlockingRun, /, *args: P.args, **kwargs: P.kwargs) -> Any:
        request = build(client, *args, **kwargs)
        return client.run(request.op, request.body, request_id=request.request_id)

    return cast(FleetMethod[P, R], method)
