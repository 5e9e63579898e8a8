"""Routes that vLLM's and prime-rl's clients both use: pause and resume, and adapters."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from frontend.dialects.common.context import DialectContext
from frontend.dialects.common.fleet_as_one import resume_fleet, unretried
from frontend.server.shared_routes import DialectRequest, Fields, NoFields, SharedRoutes, take
from rl_plane.errors import InvalidRequest, NotFound
from rl_plane.protocol.record import PauseMode
from rl_plane.protocol.validation import LABEL_CHARS, PRINTABLE


class PauseFields(Fields):
    """`/pause`, as vLLM reads it"""

    mode: PauseMode = "abort"
    """What becomes of running requests: `abort` ends them, `wait` lets them end, `keep` freezes them."""
    clear_cache: bool = True
    """Drop the prefix caches; with `keep` it says nothing, as in vLLM: an update drops them anyway."""


class LoadLoraFields(Fields):
    lora_name: str = Field(min_length=1, max_length=LABEL_CHARS, pattern=PRINTABLE)
    lora_path: str = Field(min_length=1)
    load_inplace: bool = False
    """Replace an adapter of this name."""
    is_3d_lora_weight: bool = False
    """Not supported."""


class UnloadLoraFields(Fields):
    lora_name: str = Field(min_length=1, max_length=LABEL_CHARS, pattern=PRINTABLE)


def mount_pause(routes: SharedRoutes, context: DialectContext) -> None:
    async def pause(request: DialectRequest) -> Any:
        fields = take(PauseFields, request)
        drops = fields.clear_cache and fields.mode != "keep"
        await context.calls.run("pause", {"mode": fields.mode, "clear_cache": drops}, request.request_id)
        return {"status": "paused"}

    async def resume(request: DialectRequest) -> Any:
        take(NoFields, request)
        await resume_fleet(context, request.request_id)
        return {"status": "resumed"}

    routes.add(["POST"], "/pause", pause, summary="Stop generation.", fields=PauseFields)
    routes.add(["POST"], "/resume", resume, summary="Go on.")


def mount_adapters(
    routes: SharedRoutes, context: DialectContext, prefix: str = "/v1/", *, replaces: bool = False
) -> None:
    """`replaces`: loading a name again puts the new weights in its place, asked or not, as prime-rl's server does."""

    async def load(request: DialectRequest) -> Any:
        fields = take(LoadLoraFields, request)
        if fields.is_3d_lora_weight:
            raise InvalidRequest(
                "adapters of three-dimensional weights are not known here",
                field="is_3d_lora_weight",
                fix="leave it out",
            )
        if not (replaces or fields.load_inplace) and fields.lora_name in await _adapters(context):
            raise InvalidRequest(
                f"the adapter {fields.lora_name!r} is loaded already",
                field="lora_name",
                fix="load_inplace: true replaces it",
            )
        body = {"lora_name": fields.lora_name, "lora_path": fields.lora_path}
        loading = context.calls.run("load_lora_adapter", body, request.request_id)
        try:
            await (unretried(loading) if replaces else loading)
        except InvalidRequest as error:
            raise not_there(error) from error
        return {
            "status": "ok",
            "success": True,
            "message": f"Success: LoRA adapter '{fields.lora_name}' added successfully.",
        }

    async def unload(request: DialectRequest) -> Any:
        fields = take(UnloadLoraFields, request)
        if fields.lora_name not in await _adapters(context):
            raise NotFound(f"there is no adapter {fields.lora_name!r}", field="lora_name", fix="load it first")
        await context.calls.run("unload_lora_adapter", {"lora_name": fields.lora_name}, request.request_id)
        return {
            "status": "ok",
            "success": True,
            "message": f"Success: LoRA adapter '{fields.lora_name}' removed successfully.",
        }

    name, words = prefix + "load_lora_adapter", "Load an adapter on the whole fleet, or on none."
    routes.add(["POST"], name, load, summary=words, fields=LoadLoraFields, once=True)
    name, words = prefix + "unload_lora_adapter", "Unload an adapter."
    routes.add(["POST"], name, unload, summary=words, fields=UnloadLoraFields, once=True)


def _done(text: str) -> dict[str, Any]:
    """As each of the clients looks for it."""
    return {"status": "ok", "success": True, "message": f"Success: {text}"}


async def _adapters(context: DialectContext) -> dict[str, Any]:
    held: dict[str, Any] = (await context.calls.run("weight_version", {}))["adapters"]
    return held


def not_there(error: InvalidRequest) -> InvalidRequest | NotFound:
    """A directory that is not there yet is a 404, after which clients try again: shared file systems take a while."""
    if " is not there (" in error.message:
        return NotFound(error.message, **error.facts)
    return error
