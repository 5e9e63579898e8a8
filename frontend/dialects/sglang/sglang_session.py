"""SGLang's weight updates, as transactions of the fleet.

Trainers send an update as many calls. SGLang writes the tensors of each call over the served ones at once. Here the
fleet stages them until the update is whole, and commits them on every worker or on none:

| the trainer sends | commits |
|---|---|
| between `begin_weight_update` and `end_weight_update` | `end_weight_update` |
| while the fleet is paused by `pause_generation` | `continue_generation` |
| otherwise | the call that brings the last missing tensor |

The staged tensors belong to the fleet's own session, and `open_sessions` stores what was opened. So any frontend can
continue the update, and it ends by itself when its trainer is silent.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any, Literal, NamedTuple

from pydantic import Field

from frontend.dialects.common.context import DialectContext
from frontend.dialects.common.fleet_as_one import (
    NOT_POSSIBLE,
    begun,
    check_label,
    joined,
    last_begun,
    served_version,
)
from frontend.dialects.sglang.body_tensors import HeldTensors
from frontend.dialects.sglang.groups import DEFAULT_GROUP, GroupFields, Groups, GroupText
from frontend.dialects.sglang.open_sessions import Opened
from frontend.server.shared_routes import Fields
from rl_plane.bus.lock import POLL_S, read_holder
from rl_plane.errors import BusUnreachable, Conflict, InvalidRequest, Locked, PlaneError, UpdateAborted
from rl_plane.protocol.record import KvPolicy, UpdateSession
from rl_plane.protocol.update_requests import MAX_PART_TENSORS, Part
from rl_plane.protocol.validation import Label, parse_body

OWNER = "sglang"
"""The owner of the fleet's session."""
SHARED = "ipc"
"""The transport of tensors that lie in memory of the trainer."""


def kv_policy(flush_cache: bool) -> KvPolicy:
    return "recompute" if flush_cache else "keep"


class SglangUpdateFields(Fields):
    """The fields of every update"""

    abort_all_requests: bool = False
    """End running requests instead of freezing them while the weights change. In an update of several calls, one call
    that asks for it suffices."""
    weight_version: Label | None = None
    flush_cache: bool = True
    """False: running requests keep their KV. No new request uses KV of older weights, in either case."""
    torch_empty_cache: bool = False

    @property
    def policy(self) -> dict[str, Any]:
        mode = {"pause_mode": "abort"} if self.abort_all_requests else {}
        return {**mode, "kv": kv_policy(self.flush_cache)}


class BucketFields(Fields):
    """Tensors that come together"""

    names: list[str] = Field(max_length=MAX_PART_TENSORS)
    dtypes: list[str]
    shapes: list[list[int]]


class DistributedFields(SglangUpdateFields, BucketFields):
    """The body of `/update_weights_from_distributed`."""

    group_name: GroupText = DEFAULT_GROUP
    load_format: str | None = None
    """`flattened_bucket`: one broadcast for all tensors. Default: one for each."""
    selector: Literal["target", "draft", "all"] = "all"


class PrepareFields(Fields):
    """The body of SGLang-Omni's `/prepare_weights_update`."""

    num_buckets: int = Field(ge=1)
    buckets: list[BucketFields]
    group_name: GroupText = DEFAULT_GROUP


def part_reply(reply: dict[str, Any]) -> dict[str, Any]:
    """SGLang's reply to a call that has brought tensors. `reply`: that of the part, or of the commit."""
    if "version" in reply:
        message = joined(reply, "Succeeded to update parameter online.")
        return {"success": True, "message": message, "weight_version": reply["version"]["label"]}
    message = joined(reply, f"{reply['tensors']} tensors are staged, {reply['missing']} are missing")
    return {"success": True, "message": message}


class _Receiving(NamedTuple):
    update_id: str
    buckets: int
    group: str
    task: asyncio.Task[dict[str, Any]]
    label: str | None = None
    """A label that came while the ranks listened. The fleet was locked then, and could not store it."""


