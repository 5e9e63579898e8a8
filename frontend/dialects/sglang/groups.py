"""SGLang's update groups: a torch group of the trainer and every rank of the fleet."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Annotated, Any, Literal

from pydantic import Field

from frontend.dialects.common.context import DialectContext
from frontend.dialects.common.fleet_as_one import begun, check_world, joined, members, world_size
from frontend.server.shared_routes import Fields, ParsedRequest, SharedRoutes
from rl_plane.errors import InvalidRequest, Locked, PlaneError, Unsupported
from rl_plane.fleet.fleet import FORM_WAIT_S
from rl_plane.protocol.validation import PRINTABLE

DEFAULT_GROUP = "weight_update_group"
GroupText = Annotated[str, Field(min_length=1, max_length=256, pattern=PRINTABLE)]
"""The name of a group."""
MAX_KNOWN = 256
"""The number of groups whose backend is remembered. Only a client that makes up names forms more."""

TURN_WAIT_S = 2 * FORM_WAIT_S
"""The longest wait for the groups before a call. One group takes this long at most, with the wait for the fleet's
lock."""


class GroupFields(Fields):
    """The body of `/init_weights_update_group`."""

    master_address: str = Field(min_length=1, max_length=255, pattern=PRINTABLE)
    master_port: int = Field(ge=1, le=65_535)
    rank_offset: int = Field(ge=1)
    """The first rank of the fleet. Each worker gets its own offset from it."""
    world_size: int = Field(ge=2)
    """`rank_offset` plus the number of ranks of the fleet."""
    group_name: GroupText = DEFAULT_GROUP
    backend: Literal["nccl", "gloo"] = "nccl"


class GroupName(Fields):
    """The body of `/destroy_weights_update_group`."""

    group_name: GroupText | None = None
    """The default is the group that SkyRL has formed last, or else `weight_update_group`."""


FormGroup = Callable[[GroupFields, str], Awaitable[dict[str, Any]]]


class _FormingTurns:
    """The calls that form groups, one after another in the order of their arrival. The same ranks form all of them, and
    each call has its whole time."""

    def __init__(self, wait_s: float) -> None:
        self.wait_s = wait_s
        """The longest wait for the calls before."""
        self.turn = asyncio.Lock()
        self.failure: PlaneError | None = None
        """The error of the first call that failed. Its trainer has most likely died, and the waiting calls are its too.
        Each of them would wait as long, and then take the workers out of routing again."""

    @asynccontextmanager
    async def in_turn(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self.wait_s):
                await self.turn.acquire()
        except TimeoutError:
            raise Locked(
                f"other groups are formed here for {self.wait_s:g} s already",
                retry_after_s=1.0,
                fix="ask again when their trainers have come, or have given up",
            ) from None
        try:
            if self.failure is not None:
                raise type(self.failure)(self.failure.message, **self.failure.facts) from self.failure
            yield
        finally:
            self.turn.release()


class Groups:
    """The groups that were formed with this frontend, and their backends."""

    def __init__(self, context: DialectContext, turn_wait_s: float = TURN_WAIT_S) -> None:
        """`turn_wait_s`: the longest wait of a call for the groups before it."""
        self.unnamed = DEFAULT_GROUP
        """The group of calls that name none: SGLang's default, or the last one of SkyRL's."""
        self._context = context
        self._backends: dict[str, str] = {}
        self._line = _FormingTurns(turn_wait_s)

    async def backend_of(self, name: str) -> str:
        """The backend of a group. If another frontend formed it, the backend that every worker has."""
        if name in self._backends:
            return self._backends[name]
        rows = await members(self._context)
        return "nccl" if rows and all("nccl" in row["transports"] for row in rows) else "gloo"

    async def check(self, fields: GroupFields) -> None:
        """Checks the size of a group before anything is dropped for it."""
        check_world(fields.world_size, fields.rank_offset, await world_size(self._context))

    async def form(self, fields: GroupFields, request_id: str) -> dict[str, Any]:
        body = {
            "backend": fields.backend,
            "form": "torch",
            "group": fields.group_name,
            "master_address": fields.master_address,
            "master_port": fields.master_port,
            "world_size": fields.world_size,
            "rank_offset": fields.rank_offset,
            "timeout_s": self._context.part_timeout_s,
        }
        line = self._line
        async with line.in_turn():
            try:
                with begun():
                    reply = await self._context.calls.run("init_transport", body, request_id)
            except (InvalidRequest, Unsupported):
                raise  # the error of this call alone
            except PlaneError as error:
                line.failure, self._line = error, _FormingTurns(line.wait_s)  # later calls try again
                raise
        while len(self._backends) >= MAX_KNOWN:
            del self._backends[next(iter(self._backends))]
        self._backends[fields.group_name] = fields.backend
        return reply

    async def leave(self, name: str, request_id: str) -> dict[str, Any]:
        backend = await self.backend_of(name)
        if name not in self._backends:
            raise InvalidRequest(
                "The group to be destroyed does not exist: no group of this name was formed with this frontend.",
                field="group_name",
                fix="ask the frontend that formed it; or init_weights_update_group, which forms it anew",
            )
        reply = await self._context.calls.run("destroy_transport", {"backend": backend, "group": name}, request_id)
        del self._backends[name]
        return reply


def mount_groups(routes: SharedRoutes, groups: Groups, form: FormGroup) -> None:
    """`form`: `Updates.form_group`."""

    @routes.post(
        "/init_weights_update_group", GroupFields, "Form a torch group of the trainer and every rank.", once=True
    )
    async def init(request: ParsedRequest[GroupFields]) -> Any:
        reply = await form(request.fields, request.request_id)
        return {"success": True, "message": joined(reply, "Succeeded to initialize custom process group.")}

    @routes.post("/destroy_weights_update_group", GroupName, "Leave the group.", once=True)
    async def destroy(request: ParsedRequest[GroupName]) -> Any:
        name = request.fields.group_name or groups.unnamed
        reply = await groups.leave(name, request.request_id)
        return {"success": True, "message": joined(reply, "Succeeded to destroy custom process group.")}
