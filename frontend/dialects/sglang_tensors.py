"""SGLang's tensors in the body of a request, without a pickle: safetensors in base64, put into NATS for the workers.

SGLang sends a pickle for each rank of one engine, which is never opened here. `load_format: "safetensors"` and one
element, `serialized_named_tensors: [base64 of a safetensors file]`, is what this takes instead. An update may be
several such calls; their tensors are held here until it is whole (`sglang_updates` says when that is), then stored
once, from where each rank of the fleet fetches them.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import struct
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from fastapi import FastAPI
from pydantic import Field

from frontend.dialects import DialectPlane
from frontend.dialects.common import begun, joined
from frontend.dialects.routes import Ask, Fields, add_route, report, take
from frontend.dialects.sglang_adapters import held_adapters, loaded
from frontend.dialects.sglang_updates import ANOTHER_WAY, Update, Updates, refuse_draft, report_unused
from rl_plane.errors import Conflict, InvalidRequest, InvalidWeights, PayloadTooLarge, Unsupported
from rl_plane.manifest import Manifest, pack
from rl_plane.ops import LABEL_CHARS, PRINTABLE
from rl_plane.publish.object_store import ObjectStoreSender
from rl_plane.publish.packing import fill
from rl_plane.safetensors_file import parse_header
from rl_plane.versions import HostTensor

MAX_BODY_BYTES = 256 << 20
"""Of such a request: 192 MB of weights. What is larger goes by a transport that no frontend stands in."""
MAX_HELD_BYTES = 1 << 30
"""Of an update that is not whole yet, in this frontend's memory."""
IDLE_S = 120.0
"""After so much silence a trainer has left what it had begun to send."""
BUCKET_BYTES = 32 << 20
FORMAT = "safetensors"
FIELD = "serialized_named_tensors"
_LENGTH = struct.Struct("<Q")

Tensors = Mapping[str, HostTensor]


class TensorFields(Update):
    """`/update_weights_from_tensor`"""

    serialized_named_tensors: list[str] = Field(min_length=1, max_length=1024)
    """One element: a safetensors file in base64."""
    load_format: str | None = None
    selector: Literal["target", "draft", "all"] = "all"


class AdapterFields(Fields):
    """`/load_lora_adapter_from_tensors`"""

    lora_name: str = Field(min_length=1, max_length=LABEL_CHARS, pattern=PRINTABLE)
    config_dict: dict[str, Any]
    """PEFT's `adapter_config.json`."""
    serialized_named_tensors: list[str] = Field(min_length=1, max_length=1024)
    """One element: `adapter_model.safetensors` in base64."""
    load_format: str | None = None
    pinned: bool = False
    lora_id: str | None = None
    added_tokens_config: dict[str, int] | None = None
    expected_checksums: dict[str, str] | None = None


def read_tensors(payloads: Sequence[str]) -> Tensors:
    """Of one file, however often it is given (a client sends one for each rank)."""
    if any(one != payloads[0] for one in payloads):
        raise Unsupported(
            "each element is of one rank of one engine, and all ranks of this fleet receive the same",
            field=FIELD,
            fix=f"send one element, a safetensors file; or {ANOTHER_WAY}",
        )
    try:
        data = memoryview(base64.b64decode(payloads[0], validate=True))
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest("it is not base64", field=FIELD, fix="base64 of a safetensors file") from error
    length = _LENGTH.unpack_from(data)[0] if data.nbytes > _LENGTH.size else data.nbytes
    if length > data.nbytes - _LENGTH.size or bytes(data[_LENGTH.size : _LENGTH.size + 1]) != b"{":
        raise Unsupported(
            "it is no safetensors file. SGLang's own serialized tensors are a pickle, which is never opened here",
            field=FIELD,
            fix=ANOTHER_WAY,
        )
    start = _LENGTH.size + length
    placed, _ = parse_header(bytes(data[_LENGTH.size : start]), data.nbytes - start, file=FIELD, field=FIELD)
    return {
        name: HostTensor(one.spec, data[one.offset : one.offset + one.spec.nbytes]) for name, one in placed.items()
    }