class Updates:
    """The trainer's update, in the fleet's session."""

    def __init__(self, context: DialectContext, groups: Groups, held: HeldTensors) -> None:
        self.held = held
        """The tensors that came in bodies."""
        self.opened = Opened(context)
        self._context = context
        self._groups = groups
        self._open_until = 0.0
        """Until when an update counts as open that was begun or sent with this frontend; monotonic seconds."""
        self._preparing = asyncio.Lock()
        self._announced = ("", 0)
        """The update of the last part, and the number of its parts so far. Protected by `_preparing`."""
        self._receiving: _Receiving | None = None
        """The last update in two phases. A client that lost the answer completes it again."""

    @property
    def under_way(self) -> bool:
        """Whether this frontend knows of an open update. The fleet's session may know of another one."""
        receiving = self._receiving is not None and not self._receiving.task.done()
        return receiving or len(self.held) > 0 or time.monotonic() < self._open_until

    async def session(self) -> UpdateSession | None:
        """The session of an update by SGLang's calls. None: there is none, or another dialect owns it."""
        return await self._context.session(OWNER)

    async def parts_standing(self) -> str | None:
        """The id of the update that a broadcast belongs to. The next update may announce the same bodies."""
        session = await self.session()
        return session.update_id if session is not None else None

    # ---- parts ----

    async def take_broadcasts(self, fields: DistributedFields, digest: str) -> dict[str, Any]:
        """Takes the tensors of a call that are broadcast now. Returns the reply to the part, or to the commit.
        `digest`: the hash of the call's body."""
        part = {
            "names": fields.names,
            "dtypes": fields.dtypes,
            "shapes": fields.shapes,
            "layout": "each" if fields.load_format is None else "flat",
            "group": fields.group_name,
        }
        return await self.take_part(part, fields, digest)

    async def take_part(self, part: dict[str, Any], fields: SglangUpdateFields, digest: str) -> dict[str, Any]:
        """Takes tensors as `take_broadcasts` does. `part`: the fields of `receive_weights_part` that describe them. A
        part without a `group` lies in memory of the trainer."""
        parse_body(Part, part)  # an update that has begun would lock the fleet for a part that can't be received
        group: str | None = part.get("group")
        async with self._preparing:  # two stages of a trainer's pipeline may begin at once
            session = await self.session()
            if session is not None and (session.body["transport"]["backend"] == SHARED) != (group is None):
                raise Conflict("an update is received in another way already", fix="send one update in one way")
            was_begun = await self.opened.is_begun()
            update_id = session.update_id if session is not None else await self._prepare(group, fields)
            before, count = self._announced
            self._announced = (update_id, count + 1 if before == update_id else 1)
        names = part["names"]
        part = {
            **part,
            "update_id": update_id,
            "timeout_s": self._context.part_timeout_s,
            "version": fields.weight_version,
            **fields.policy,
        }
        self._open_until = 0.0  # until the part has come
        with begun(NOT_POSSIBLE):
            reply = await self._context.calls.run("receive_weights_part", part, digest=digest)
        self._open_until = time.monotonic() + self._context.session_idle_s
        # Call it after each part, because it extends the time of the update.
        if await self.waits_for_more(update_id, was_begun=was_begun):
            return reply
        if session is None and reply["missing"]:
            await self._close_if_tied(update_id, names)
        if reply["missing"]:
            return reply
        try:
            return await self.commit(update_id)
        except PlaneError as error:
            with contextlib.suppress(PlaneError):  # the commit's error matters more
                if await self.parts_standing() == update_id:  # repeating this call would send its tensors twice
                    error.facts["fix"] = "all tensors are here: end_weight_update commits them"
            raise

    async def _prepare(self, group: str | None, fields: SglangUpdateFields) -> str:
        """Makes the workers listen for an update. `group`: the group of its broadcasts. None: its tensors lie in memory
        of the trainer."""
        by: dict[str, Any] = {"backend": SHARED}
        if group is not None:
            by = {"backend": await self._groups.backend_of(group), "group": group}
        body: dict[str, Any] = {
            "transport": {**by, "in_parts": True},
            "policy": fields.policy,
            "owner": OWNER,
            "version": fields.weight_version,
        }
        with begun():
            reply = await self._context.calls.run("prepare_weights_update", body)
        return str(reply["update_id"])

    async def _close_if_tied(self, update_id: str, names: list[str]) -> None:
        """Drops an update whose tensors are all tied to others. They came before their update, or after its commit, so
        no more of it will follow, unless another part was announced meanwhile. Every rank has received what was sent,
        so the groups stay."""
        with contextlib.suppress(PlaneError):  # silence ends it otherwise
            session = await self.session()
            if not set(names) <= await self.held.ask_model():
                return
            async with self._preparing:  # a part that is announced later begins an update of its own
                if self._announced == (update_id, 1) and not await self._is_continued_elsewhere(
                    update_id, session
                ):
                    await self._context.calls.run("abort_weights_update", {"update_id": update_id})
                    await self.opened.end()

    async def _is_continued_elsewhere(self, update_id: str, before: UpdateSession | None) -> bool:
        """Whether another frontend has received parts since the session was as `before`."""
        holder = await read_holder(self._context.bus, self._context.state)
        return (holder is not None and holder.get("update_id") == update_id) or await self.session() != before

    async def waits_for_more(self, update_id: str, *, was_begun: bool = False) -> bool:
        """Whether the trainer will end the update, or resume the fleet, after a part. A pause of another caller does
        not count: no call would commit the update then."""
        with begun(NOT_POSSIBLE):
            return await self.opened.takes_more(update_id, was_begun=was_begun)

    # ---- commits ----

    async def commit_open(self) -> dict[str, Any] | None:
        """Commits the open update. None: nothing was sent. An update that is lost is an error, at each call."""
        try:
            async with self.held.turn:
                reply = await self.commit_held() if self.held else None
            if reply is None and (session := await self.session()) is not None:
                reply = await self.commit(session.update_id)
            if reply is None and (sent := await self.opened.sent()):
                reply = await self._commit_sent(sent)
        except PlaneError:
            with contextlib.suppress(PlaneError):  # the commit's error matters more
                if not await self.is_open():
                    await self.opened.end(committed=False)
            raise
        if reply is None:
            await self.opened.end()
        return reply

    async def commit_held(self) -> dict[str, Any]:
        """Commits the held tensors. Call it while holding `held.turn`."""
        reply = await self.held.commit()
        await self.note_commit()
        return reply

    async def _commit_sent(self, update_id: str) -> dict[str, Any]:
        """Commits an update that was sent and does not wait here. It may be committed already, or lost."""
        try:
            return await self.commit(update_id)
        except UpdateAborted as error:
            raise UpdateAborted(
                f"what was sent is lost, and nothing of it is committed: {error.message}",
                update_id=update_id,
                fix="begin_weight_update or pause_generation, and send all of it again; or, where it came in bodies, "
                "ask the frontend that took them",
            ) from error

    async def note_commit(self) -> None:
        """Newer weights are committed, so earlier parts that are lost no longer matter. A failure is ignored: what was
        begun expires by itself."""
        with contextlib.suppress(PlaneError):
            await self.opened.end()

    async def is_open(self) -> bool:
        """Whether an update still waits for its commit."""
        return len(self.held) > 0 or await self.session() is not None

    async def commit(self, update_id: str, label: str | None = None, kv: KvPolicy | None = None) -> dict[str, Any]:
        """Commits an update. A repeated call gets the same answer. None keeps the label and the `kv` that it has."""
        self._open_until = 0.0
        body = {"update_id": update_id, "version": label, "kv": kv}
        with begun(NOT_POSSIBLE):
            reply = await self._context.calls.run("complete_weights_update", body)
        await self.note_commit()
        check_label(reply, label)
        return reply

    async def pause(self) -> None:
        """The fleet was paused just now, for an update that follows or is sent already."""
        await self.opened.pause(anew=not await self.is_open())

    async def begin(self) -> None:
        if self.held or await self.session() is not None:
            raise Conflict("a weight update has begun already", fix="end_weight_update commits it")
        await self.opened.begin()
        self._open_until = time.monotonic() + self._context.session_idle_s

    async def form_group(self, fields: GroupFields, request_id: str) -> dict[str, Any]:
        """Forms a group with every rank, and drops what its trainer has left half sent."""
        await self._groups.check(fields)
        await self.drop()
        return await self._groups.form(fields, request_id)

    async def drop(self) -> None:
        """Drops what a trainer before has left half sent, because a trainer that forms a group begins anew.

        Raises Locked if its tensors are still on their way. They would take the new groups with them when they fail."""
        self._receiving, self._open_until = None, 0.0
        self.held.drop()
        await self.opened.end(committed=False)
        give_up = time.monotonic() + self._context.generation.limits.drop_wait_s
        while (session := await self.session()) is not None:
            try:
                await self._context.abort(session.update_id)
                return
            except Locked:
                if time.monotonic() > give_up:
                    raise

    async def name(self, label: str) -> None:
        """Labels the update that is sent now. Without one, commits the served weights again under the new label."""
        if self.held:
            self.held.name(label)
            return
        session = await self.session()
        if session is not None:
            receiving = self._receiving
            if receiving is not None and receiving.update_id == session.update_id:
                listening = not receiving.task.done()  # a trainer may send only after it has named the update
                self._receiving = receiving._replace(label=label if listening else None)
                if listening:
                    return
            named = {"update_id": session.update_id, "version": label}
            await self._context.calls.run("label_weights_update", named)
            return
        if sent := await self.opened.sent():
            await self._commit_sent(sent)  # the label of a lost update is not for the served version
        served = await served_version(self._context)
        if served["label"] == label:
            return
        # Workers fetch the same weights again from their source, under another label.
        body = {"rollback": {"sequence": served["sequence"]}, "version": label}
        with begun():
            await self._context.calls.run("update_weights", body)

    # ---- two phases ----

    async def listen(self, fields: PrepareFields, digest: str) -> None:
        """Prepares an update, and listens for all its buckets. `digest`: the hash of the call's body."""
        if fields.num_buckets != len(fields.buckets):
            raise InvalidRequest(
                f"num_buckets is {fields.num_buckets}, and {len(fields.buckets)} are described",
                field="num_buckets",
                fix="describe each bucket",
            )
        before = self._receiving
        if before is not None and (not before.task.done() or await self.parts_standing() == before.update_id):
            raise Conflict("an update is received already", fix="complete_weights_update first")
        self._receiving = None
        part: dict[str, Any] = {
            name: [one for bucket in fields.buckets for one in getattr(bucket, name)]
            for name in ("names", "dtypes", "shapes")
        }
        part |= {"group": fields.group_name, "timeout_s": self._context.part_timeout_s}
        parse_body(Part, part)
        update_id = await self._prepare(fields.group_name, SglangUpdateFields())
        part["update_id"] = update_id
        try:
            with begun():
                # The trainer sends as soon as the answer is "ready", so what does not fit must fail before.
                await self._context.calls.run("receive_weights_part", {**part, "check_only": True}, digest=digest)
                # This comes before the call that receives, which nothing else may end.
                await self.opened.takes_more(update_id)
                call = self._context.calls.run("receive_weights_part", part, digest=digest)
                task = asyncio.create_task(call, name="two-phase update")
                # `complete` raises the error. Until then it counts as retrieved.
                task.add_done_callback(lambda done: None if done.cancelled() else done.exception())
                await self._wait_until_listening(update_id, task)
        except PlaneError:
            with contextlib.suppress(PlaneError):  # the trainer will not send it
                await self._context.calls.run("abort_weights_update", {"update_id": update_id})
            raise
        self._receiving = _Receiving(update_id, fields.num_buckets, fields.group_name, task)

    async def _wait_until_listening(self, update_id: str, task: asyncio.Task[dict[str, Any]]) -> None:
        """Waits until the fleet is locked for these tensors: another change may come first. The bounds of the call that
        receives end the wait."""
        while not task.done():
            with contextlib.suppress(BusUnreachable):  # the call continues, and must not be left without an owner
                holder = await read_holder(self._context.bus, self._context.state)
                if holder is not None and holder.get("update_id") == update_id:
                    return
            await asyncio.sleep(POLL_S)
        task.result()

    async def complete(
        self, label: str | None, group: str | None, kv: KvPolicy | None = None
    ) -> tuple[int, dict[str, Any]]:
        """Commits the received update. A repeated call gets the same answer. `group`: None means the prepared group."""
        receiving = self._receiving
        if receiving is None or not await self._is_last(receiving):
            raise Conflict("no update is prepared", fix="prepare_weights_update first")
        if group not in (None, receiving.group):
            raise InvalidRequest(
                f"the update is received by the group {receiving.group!r}",
                field="group_name",
                fix="name it, or none",
            )
        try:
            with begun(NOT_POSSIBLE):
                await asyncio.shield(receiving.task)
        except PlaneError:
            self._receiving = None  # the update has ended
            raise
        receiving = self._receiving or receiving  # it may have got its label meanwhile
        if label is not None:
            receiving = self._receiving = receiving._replace(label=None)  # a repeated call too
        return receiving.buckets, await self.commit(receiving.update_id, label or receiving.label, kv)

    async def _is_last(self, receiving: _Receiving) -> bool:
        """Whether no later update was prepared, with another frontend."""
        last = await self.parts_standing() or await last_begun(self._context)
        return last == receiving.update_id
