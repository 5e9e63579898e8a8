"""SGLang's LoRA routes."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic import Field

from frontend.dialects import DialectPlane
from frontend.dialects.common import begun, unretried
from frontend.dialects.dialect_routes import Ask, Fields, add_route, report, take
from frontend.dialects.steering import not_there
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


def mount_adapters(app: FastAPI, plane: DialectPlane) -> None:
    async def load(ask: Ask) -> Any:
        fields = take(LoadFields, ask)
        if fields.pinned:
            report(ask.path, "pinned", "a loaded adapter stays")
        if fields.lora_id is not None:
            report(ask.path, "lora_id", BY_NAME)
        with begun():
            body = {"lora_name": fields.lora_name, "lora_path": fields.lora_path}
            try:
                # A 400, as SGLang's own refusals; and prime-rl's clients post here too.
                await unretried(plane.calls.run("load_lora_adapter", body, ask.request_id))
            except InvalidRequest as error:
                raise not_there(error) from error
        return await loaded(plane)

    async def unload(ask: Ask) -> Any:
        fields = take(UnloadFields, ask)
        if fields.lora_id is not None:
            report(ask.path, "lora_id", BY_NAME)
        if fields.lora_name not in await held_adapters(plane):
            raise InvalidRequest(
                f"LoRA adapter {fields.lora_name!r} is not loaded", field="lora_name", fix="load it first"
            )
        with begun():
            await plane.calls.run("unload_lora_adapter", {"lora_name": fields.lora_name}, ask.request_id)
        return await loaded(plane)

    # prime-rl's clients look at the status alone.
    load_words, words = "Load an adapter, or replace it, on the whole fleet.", "Unload an adapter."
    add_route(app, ["POST"], "/load_lora_adapter", load, summary=load_words, fields=LoadFields, once=True)
    add_route(app, ["POST"], "/unload_lora_adapter", unload, summary=words, fields=UnloadFields, once=True)


async def loaded(plane: DialectPlane) -> dict[str, Any]:
    """What a change of adapters answers."""
    adapters = await held_adapters(plane)
    names = {name: one["label"] for name, one in sorted(adapters.items())}
    return {"success": True, "error_message": None, "loaded_adapters": names, "status": "ok"}


async def held_adapters(plane: DialectPlane) -> dict[str, Any]:
    held: dict[str, Any] = (await plane.calls.run("weight_version", {}))["adapters"]
    return held
