"""SGLang's LoRA routes."""

from __future__ import annotations

from typing import Any

from frontend.dialects.common.context import DialectContext
from frontend.dialects.common.fleet_as_one import begun, unretried
from frontend.dialects.common.pause_and_adapters import AdapterPlaceFields, held_adapters, load_adapter
from frontend.server.shared_routes import Fields, ParsedRequest, SharedRoutes, report_given
from rl_plane.errors import InvalidRequest
from rl_plane.protocol.validation import Label

BY_NAME = "an adapter is known by its name"


class LoadFields(AdapterPlaceFields):
    """The body of SGLang's `/load_lora_adapter`."""

    pinned: bool = False
    lora_id: str | None = None


class UnloadFields(Fields):
    """The body of `/unload_lora_adapter`."""

    lora_name: Label
    lora_id: str | None = None


def mount_adapters(routes: SharedRoutes, context: DialectContext) -> None:
    @routes.post("/load_lora_adapter", LoadFields, "Load or replace an adapter on the whole fleet.", once=True)
    async def load(request: ParsedRequest[LoadFields]) -> Any:
        fields = request.fields
        report_given(request.path, fields, pinned="a loaded adapter stays", lora_id=BY_NAME)
        with begun():
            # SGLang's own refusals are 400s too, and prime-rl's clients post here.
            await unretried(load_adapter(context, fields.lora_name, fields.lora_path, request.request_id))
        return await loaded_reply(context)

    # prime-rl's clients read the status alone.
    @routes.post("/unload_lora_adapter", UnloadFields, "Unload an adapter.", once=True)
    async def unload(request: ParsedRequest[UnloadFields]) -> Any:
        name = request.fields.lora_name
        report_given(request.path, request.fields, lora_id=BY_NAME)
        if name not in await held_adapters(context):
            raise InvalidRequest(f"LoRA adapter {name!r} is not loaded", field="lora_name", fix="load it first")
        with begun():
            await context.calls.run("unload_lora_adapter", {"lora_name": name}, request.request_id)
        return await loaded_reply(context)


async def loaded_reply(context: DialectContext) -> dict[str, Any]:
    """The reply to a change of adapters."""
    adapters = await held_adapters(context)
    names = {name: one["label"] for name, one in sorted(adapters.items())}
    return {"success": True, "error_message": None, "loaded_adapters": names, "status": "ok"}
