"""SGLang's LoRA routes."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from frontend.dialects.common.context import DialectContext
from frontend.dialects.common.fleet_as_one import begun, unretried
from frontend.dialects.common.pause_and_adapters import not_there
from frontend.server.shared_routes import DialectRequest, Fields, SharedRoutes, report, take
from rl_plane.errors import InvalidRequest
from rl_plane.protocol.validation import LABEL_CHARS, PRINTABLE

BY_NAME = "an adapter is known by its name"


class LoadFields(Fields):
    """`/load_lora_adapter`, of SGLang"""

    lora_name: str = Field(min_length=1, max_length=LABEL_CHARS, pattern=PRINTABLE)
    lora_path: str = Field(min_length=1)
    pinned: bool = False
    lora_id: str | None = None


class UnloadFields(Fields):
    """`/unload_lora_adapter`"""

    lora_name: str = Field(min_length=1, max_length=LABEL_CHARS, pattern=PRINTABLE)
    lora_id: str | None = None


def mount_adapters(routes: SharedRoutes, context: DialectContext) -> None:
    async def load(request: DialectRequest) -> Any:
        fields = take(LoadFields, request)
        if fields.pinned:
            report(request.path, "pinned", "a loaded adapter stays")
        if fields.lora_id is not None:
            report(request.path, "lora_id", BY_NAME)
        with begun():
            body = {"lora_name": fields.lora_name, "lora_path": fields.lora_path}
            try:
                # A 400, as SGLang's own refusals; and prime-rl's clients post here too.
                await unretried(context.calls.run("load_lora_adapter", body, request.request_id))
            except InvalidRequest as error:
                raise not_there(error) from error
        return await loaded(context)

    async def unload(request: DialectRequest) -> Any:
        fields = take(UnloadFields, request)
        if fields.lora_id is not None:
            report(request.path, "lora_id", BY_NAME)
        if fields.lora_name not in await held_adapters(context):
            raise InvalidRequest(
                f"LoRA adapter {fields.lora_name!r} is not loaded", field="lora_name", fix="load it first"
            )
        with begun():
            await context.calls.run("unload_lora_adapter", {"lora_name": fields.lora_name}, request.request_id)
        return await loaded(context)

    # prime-rl's clients look at the status alone.
    load_words, words = "Load an adapter, or replace it, on the whole fleet.", "Unload an adapter."
    routes.add(["POST"], "/load_lora_adapter", load, summary=load_words, fields=LoadFields, once=True)
    routes.add(["POST"], "/unload_lora_adapter", unload, summary=words, fields=UnloadFields, once=True)


async def loaded(context: DialectContext) -> dict[str, Any]:
    """What a change of adapters answers."""
    adapters = await held_adapters(context)
    names = {name: one["label"] for name, one in sorted(adapters.items())}
    return {"success": True, "error_message": None, "loaded_adapters": names, "status": "ok"}


async def held_adapters(context: DialectContext) -> dict[str, Any]:
    held: dict[str, Any] = (await context.calls.run("weight_version", {}))["adapters"]
    return held
