"""`start → update × n → finish` as one transaction of the fleet. `finish` commits it.

The fleet's own session says what was sent to which worker, so any frontend can continue the update. This frontend
remembers only the group that its trainer has formed, which decides how the next update comes.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from frontend.dialects.common.context import DialectContext
from frontend.dialects.common.fleet_as_one import (
    NOT_POSSIBLE,
    begun,
    check_label,
    check_world,
    last_begun,
    world_size,
)
from frontend.dialects.common.ipc_handles import has_handles, read_parts
from frontend.server.shared_routes import DialectRequest, report
from rl_plane.commit.history import read_entry
from rl_plane.errors import BusUnreachable, Conflict, Locked
from rl_plane.protocol.envelope import engine_replies
from rl_plane.protocol.transport_traits import directory_transport
from rl_plane.protocol.vllm_bodies import (
    IPC,
    IPC_INIT,
    InitInfo,
    Transfer,
    UpdateInfo,
    begun_before,
    check_entries,
    check_init,
    init_body,
    one_of_all,
    parse_part,
    parse_update,
    part_body,
    under_way,
    unknown_of,
)

Ready = Callable[[], Awaitable[None]]


@dataclass
class _Current:
    """The update that was last started with this frontend."""

    update_id: str
    prepared: bool = False
    finished: bool = False
    label: str | None = None
    """The label that it got before it was prepared. After that its session has the label."""
    failed: bool = False
    """The update can only be dropped."""
    started_at: float = field(default_factory=time.monotonic)


class Transactions:
    """The updates of one dialect, in this frontend."""

    def __init__(self, context: DialectContext, group: str) -> None:
        """`group`: the default name of the dialect's groups, and the owner of its updates."""
        self._context = context
        self._group = group
        self.transfer: Transfer | None = None
        self._current: _Current | None = None

    # ---- the group ----

    async def init(
        self, given: Mapping[str, Any], where: str, *, format: str | None = None, ready: Ready | None = None
    ) -> None:
        """Forms the group, with every rank of the fleet at its place. Checks everything before it asks a worker.

        Args:
            given: the `init_info`.
            where: the path of the call, for the log.
            format: the format in which the trainer describes its tensors in the group. None: it announces them.
            ready: waits until the trainer can be joined. None: the trainer listens already.
        """
        if given.keys() <= IPC_INIT:
            await self._leave()
            self.transfer = Transfer.by_ipc(self._context.part_timeout_s)
            return
        for name in unknown_of(InitInfo, given):
            report(where, f"init_info.{name}")
        info = parse_part(InitInfo, given, "init_info")
        rows = engine_replies(await self._context.calls.run("describe", {}))
        check_init(info, rows)
        check_world(info.world_size, info.rank_offset, await world_size(self._context))
        if ready is not None:
            await ready()
        await self._leave()
        self.transfer = None
        transfer = Transfer.of(info, self._group, self._context.part_timeout_s, format)
        if info.timeout_s is not None and info.timeout_s > transfer.timeout_s:
            report(where, "init_info.timeout_s", f"nothing is waited for longer than {transfer.timeout_s:g} s")
        with begun():
            await self._context.calls.run("init_transport", init_body(info, transfer))
        self.transfer = transfer

    async def _leave(self) -> None:
        """Drops the update that the trainer started before, with any frontend: a trainer that forms a group begins
        anew.

        Raises if the update cannot be dropped now. It would take the new group with it when it ends, so the caller must
        retry."""
        session = await self._context.session(self._group)
        if session is not None:
            await self._context.abort(session.update_id)
        self._current = None

    async def shut_down(self) -> None:
        await self.drop()
        transfer, self.transfer = self.transfer, None
        if transfer is not None and transfer.backend != IPC:
            body = {"backend": transfer.backend, "group": transfer.group}
            await self._context.calls.run("destroy_transport", body)

    # ---- one update ----

    async def start(self, request_id: str = "") -> None:
        """Starts an update. With a group, the fleet listens from here on. Without one, the first directory says where
        the weights are. Conflict: the update before is not finished, and only its trainer knows whether to drop it."""
        before, current = self._current, _Current(request_id or uuid.uuid4().hex)
        if before is not None and await self._is_open(before):
            if before.update_id == request_id:
                return  # the client lost the answer to this very call
            raise under_way(before.update_id)
        if before is not None and before.failed:
            await self.drop()
        if self.transfer is not None:
            await self._prepare(current, self.transfer.transport, self.transfer.policy)
        self._current = current

    async def _is_open(self, current: _Current) -> bool:
        """Whether the update that this frontend started still waits. It expires when the trainer is silent."""
        if current.finished or current.failed:
            return False
        if not current.prepared:
            return time.monotonic() < current.started_at + self._context.session_idle_s
        return await self.standing() == current.update_id

    async def standing(self) -> str | None:
        """The id of the dialect's update that waits for its parts or its end."""
        session = await self._context.session(self._group)
        return session.update_id if session is not None else None

    async def update(self, given: Any, request: DialectRequest) -> None:
        """Receives one part. `given`: an `update_info`. A failure ends the update, as in vLLM."""
        info = one_of_all(given)
        if isinstance(given, list):
            check_entries(given, await world_size(self._context))
        if "weight_dir" in info:
            for name in info.keys() - {"weight_dir"}:
                report(request.path, f"update_info.{name}")
            await self._from_directory(info["weight_dir"])
            return
        handles = has_handles(info)
        part = None if handles else parse_update(info)
        if self.transfer is None or handles != (self.transfer.backend == IPC):
            raise _other_transfer(handles=handles)
        if part is None:
            timeout = {"timeout_s": self.transfer.timeout_s}
            bodies = [{**one, **timeout} for one in await asyncio.to_thread(list, read_parts(info))]
        else:
            for name in unknown_of(UpdateInfo, info):
                report(request.path, f"update_info.{name}")
            bodies = [part_body(part, self.transfer)]
        for number, body in enumerate(bodies):
            digest = f"{request.digest}.{number}" if number else request.digest
            with begun(NOT_POSSIBLE):
                target = {"update_id": await self._target_id()}
                await self._context.calls.run("receive_weights_part", {**target, **body}, digest=digest)

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
        current.failed = True  # until the weights are staged
        await self._prepare(current, directory_transport(path))
        current.failed = False

    async def finish(self, label: str | None) -> dict[str, Any]:
        """Commits the update. A repeated call gets the same answer. Without a label the version is named by its
        number."""
        current = self._current = await self._to_finish()
        body = {"update_id": current.update_id, "version": label}
        with begun(NOT_POSSIBLE):
            reply = await self._context.calls.run("complete_weights_update", body)
        current.finished = True
        check_label(reply, label)
        return reply

    async def _to_finish(self) -> _Current:
        """The update that waits for its end, with whichever frontend it was started. Without one, the update that was
        last finished here: its client may have lost the answer. A lost update never gets the answer of another one."""
        current = self._current
        if current is not None and await self._is_open(current):
            return current
        if (waiting := await self._waiting()) is not None:
            return _Current(waiting, prepared=True)
        if current is None or await last_begun(self._context) not in (None, current.update_id):
            raise Conflict(
                "no update is prepared",
                field="update_id",
                fix="start_weight_update first; an update is dropped when its trainer is silent",
            )
        return current

    async def _waiting(self) -> str | None:
        """The update that waits for its end. None if this frontend's own update is another one, which is lost."""
        standing, current = await self.standing(), self._current
        if standing is None or current is None or current.finished or current.failed:
            return standing
        return standing if current.update_id == standing or await self._is_committed(current) else None

    async def _is_committed(self, current: _Current) -> bool:
        """Whether another frontend has committed it."""
        entry = await read_entry(self._context.bus, self._context.state, current.update_id)
        return entry is not None and entry.outcome == "committed"

    async def name_next(self, label: str) -> bool:
        """Labels the update under way, even if another frontend started it. False: no update is under way."""
        current = self._current
        if current is not None and not current.prepared and await self._is_open(current):
            current.label = label
        elif (update_id := await self._waiting()) is not None:
            await self._context.calls.run("label_weights_update", {"update_id": update_id, "version": label})
        else:
            return False
        return True

    async def drop(self) -> None:
        """Drops the update that was started here."""
        current, self._current = self._current, None
        if current is not None and current.prepared and not current.finished:
            try:
                await self._context.abort(current.update_id)
            except (Locked, BusUnreachable):  # the update stands, and would block its trainer's next one
                current.failed, self._current = True, current

    async def _prepare(
        self, current: _Current, transport: dict[str, Any], policy: Mapping[str, Any] | None = None
    ) -> None:
        try:
            body = {
                "transport": transport,
                "owner": self._group,
                "version": current.label,
                "policy": dict(policy or {}),
            }
            await self._context.calls.run("prepare_weights_update", body, current.update_id)
        except Locked as error:
            raise begun_before(error, self._current.update_id if self._current is not None else None) from error
        current.prepared = True

    async def _target_id(self) -> str:
        """The id of the update that a part belongs to. Another frontend may have started it."""
        current = self._current
        update_id = await self.standing() if current is None else current.update_id
        if update_id is None or (current is not None and current.finished):
            raise Conflict("no update is started", fix="start_weight_update first")
        return update_id


def _other_transfer(*, handles: bool) -> Conflict:
    if handles:
        return Conflict(
            "this frontend was not told that the weights come by CUDA IPC handles",
            field="update_info",
            fix="init_weight_transfer_engine with init_info {} or {packed}, as vLLM's ipc engine and SkyRL do",
        )
    return Conflict(
        "no group is formed with this frontend",
        field="update_info",
        fix="init_weight_transfer_engine first; or name a directory (update_info.weight_dir)",
    )
