"""Routes that take tensors in the body of a request, as safetensors in base64, and put them into NATS for the workers.

SGLang sends a pickle for each rank of one engine, which is never opened here. These routes take one element instead:
`load_format: "safetensors"` and `serialized_named_tensors: [base64 of a safetensors file]`. An update may be several
such calls; `body_tensors` holds their tensors until the update is whole.
"""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from pydantic import Field

from frontend.dialects.common.context import DialectContext
from frontend.dialects.common.fleet_as_one import begun, joined
from frontend.dialects.common.pause_and_adapters import held_adapters
from frontend.dialects.sglang.adapters import BY_NAME, loaded_reply
from frontend.dialects.sglang.body_tensors import ANOTHER_WAY, FIELD, Store, read_tensors
from frontend.dialects.sglang.sglang_session import SglangUpdateFields, Updates
from frontend.dialects.sglang.update_routes import refuse_draft, report_unused
from frontend.server.large_bodies import LongText
from frontend.server.shared_routes import Fields, ParsedRequest, SharedRoutes, report_given
from rl_plane.bus.state_store import read_record
from rl_plane.errors import Conflict, Locked, Unsupported
from rl_plane.protocol.validation import Label

MAX_BODY_BYTES = 256 << 20
"""The largest request: 192 MB of weights. Larger weights need a transport without a frontend between."""
FORMAT = "safetensors"


class TensorFields(SglangUpdateFields):
    """`/update_weights_from_tensor`"""

    serialized_named_tensors: list[str | LongText] = Field(min_length=1, max_length=1024)
    """One element: a safetensors file in base64."""
    load_format: str | None = None
    selector: Literal["target", "draft", "all"] = "all"


class AdapterFields(Fields):
    """`/load_lora_adapter_from_tensors`"""

    lora_name: Label
    config_dict: dict[str, Any]
    """PEFT's `adapter_config.json`."""
    serialized_named_tensors: list[str | LongText] = Field(min_length=1, max_length=1024)
    """One element: `adapter_model.safetensors` in base64."""
    load_format: str | None = None
    pinned: bool = False
    lora_id: str | None = None
    added_tokens_config: dict[str, int] | None = None
    expected_checksums: dict[str, str] | None = None


def mount_tensors(routes: SharedRoutes, context: DialectContext, updates: Updates, store: Store) -> None:
    held = updates.held

    async def standing() -> tuple[int, str | None, bool]:
        """Names the update of a call. The body itself has the tensors, so the call that has committed may be repeated
        too, while nothing else was committed since, and nothing was opened that it could be a part of."""
        if held:
            return held.number, None, False
        record = await read_record(context.bus, context.state)
        return held.number, record.update_id if record is not None else None, await updates.opened.is_open()

    @routes.post(
        "/update_weights_from_tensor",
        TensorFields,
        "New weights in the body, as safetensors.",
        once=True,
        standing=standing,
        max_body_bytes=MAX_BODY_BYTES,
    )
    async def from_tensor(request: ParsedRequest[TensorFields]) -> Any:
        fields = request.fields
        refuse_draft(fields.selector)
        _check_format(fields.load_format)
        report_unused(request, fields)
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
                    "an update is received by broadcasts already", field=FIELD, fix="send one in one way"
                )
            held.add(tensors, fields.policy, fields.weight_version)
            if await updates.waits_for_more(held.update_id) or not held.is_whole:
                return {"success": True, "message": f"{len(tensors)} tensors are held, {len(held)} of this update"}
            try:
                reply = await updates.commit_held()
            except Locked:  # the update has not begun, and the client sends this call again
                held.take_back(tensors)
                raise
        message = joined(reply, "Succeeded to update parameter online.")
        return {"success": True, "message": message, "weight_version": reply["version"]["label"]}

    @routes.post(
        "/load_lora_adapter_from_tensors",
        AdapterFields,
        "An adapter in the body, as safetensors.",
        once=True,
        max_body_bytes=MAX_BODY_BYTES,
    )
    async def adapter(request: ParsedRequest[AdapterFields]) -> Any:
        fields = request.fields
        _check_format(fields.load_format)
        if fields.added_tokens_config:
            raise Unsupported(
                "adapters that add tokens are not supported here", field="added_tokens_config", fix="leave it out"
            )
        report_given(
            request.path,
            fields,
            pinned="a loaded adapter stays",
            lora_id=BY_NAME,
            expected_checksums="every tensor's own digest is compared",
        )
        tensors = await asyncio.to_thread(read_tensors, fields.serialized_named_tensors)
        op = "swap" if fields.lora_name in await held_adapters(context) else "load"
        with begun():
            transport = await store.put(tensors, f"lora-{fields.lora_name}"[:100], fields.config_dict)
            target = {"kind": "lora", "op": op, "name": fields.lora_name}
            body = {"target": target, "transport": transport}
            await context.calls.run("update_weights", body, request.request_id)
        return await loaded_reply(context)


def _check_format(load_format: str | None) -> None:
    if load_format not in (None, FORMAT):
        raise Unsupported(
            f"load_format {load_format[:64]!r} comes as a pickle, which is never opened here"
            if load_format
            else "",
            field="load_format",
            fix=ANOTHER_WAY,
        )
