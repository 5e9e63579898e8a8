"""Routes that take tensors in the field `serialized_named_tensors` of a request.

The field has one of these:

- For each rank of an engine, what SGLang's `MultiprocessingSerializer` makes of tensors that the trainer shares. The
  workers copy the tensors out of the trainer's memory (`serialized_tensors`).
- One safetensors file in base64 (`load_format: "safetensors"`). The frontend puts its tensors into NATS for the workers
  (`body_tensors`).

An update may be several such calls.
"""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from pydantic import Field

from frontend.dialects.common.context import DialectContext
from frontend.dialects.common.fleet_as_one import begun, members
from frontend.dialects.common.pause_and_adapters import held_adapters
from frontend.dialects.sglang.adapters import BY_NAME, loaded_reply
from frontend.dialects.sglang.body_tensors import (
    FIELD,
    Tensors,
    decoded,
    is_pickled,
    read_tensors,
    store_tensors,
)
from frontend.dialects.sglang.serialized_tensors import FORMATS, SharedTensors, described, read_shared
from frontend.dialects.sglang.sglang_session import SglangUpdateFields, Updates, part_reply
from frontend.dialects.sglang.shared_adapters import check_sums, copied
from frontend.dialects.sglang.shared_counts import give_back
from frontend.dialects.sglang.update_routes import refuse_draft, report_unused
from frontend.server.large_bodies import LongText
from frontend.server.shared_routes import Fields, ParsedRequest, SharedRoutes, report_given
from rl_plane.bus.state_store import read_record
from rl_plane.errors import Conflict, InvalidRequest, Locked, PlaneError, Unsupported
from rl_plane.protocol.validation import Label

MAX_BODY_BYTES = 256 << 20
"""The largest request: 192 MB of weights. Larger weights need a transport without a frontend between."""
FORMAT = "safetensors"


class TensorFields(SglangUpdateFields):
    """The body of `/update_weights_from_tensor`."""

    serialized_named_tensors: list[str | LongText] = Field(min_length=1, max_length=1024)
    """For each rank of an engine the base64 of what SGLang's `MultiprocessingSerializer` makes; or one safetensors file
    in base64."""
    load_format: str | None = None
    """None, `direct` and `flattened_bucket`: as in SGLang. `safetensors`: one safetensors file."""
    selector: Literal["target", "draft", "all"] = "all"


class AdapterFields(Fields):
    """The body of `/load_lora_adapter_from_tensors`."""

    lora_name: Label
    config_dict: dict[str, Any]
    """PEFT's `adapter_config.json`."""
    serialized_named_tensors: list[str | LongText] = Field(min_length=1, max_length=1024)
    """Elements like those of `/update_weights_from_tensor`, or one element: `adapter_model.safetensors` in base64."""
    load_format: str | None = None
    pinned: bool = False
    lora_id: str | None = None
    added_tokens_config: dict[str, int] | None = None
    expected_checksums: dict[str, str] | None = None
    """The SHA-256 of each tensor's bytes, in hex."""


