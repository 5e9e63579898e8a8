"""SGLang's weight updates, as transactions of the fleet.

Trainers send an update as many calls, and SGLang writes each call's tensors over the served ones as they come. Here
they are staged until the update is whole, and then committed on every worker or on none:

- between `begin_weight_update` and `end_weight_update`: by `end_weight_update`;
- while the fleet is paused: by `continue_generation`;
- else: by the call with which no tensor is missing any more.

What was staged is the fleet's own session, so any frontend can go on with it, and it ends by itself when its trainer is
silent.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Any, Literal

from fastapi import FastAPI
from pydantic import Field

from frontend.dialects import DialectPlane
from frontend.dialects.common import begun, joined, served_version
from frontend.dialects.routes import Ask, Fields, add_route, report, take
from frontend.dialects.sglang_groups import DEFAULT_GROUP, MAX_GROUP_CHARS, Groups
from rl_plane.errors import Conflict, InvalidRequest, Locked, PlaneError, Unsupported
from rl_plane.ops import LABEL_CHARS, MAX_FED_TENSORS, PRINTABLE, UpdateWeights
from rl_plane.record import UpdateSession, read_session

if TYPE_CHECKING:
    from frontend.dialects.sglang_tensors import HeldTensors

ANOTHER_WAY = (
    "send them by update_weights_from_distributed or update_weights_from_disk, or as safetensors "
    '(load_format "safetensors")'
)
DISK_FORMATS = (None, "auto", "safetensors")


class Update(Fields):
    """What every update may say"""

    abort_all_requests: bool = False
    """End running requests instead of freezing them while the weights change."""
    weight_version: str | None = Field(None, min_length=1, max_length=LABEL_CHARS, pattern=PRINTABLE)
    flush_cache: bool = True
    """False changes nothing: no new request may reuse KV of older weights."""
    torch_empty_cache: bool = False

    @property
    def policy(self) -> dict[str, Any]:
        mode = {"pause_mode": "abort"} if self.abort_all_requests else {}
        return {**mode, "flush_cache": self.flush_cache}


class DistributedFields(Update):
    """`/update_weights_from_distributed`"""

    names: list[str] = Field(max_length=MAX_FED_TENSORS)
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str = Field(DEFAULT_GROUP, min_length=1, max_length=MAX_GROUP_CHARS, pattern=PRINTABLE)
    load_format: str | None = None
    """None: a broadcast for each tensor. `flattened_bucket`: one for all."""
    selector: Literal["target", "draft", "all"] = "all"


class DiskFields(Update):
    """`/update_weights_from_disk`"""

    model_path: str = Field(min_length=1)
    load_format: str | None = None
    is_async: bool = False
    keep_pause: bool = False
    """Leave the fleet paused."""
    recapture_cuda_graph: bool = False
    token_step: int = Field(0, ge=0)
    """The trainer's step: the version's label, where `weight_version` is not given."""
    manifest: dict[str, Any] | None = None


class IpcFields(Update):
    """`/update_weights_from_ipc`"""

    zmq_handles: dict[str, str] | None = None


class BeginFields(Fields):
    """`/begin_weight_update`"""

    selector: Literal["target", "draft", "all"] = "all"


class VersionFields(Fields):
    """`/update_weight_version`, of SGLang"""

    new_version: str = Field(min_length=1, max_length=LABEL_CHARS, pattern=PRINTABLE)
    abort_all_requests: bool = True


class ByNameFields(Fields):
    """`/get_weights_by_name`"""

    name: str = ""
    truncate_size: int = 100


class BucketFields(Fields):
    names: list[str] = Field(max_length=MAX_FED_TENSORS)
    dtypes: list[str]
    shapes: list[list[int]]


class PrepareFields(Fields):
    """`/prepare_weights_update`, of SGLang-Omni"""

    num_buckets: int = Field(ge=1)
    buckets: list[BucketFields]
    group_name: str = Field(DEFAULT_GROUP, min_length=1, max_length=MAX_GROUP_CHARS, pattern=PRINTABLE)


class CompleteFields(Fields):
    """`/complete_weights_update`, of SGLang-Omni"""

    group_name: str | None = None
    flush_cache: bool = False
    weight_version: str | None = Field(None, min_length=1, max_length=LABEL_CHARS, pattern=PRINTABLE)


class Updates:
    """The trainer's update, in the fleet's session."""

    def __init__(self, plane: DialectPlane, groups: Groups) -> None:
        self._plane = plane
        self._groups = groups
        self._begun = False
        """By begin_weight_update, at this frontend."""
        self._label: tuple[str, str] | None = None
        """An update's id, and what it is called by now."""
        self.held: HeldTensors | None = None
        """What came in bodies."""
        self._preparing = asyncio.Lock()
        self._receiving: tuple[int, asyncio.Task[dict[str, Any]]] | None = None
        """Of the two-phase form: how many buckets, and their receive."""

    async def session(self) -> UpdateSession | None:
        """The update that is fed."""
        session = await read_session(self._plane.calls.fleet.client.bus, self._plane.view.subjects.state)
        if session is None or not session.live(time.time()):
            return None
        return session if UpdateWeights.model_validate(session.body).fed else None

    # ---- parts ----

    async def take_part(self, fields: DistributedFields) -> dict[str, Any]:
        """The reply of the part, or of the commit."""
        async with self._preparing:  # two stages of a trainer's pipeline may begin at once
            session = await self.session()
            update_id = (
                session.update_id if session is not None else await self._prepare(fields.group_name, fields)
            )
        if fields.weight_version is not None:
            self._label = (update_id, fields.weight_version)
        part = {
            "update_id": update_id,
            "names": fields.names,
            "dtypes": fields.dtypes,
            "shapes": fields.shapes,
            "layout": "each" if fields.load_format is None else "flat",
            "group": fields.group_name,
        }
        with begun():
            reply = await self._plane.calls.run("feed_weights_update", part)
        if reply["missing"] or await self.waits_for_more():
            return reply
        return await self.commit(update_id)

    async def _prepare(self, group: str, fields: Update) -> str:
        backend = await self._groups.backend_of(group)
        body: dict[str, Any] = {
            "transport": {"backend": backend, "group": group, "fed": True},
            "policy": fields.policy,
            **({} if fields.weight_version is None else {"version": fields.weight_version}),
        }
        with begun():
            reply = await self._plane.calls.run("prepare_weights_update", body)
        return str(reply["update_id"])

    async def waits_for_more(self) -> bool:
        """Until the trainer ends it, or lets the fleet go on."""
        if self._begun:
            return True
        reply = await self._plane.calls.run("state", {})
        return any(row.get("pause_state") == "paused" for row in reply["workers"])

    # ---- commits ----

    async def commit_open(self) -> dict[str, Any] | None:
        """None: nothing was sent."""
        if self.held:
            self._begun = False
            return await self.held.commit()
        session = await self.session()
        return None if session is None else await self.commit(session.update_id)

    async def commit(self, update_id: str) -> dict[str, Any]:
        label = self._label[1] if self._label is not None and self._label[0] == update_id else None
        self._begun, self._label = False, None
        body = {"update_id": update_id, **({} if label is None else {"version": label})}
        with begun():
            return await self._plane.calls.run("complete_weights_update", body)

    async def begin(self) -> None:
        if self.held or await self.session() is not None:
            raise Conflict("a weight update has begun already", fix="end_weight_update commits it")
        self._begun = True

    async def drop(self) -> None:
        """A trainer that forms a group begins anew: what one before it has left half sent is dropped."""
        self._begun, self._label, self._receiving = False, None, None
        if self.held:
            self.held.drop()
        session = await self.session()
        if session is not None:
            with contextlib.suppress(PlaneError):
                await self._plane.calls.run("abort_weights_update", {"update_id": session.update_id})

    async def end(self) -> dict[str, Any] | None:
        self._begun = False
        return await self.commit_open()

    async def name(self, label: str) -> None:
        """The update that is sent now; else the one that is served, as it can."""
        if self.held:
            self.held.name(label)
            return
        session = await self.session()
        if session is not None:
            self._label = (session.update_id, label)
            return
        served = await served_version(self._plane)
        if served["label"] == label:
            return
        # The same weights once more, under another name: they are fetched again from where they came.
        body = {"rollback": {"sequence": served["sequence"]}, "version": label}
        with begun():
            await self._plane.calls.run("update_weights", body)

    # ---- two phases ----

    async def listen(self, fields: PrepareFields) -> None:
        if fields.num_buckets != len(fields.buckets):
            raise InvalidRequest(
                f"num_buckets is {fields.num_buckets}, and {len(fields.buckets)} are described",
                field="num_buckets",
                fix="describe each bucket",
            )
        if self._receiving is not None and not self._receiving[1].done():
            raise Conflict("an update is received already", fix="complete_weights_update first")
        update_id = await self._prepare(fields.group_name, Update())
        every = [
            [one for bucket in fields.buckets for one in getattr(bucket, name)]
            for name in ("names", "dtypes", "shapes")
        ]
        part = {**dict(zip(("names", "dtypes", "shapes"), every, strict=True)), "group": fields.group_name}
        call = self._plane.calls.run("feed_weights_update", {"update_id": update_id, **part})
        task = asyncio.create_task(call, name="two-phase update")
        task.add_done_callback(
            lambda done: None if done.cancelled() else done.exception()
        )  # who completes is told
        self._receiving = (fields.num_buckets, task)

    async def complete(self, label: str | None) -> tuple[int, dict[str, Any]]:
        if self._receiving is None:
            raise Conflict("no update is prepared", fix="prepare_weights_update first")
        count, task = self._receiving
        try:
            with begun():
                reply = await asyncio.shield(task)
        finally:
            if task.done():
                self._receiving = None
        if label is not None:
            self._label = (reply["update_id"], label)
        return count, await self.commit(reply["update_id"])


