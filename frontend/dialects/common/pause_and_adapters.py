"""Routes that vLLM's and prime-rl's clients both use: pause and resume, and adapters."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from pydantic import Field

from frontend.dialects.common.context import DialectContext
from frontend.dialects.common.fleet_as_one import resume_fleet, unretried
from frontend.server.shared_routes import Fields, NoFields, ParsedRequest, SharedRoutes
from rl_plane.errors import InvalidRequest, NotFound
from rl_plane.protocol.record import PauseMode
from rl_plane.protocol.validation import Label


class PauseFields(Fields):
    """The body of `/pause`, as vLLM reads it."""

    mode: PauseMode = "abort"
    """`abort` ends running requests, `wait` waits for their end, `keep` freezes them."""
    clear_cache: bool = True
    """Drop the prefix caches. No effect with `keep`, as in vLLM: an update drops them anyway."""


class AdapterPlaceFields(Fields):
    """The fields of each route that loads an adapter"""

    lora_name: Label
    lora_path: str = Field(min_length=1)


class LoadLoraFields(AdapterPlaceFields):
    load_inplace: bool = False
    """Replace an adapter of this name."""
    is_3d_lora_weight: bool = False
    """Not supported."""


class UnloadLoraFields(Fields):
    lora_name: Label


def mount_pause(routes: SharedRoutes, context: DialectContext) -> None:
    @routes.post("/pause", PauseFields, "Stop generation.")
    async def pause(request: ParsedRequest[PauseFields]) -> Any:
        await pause_fleet(context, request)
        return {"status": "paused"}

    @routes.post("/resume", NoFields, "Resume generation.")
    async def resume(request: ParsedRequest[NoFields]) -> Any:
        await resume_fleet(context, request.request_id)
        return {"status": "resumed"}


async def pause_fleet(context: DialectContext, request: ParsedRequest[PauseFields]) -> None:
    """Pauses the fleet as the fields ask for it."""
    mode = request.fields.mode
    body = {"mode": mode, "clear_cache": request.fields.clear_cache and mode != "keep"}
    await context.calls.run("pause", body, request.request_id)


def mount_adapters(
    routes: SharedRoutes, context: DialectContext, prefix: str = "/v1/", *, replaces: bool = False
) -> None:
    """`replaces`: loading a name again always replaces the adapter, as prime-rl's server does."""

    @routes.post(
        prefix + "load_lora_adapter",
        LoadLoraFields,
        "Load an adapter on the whole fleet, or on no worker.",
        once=True,
    )
    async def load(request: ParsedRequest[LoadLoraFields]) -> Any:
        fields, name = request.fields, request.fields.lora_name
        if fields.is_3d_lora_weight:
            raise InvalidRequest(
                "adapters of three-dimensional weights are not supported",
                field="is_3d_lora_weight",
                fix="leave it out",
            )
        if not (replaces or fields.load_inplace) and name in await held_adapters(context):
            raise InvalidRequest(
                f"the adapter {name!r} is loaded already", field="lora_name", fix="load_inplace: true replaces it"
            )
        loading = load_adapter(context, name, fields.lora_path, request.request_id)
        await (unretried(loading) if replaces else loading)
        return _done(f"LoRA adapter '{name}' added successfully.")

    @routes.post(prefix + "unload_lora_adapter", UnloadLoraFields, "Unload an adapter.", once=True)
    async def unload(request: ParsedRequest[UnloadLoraFields]) -> Any:
        name = request.fields.lora_name
        if name not in await held_adapters(context):
            raise NotFound(f"there is no adapter {name!r}", field="lora_name", fix="load it first")
        await context.calls.run("unload_lora_adapter", {"lora_name": name}, request.request_id)
        return _done(f"LoRA adapter '{name}' removed successfully.")


def _done(text: str) -> dict[str, Any]:
    """A reply with the keys that each client reads."""
    return {"status": "ok", "success": True, "message": f"Success: {text}"}


async def held_adapters(context: DialectContext) -> dict[str, Any]:
    """Adapter → its version."""
    held: dict[str, Any] = (await context.calls.run("weight_version", {}))["adapters"]
    return held


async def load_adapter(context: DialectContext, name: str, path: str, request_id: str) -> dict[str, Any]:
    """Loads or replaces an adapter on the whole fleet. Turns the error of an absent directory into a 404, after which
    clients try again, because a shared file system may show a new directory late.

    AReaL loads each version under a name of its own, and unloads none. So where an engine has no place left, the oldest
    version of this name is unloaded: vLLM's own server drops the adapter that was used least recently."""
    body = {"lora_name": name, "lora_path": path}
    try:
        return await context.calls.run("load_lora_adapter", body, request_id)
    except InvalidRequest as error:
        if " is not there (" in error.message:
            raise NotFound(error.message, **error.facts) from error
        oldest = oldest_version(name, await held_adapters(context))
        if " have no place here" not in error.message or oldest is None:
            raise
    await context.calls.run("unload_lora_adapter", {"lora_name": oldest}, request_id)
    return await context.calls.run("load_lora_adapter", body, request_id)


VERSIONED = re.compile(r"(.+)-v([0-9]{1,9})")
"""AReaL's names of adapters."""


def oldest_version(name: str, held: Collection[str]) -> str | None:
    """The oldest of the adapters that are earlier versions of this one."""
    asked = VERSIONED.fullmatch(name)
    if asked is None:
        return None
    others = (VERSIONED.fullmatch(one) for one in held)
    older = {int(one[2]): one[0] for one in others if one and one[1] == asked[1] and int(one[2]) < int(asked[2])}
    return older[min(older)] if older else None