def mount_tensors(routes: SharedRoutes, context: DialectContext, updates: Updates) -> None:
    held = updates.held

    async def standing() -> tuple[int, str | None, bool]:
        """Names the update of a call.

        The body itself has the tensors. So a trainer may also repeat the call that has committed, until another update
        is committed, or one is opened that the call could be a part of.
        """
        if held:
            return held.number, None, False
        if (session := await updates.session()) is not None:  # of tensors that the trainer shares
            return held.number, session.update_id, False
        record = await read_record(context.bus, context.state)
        return held.number, record.update_id if record is not None else None, await updates.opened.is_open()

    @routes.post(
        "/update_weights_from_tensor",
        TensorFields,
        "New weights: tensors that the trainer shares, or safetensors.",
        once=True,
        standing=standing,
        max_body_bytes=MAX_BODY_BYTES,
    )
    async def from_tensor(request: ParsedRequest[TensorFields]) -> Any:
        fields = request.fields
        refuse_draft(fields.selector)
        report_unused(request, fields)
        if fields.load_format != FORMAT and is_pickled(fields.serialized_named_tensors[0]):
            return await shared(request)
        _check_format(fields.load_format)
        tensors = await asyncio.to_thread(read_tensors, fields.serialized_named_tensors)
        only_tied = tensors.keys() <= await held.ask_model()
        async with held.turn:
            if only_tied and not held and not await updates.opened.is_open():
                # They come before the update, or after its commit. Nothing says which.
                return {
                    "success": True,
                    "message": f"the model ties all {len(tensors)} tensors to others; they were not compared",
                }
            if await updates.session() is not None:
                raise Conflict(
                    "an update is received in another way already", field=FIELD, fix="send one in one way"
                )
            held.add(tensors, fields.policy, fields.weight_version)
            try:
                more = await updates.waits_for_more(held.update_id)
            except PlaneError:  # the whole update ends
                held.drop()
                raise
            if more or not held.is_whole:
                return {
                    "success": True,
                    "message": f"{len(tensors)} tensors have come, {len(held)} of this update",
                }
            try:
                reply = await updates.commit_held()
            except Locked:  # the update has not begun, and the client sends this call again
                held.take_back(tensors)
                raise
        return part_reply(reply)

    async def shared(request: ParsedRequest[TensorFields]) -> Any:
        fields = request.fields
        found = await asyncio.to_thread(_read_shared, fields)
        give_back_uses = True
        try:
            if held:
                raise Conflict(
                    "an update is received in another way already", field=FIELD, fix="send one in one way"
                )
            await _check_openable(context, found)
            reply = await updates.take_part(described(found), fields, request.digest)
        except Locked:  # nothing has begun, and the client sends this call again
            give_back_uses = False
            raise
        finally:
            if give_back_uses:
                await asyncio.to_thread(give_back, found.shared)
        return part_reply(reply)

    @routes.post(
        "/load_lora_adapter_from_tensors",
        AdapterFields,
        "An adapter: tensors that the trainer shares, or safetensors.",
        once=True,
        max_body_bytes=MAX_BODY_BYTES,
    )
    async def adapter(request: ParsedRequest[AdapterFields]) -> Any:
        fields = request.fields
        if fields.added_tokens_config:
            raise Unsupported(
                "adapters that add tokens are not supported here", field="added_tokens_config", fix="leave it out"
            )
        report_given(
            request.path,
            fields,
            pinned="a loaded adapter stays",
            lora_id=BY_NAME,
        )
        tensors = await asyncio.to_thread(_read_adapter, fields)
        op = "swap" if fields.lora_name in await held_adapters(context) else "load"
        with begun():
            transport = await store_tensors(context, tensors, f"lora-{fields.lora_name}"[:100], fields.config_dict)
            target = {"kind": "lora", "op": op, "name": fields.lora_name}
            body = {"target": target, "transport": transport}
            await context.calls.run("update_weights", body, request.request_id)
        return await loaded_reply(context)


def _check_format(load_format: str | None) -> None:
    if load_format is not None and load_format in FORMATS:
        raise InvalidRequest(
            f"load_format {load_format} needs what SGLang's MultiprocessingSerializer makes, and it is no pickle",
            field=FIELD,
            fix=f"load_format {FORMAT} for a safetensors file",
        )
    if load_format not in (None, FORMAT):
        raise Unsupported(
            f"load_format {load_format[:64]!r} names code of the engine, which no caller may run",
            field="load_format",
            fix=f"null, direct, flattened_bucket or {FORMAT}",
        )


def _read_adapter(fields: AdapterFields) -> Tensors:
    if fields.load_format == FORMAT or not is_pickled(fields.serialized_named_tensors[0]):
        _check_format(fields.load_format)
        tensors = read_tensors(fields.serialized_named_tensors)
    else:
        found = _read_shared(fields)
        try:
            tensors = copied(found)
        finally:
            give_back(found.shared)
    if fields.expected_checksums is not None:
        check_sums(tensors, fields.expected_checksums)
    return tensors


def _read_shared(fields: TensorFields | AdapterFields) -> SharedTensors:
    if fields.load_format not in FORMATS:
        _check_format(fields.load_format)
    return read_shared([decoded(one) for one in fields.serialized_named_tensors], fields.load_format)


async def _check_openable(context: DialectContext, found: SharedTensors) -> None:
    """A share of a GPU's memory can be opened once. Raises Unsupported if there are fewer shares than workers."""
    if not found.gpus:
        return
    if (count := len(await members(context))) > found.gpus:
        raise Unsupported(
            f"a share of a CUDA tensor can be opened by one process: this fleet has {count} workers, and the tensors "
            f"come from {found.gpus} GPUs",
            field=FIELD,
            fix="send an element for each GPU of the fleet, or use update_weights_from_distributed",
        )