def mount_updates(app: FastAPI, plane: DialectPlane, updates: Updates) -> None:
    async def from_distributed(ask: Ask) -> Any:
        fields = take(DistributedFields, ask)
        refuse_draft(fields.selector)
        if fields.load_format not in (None, "flattened_bucket"):
            raise Unsupported(
                f"load_format {fields.load_format[:64]!r} is not known here",
                field="load_format",
                fix="leave it out, or flattened_bucket",
            )
        report_unused(ask, fields)
        reply = await updates.take_part(fields)
        if "version" in reply:
            told = joined(reply, "Succeeded to update parameter online.")
            return {"success": True, "message": told, "weight_version": reply["version"]["label"]}
        told = joined(reply, f"{reply['tensors']} tensors are staged, {reply['missing']} are missing")
        return {"success": True, "message": told}

    async def from_disk(ask: Ask) -> Any:
        return await _from_disk(plane, take(DiskFields, ask), ask)

    async def from_ipc(ask: Ask) -> Any:
        take(IpcFields, ask)
        raise Unsupported(
            "checkpoint-engine's ZMQ handles lead to CUDA memory by a pickle, which is never opened here",
            field="zmq_handles",
            fix=ANOTHER_WAY,
        )

    async def by_name(ask: Ask) -> Any:
        take(ByNameFields, ask)
        raise Unsupported(
            "engines hold weights fused and sharded, each in its own way: no one value can be told for the fleet",
            field="name",
            fix="weights_checker compares them",
        )

    async def begin(ask: Ask) -> Any:
        refuse_draft(take(BeginFields, ask).selector)
        await updates.begin()
        return {"success": True, "message": "the update is open"}

    async def end(ask: Ask) -> Any:
        reply = await updates.end()
        if reply is None:
            return {"success": True, "message": "nothing was sent since the last commit, so nothing has changed"}
        return {
            "success": True,
            "message": joined(reply, "committed"),
            "weight_version": reply["version"]["label"],
        }

    async def rename(ask: Ask) -> Any:
        fields = take(VersionFields, ask)
        if fields.abort_all_requests:
            await plane.calls.run("abort_requests", {})
        await updates.name(fields.new_version)
        told = f"Weight version updated to {fields.new_version}"
        return {"success": True, "message": told, "new_version": fields.new_version}

    async def prepare(ask: Ask) -> Any:
        await updates.listen(take(PrepareFields, ask))
        return {"status": "ready", "message": ""}

    async def complete(ask: Ask) -> Any:
        count, reply = await updates.complete(take(CompleteFields, ask).weight_version)
        return {"success": True, "num_buckets_received": count, "message": joined(reply, "committed")}

    routes: tuple[tuple[str, Any, str, type[Fields]], ...] = (
        (
            "/update_weights_from_distributed",
            from_distributed,
            "Tensors that are broadcast now.",
            DistributedFields,
        ),
        ("/update_weights_from_disk", from_disk, "New weights from a directory.", DiskFields),
        ("/update_weights_from_ipc", from_ipc, "Refused: it would need a pickle.", IpcFields),
        ("/begin_weight_update", begin, "Begin an update of several calls.", BeginFields),
        ("/end_weight_update", end, "Commit it, everywhere or nowhere.", Fields),
        ("/prepare_weights_update", prepare, "Listen for all buckets of a group.", PrepareFields),
        ("/complete_weights_update", complete, "Commit what they brought.", CompleteFields),
    )
    for path, handler, summary, fields in routes:
        add_route(app, ["POST"], path, handler, summary=summary, fields=fields, once=True)
    add_route(
        app, ["GET", "POST"], "/get_weights_by_name", by_name, summary="Refused, by name.", fields=ByNameFields
    )
    add_route(
        app,
        ["POST"],
        "/update_weight_version",
        rename,
        summary="Name what is sent now, or what is served.",
        fields=VersionFields,
        claims=lambda ask: ask.has("abort_all_requests"),
    )


