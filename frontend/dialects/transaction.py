"""`start → update × n → finish` as one transaction of the fleet: `finish` is its commit.

What was sent to whom is in the fleet's own session, so any frontend can go on with it. This frontend keeps only which
group its trainer has formed, and so how the next update comes.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from frontend.dialects import DialectPlane
from frontend.dialects.common import begun, check_world, world_size
from frontend.dialects.routes import report
from rl_plane.errors import Conflict, Locked, PlaneError
from rl_plane.vllm_bodies import (
    InitInfo,
    Transfer,
    UpdateInfo,
    check_init,
    feed_body,
    init_body,
    one_of_all,
    parse_part,
    parse_update,
    unknown_of,
)


@dataclass
class _Current:
    """The update that was started here last."""

    update_id: str
    prepared: bool = False
    finished: bool = False
    label: str | None = None


class Transactions:
    """Of one dialect, in this frontend."""

    def __init__(self, plane: DialectPlane, group: str) -> None:
        self._plane = plane
        self._group = group
        self.transfer: Transfer | None = None
        self._current: _Current | None = None

    # ---- the group ----

    async def init(self, given: Mapping[str, Any], where: str) -> None:
        """Forms the group: every rank of the fleet at its place. Nobody is asked before all is checked."""
        for name in unknown_of(InitInfo, given):
            report(where, f"init_info.{name}")
        info = parse_part(InitInfo, given, "init_info")
        rows = (await self._plane.calls.run("describe", {}))["workers"]
        check_init(info, {row["instance_id"]: str(row.get("device")) for row in rows})
        check_world(info.world_size, info.rank_offset, await world_size(self._plane))
        await self.drop()
        self.transfer = None
        with begun():
            await self._plane.calls.run("init_transport", init_body(info, self._group))
        self.transfer = Transfer.of(info, self._group)

    async def shut_down(self) -> None:
        await self.drop()
        transfer, self.transfer = self.transfer, None
        if transfer is not None:
            body = {"backend": transfer.backend, "group": transfer.group}
            await self._plane.calls.run("destroy_transport", body)

    # ---- one update ----

    async def start(self, request_id: str = "") -> None:
        """With a group the fleet listens from here on; without one, the first directory says where the weights are."""
        before, current = self._current, _Current(request_id or uuid.uuid4().hex)
        if self.transfer is not None:
            await self._prepare(current, self.transfer.transport)
        elif before is not None and before.prepared and not before.finished:
            await self.drop()
        self._current = current

    async def update(self, given: Any, where: str) -> None:
        """`given`: an `update_info`. A failure ends the update, as in vLLM."""
        info = one_of_all(given)
        if "weight_dir" in info:
            await self._from_directory(info["weight_dir"])
            return
        part = parse_update(info)
        for name in unknown_of(UpdateInfo, info):
            report(where, f"update_info.{name}")
        if self.transfer is None:
            raise Conflict(
                "no group is formed with this frontend",
                field="update_info",
                fix="init_weight_transfer_engine first; or name a directory (update_info.weight_dir)",
            )
        with begun():
            await self._plane.calls.run("feed_weights_update", {**self._meant(), **feed_body(part, self.transfer)})

    async def _from_directory(self, path: Any) -> None:
        current = self._current
        if current is None or current.finished or current.prepared:
            raise Conflict(
                "this update has its weights already"
                if current and not current.finished
                else "no update is started",
                field="update_info.weight_dir",
                fix="start_weight_update, one directory, finish_weight_update",
            )
        await self._prepare(current, {"backend": "filesystem", "path": path})

    async def finish(self, label: str | None) -> dict[str, Any]:
        """Commits. Without a label the version is called by its number. Asked again, the same answer."""
        current = self._current
        label = label or (current.label if current is not None else None)
        meant = {} if current is None else {"update_id": current.update_id}
        with begun():
            reply = await self._plane.calls.run(
                "complete_weights_update", {**meant, **({"version": label} if label is not None else {})}
            )
        if current is not None:
            current.finished = True
        return reply

    def name_next(self, label: str) -> bool:
        """The label of the update that is under way; False when none is."""
        if self._current is None or self._current.finished:
            return False
        self._current.label = label
        return True

    async def drop(self) -> None:
        """A trainer that begins anew has left what it had started."""
        current, self._current = self._current, None
        if current is not None and current.prepared and not current.finished:
            with contextlib.suppress(PlaneError):
                await self._plane.calls.run("abort_weights_update", {"update_id": current.update_id})

    async def _prepare(self, current: _Current, transport: dict[str, Any]) -> None:
        try:
            await self._plane.calls.run("prepare_weights_update", {"transport": transport}, current.update_id)
        except Locked as error:
            if self._current is None or error.facts.get("holder") != self._current.update_id:
                raise
            raise Conflict(
                "a weight update is under way: start_weight_update was called before",
                holder=self._current.update_id,
                fix="finish_weight_update commits it; init_weight_transfer_engine drops it",
            ) from error
        current.prepared = True

    def _meant(self) -> dict[str, str]:
        """None started here: the one that the fleet has, which another frontend may have started."""
        if self._current is None:
            return {}
        if self._current.finished:
            raise Conflict("no update is started", fix="start_weight_update first")
        return {"update_id": self._current.update_id}