class Store:
    """Puts tensors into the fleet's object store."""

    def __init__(self, plane: DialectPlane) -> None:
        client = plane.calls.fleet.client
        self._where = (client.bus.url, client.namespace, client.component)

    async def put(
        self, tensors: Tensors, publisher: str, config: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """The `transport` of an update."""
        raw = None if config is None else json.dumps(config).encode()
        return await asyncio.to_thread(self._put, tensors, publisher, raw)

    def _put(self, tensors: Tensors, publisher: str, config: bytes | None) -> dict[str, Any]:
        manifest = Manifest(pack(((name, one.spec) for name, one in tensors.items()), BUCKET_BYTES), config)
        sender = ObjectStoreSender(*self._where, publisher=f"sglang-{publisher}")
        try:
            transport = sender.open(manifest)
            digests: dict[str, str] = {}
            for number in fill(manifest, iter(tensors.items()), sender.buffer, digests):
                sender.send(number)
            sender.finish(digests)
        finally:
            sender.destroy()
        return transport


class HeldTensors:
    """Those of an update that is not whole yet."""

    def __init__(self, plane: DialectPlane, store: Store) -> None:
        self._plane = plane
        self._store = store
        self._tensors: dict[str, HostTensor] = {}
        self._fields: TensorFields | None = None
        self._label: str | None = None
        self._at = 0.0

    def __len__(self) -> int:
        return len(self._tensors)

    def add(self, tensors: Tensors, fields: TensorFields) -> None:
        self._look()
        size = sum(one.data.nbytes for one in (*self._tensors.values(), *tensors.values()))
        if size > MAX_HELD_BYTES:
            self.drop()
            raise PayloadTooLarge(
                f"the update has {size} bytes or more; at most {MAX_HELD_BYTES} are held here",
                field=FIELD,
                fix=ANOTHER_WAY,
            )
        if twice := sorted(self._tensors.keys() & tensors.keys()):
            self.drop()
            raise InvalidWeights(f"{twice[0]!r} came twice in one update", field=FIELD, fix="send each once")
        self._tensors.update(tensors)
        self._fields, self._at = fields, time.monotonic()
        asyncio.get_running_loop().call_later(IDLE_S + 1.0, self._look)
        self._label = fields.weight_version or self._label

    def name(self, label: str) -> None:
        self._label = label

    def drop(self) -> None:
        self._tensors, self._fields, self._label = {}, None, None

    def _look(self) -> None:
        if self._tensors and time.monotonic() - self._at > IDLE_S:
            self.drop()

    async def is_whole(self) -> bool:
        rows = (await self._plane.calls.run("describe", {}))["workers"]
        return len(self._tensors) >= max((int(row.get("tensors", 0)) for row in rows), default=0)

    async def commit(self) -> dict[str, Any]:
        tensors, fields, label = dict(self._tensors), self._fields, self._label
        self.drop()
        assert fields is not None
        with begun():
            transport = await self._store.put(tensors, "weights")
            body = {
                "transport": transport,
                "policy": fields.policy,
                **({} if label is None else {"version": label}),
            }
            return await self._plane.calls.run("update_weights", body)


def mount_tensors(app: FastAPI, plane: DialectPlane, updates: Updates) -> None:
    store = Store(plane)
    held = updates.held = HeldTensors(plane, store)

    async def from_tensor(ask: Ask) -> Any:
        fields = take(TensorFields, ask)
        refuse_draft(fields.selector)
        _check_format(fields.load_format)
        report_unused(ask, fields)
        tensors = await asyncio.to_thread(read_tensors, fields.serialized_named_tensors)
        if await updates.session() is not None:
            raise Conflict("an update is received by broadcasts already", field=FIELD, fix="send one in one way")
        held.add(tensors, fields)
        if await updates.waits_for_more() or not await held.is_whole():
            return {"success": True, "message": f"{len(tensors)} tensors are held, {len(held)} of this update"}
        reply = await held.commit()
        told = joined(reply, "Succeeded to update parameter online.")
        return {"success": True, "message": told, "weight_version": reply["version"]["label"]}

    async def adapter(ask: Ask) -> Any:
        fields = take(AdapterFields, ask)
        _check_format(fields.load_format)
        if fields.added_tokens_config:
            raise Unsupported(
                "adapters that add tokens are not supported here", field="added_tokens_config", fix="leave it out"
            )
        for name, why in (
            ("pinned", "a loaded adapter stays"),
            ("expected_checksums", "every tensor's own digest is compared"),
        ):
            if getattr(fields, name):
                report(ask.path, name, why)
        tensors = await asyncio.to_thread(read_tensors, fields.serialized_named_tensors)
        op = "swap" if fields.lora_name in await held_adapters(plane) else "load"
        with begun():
            transport = await store.put(tensors, f"lora-{fields.lora_name}"[:100], fields.config_dict)
            target = {"kind": "lora", "op": op, "name": fields.lora_name}
            await plane.calls.run("update_weights", {"target": target, "transport": transport}, ask.request_id)
        return await loaded(plane)

    for path, handler, summary, fields in (
        ("/update_weights_from_tensor", from_tensor, "New weights in the body, as safetensors.", TensorFields),
        ("/load_lora_adapter_from_tensors", adapter, "An adapter in the body, as safetensors.", AdapterFields),
    ):
        add_route(
            app, ["POST"], path, handler, summary=summary, fields=fields, once=True, max_body_bytes=MAX_BODY_BYTES
        )


def _check_format(load_format: str | None) -> None:
    if load_format not in (None, FORMAT):
        raise Unsupported(
            f"load_format {load_format[:64]!r} comes as a pickle, which is never opened here"
            if load_format
            else "",
            field="load_format",
            fix=ANOTHER_WAY,
        )