def refuse_draft(selector: str) -> None:
    if selector == "draft":
        raise Unsupported("there is no draft model here", field="selector", fix="target, or all")


def report_unused(ask: Ask, fields: Update) -> None:
    if not fields.flush_cache:
        report(ask.path, "flush_cache", "no new request may reuse KV of older weights")
    if fields.torch_empty_cache:
        report(ask.path, "torch_empty_cache", "engines keep their allocators' memory as they do")


async def _from_disk(plane: DialectPlane, fields: DiskFields, ask: Ask) -> dict[str, Any]:
    if fields.load_format not in DISK_FORMATS:
        raise Unsupported(
            f"load_format {str(fields.load_format)[:64]!r} is not known here",
            field="load_format",
            fix="safetensors",
        )
    report_unused(ask, fields)
    for name, why in (
        ("is_async", "weights are always staged beside generation"),
        ("recapture_cuda_graph", "an engine's graphs stay valid"),
        ("manifest", "names and shapes are checked against the model"),
    ):
        if getattr(fields, name):
            report(ask.path, name, why)
    label = fields.weight_version or (f"step_{fields.token_step}" if fields.token_step else None)
    rows = (await plane.calls.run("state", {}))["workers"]
    running = sum(int(row.get("running", 0)) + int(row.get("waiting", 0)) for row in rows)
    body = {
        "transport": {"backend": "filesystem", "path": fields.model_path},
        "policy": {**fields.policy, "keep_pause": fields.keep_pause},
        **({} if label is None else {"version": label}),
    }
    try:
        with begun():
            reply = await plane.calls.run("update_weights", body, ask.request_id)
    except (Locked, InvalidRequest):
        raise
    except PlaneError as error:
        error.facts["num_paused_requests"] = running
        raise
    return {
        "success": True,
        "message": joined(reply, "Succeeded to update model weights."),
        "num_paused_requests": running,
        "weight_version": reply["version"]["label"],
    }
