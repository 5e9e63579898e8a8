"""Collects the tensors that trainers send in the bodies of requests.

`HeldTensors` holds the tensors until their update is whole. `store_tensors` then puts them into NATS once, and each
rank of the fleet fetches them from there. `sglang_session` decides when an update is committed."""

from __future__ import annotations

import asyncio
import binascii
import json
import logging
import struct
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from frontend.dialects.common.context import DialectContext
from frontend.dialects.common.fleet_as_one import NOT_POSSIBLE, SHOWN, begun, rows_of_all
from frontend.server.large_bodies import LongText
from frontend.server.large_memory import LargeMemory
from rl_plane.errors import InvalidRequest, InvalidWeights, Locked, PayloadTooLarge, Unsupported
from rl_plane.protocol.envelope import engine_replies
from rl_plane.protocol.versions import HostTensor
from rl_plane.protocol.worker_ops import MANIFEST_PAGE
from rl_plane.transports.object_store.sender import ObjectStoreSender
from rl_plane.transports.packing import fill
from rl_plane.weights.manifest import Manifest, pack
from rl_plane.weights.safetensors_file import parse_header

log = logging.getLogger("frontend.dialects.sglang.body_tensors")

ANOTHER_WAY = (
    "send them by update_weights_from_distributed or update_weights_from_disk, or as safetensors "
    '(load_format "safetensors")'
)
MAX_HELD_BYTES = 1 << 30
"""The largest update that this frontend holds in memory until it is whole."""
STEP_BYTES = 4 << 20
"""Text that is decoded or compared at once: some milliseconds of work, and groups of four characters."""
BUCKET_BYTES = 32 << 20
FIELD = "serialized_named_tensors"
PICKLE_START = b"\x80"
_LENGTH = struct.Struct("<Q")

Tensors = Mapping[str, HostTensor]


def read_tensors(payloads: Sequence[str | LongText]) -> Tensors:
    """Reads the tensors of one safetensors file. `payloads` has the same file once for each rank."""
    texts = [_text(one) for one in payloads]
    if any(_differ(one, texts[0]) for one in texts):
        raise Unsupported(
            "each element is of one rank of one engine, and all ranks of this fleet receive the same",
            field=FIELD,
            fix=f"send one element, a safetensors file; or {ANOTHER_WAY}",
        )
    data = memoryview(decoded(payloads[0]))
    length = _LENGTH.unpack_from(data)[0] if data.nbytes > _LENGTH.size else data.nbytes
    if length > data.nbytes - _LENGTH.size or bytes(data[_LENGTH.size : _LENGTH.size + 1]) != b"{":
        raise Unsupported(
            "it is neither a safetensors file nor what SGLang's MultiprocessingSerializer makes",
            field=FIELD,
            fix=ANOTHER_WAY,
        )
    start = _LENGTH.size + length
    placed = parse_header(bytes(data[_LENGTH.size : start]), data.nbytes - start, file=FIELD, field=FIELD)
    return {
        name: HostTensor(one.spec, data[one.offset : one.offset + one.spec.nbytes]) for name, one in placed.items()
    }


def is_pickled(payload: str | LongText) -> bool:
    """Reports whether an element begins like a pickle. It reads its first bytes only."""
    try:
        return binascii.a2b_base64(_text(payload)[:4])[:1] == PICKLE_START
    except ValueError:
        return False


def decoded(payload: str | LongText) -> bytearray:
    """The bytes of one element. Raises InvalidRequest if it is not base64."""
    try:
        return _decoded(_text(payload))
    except ValueError as error:  # binascii.Error is one
        raise InvalidRequest("it is not base64", field=FIELD, fix="send base64") from error


def _text(payload: str | LongText) -> memoryview:
    return payload.data if isinstance(payload, LongText) else memoryview(payload.encode())


def _differ(one: memoryview, other: memoryview) -> bool:
    steps = range(0, max(len(one), len(other)), STEP_BYTES)
    return one is not other and any(one[at : at + STEP_BYTES] != other[at : at + STEP_BYTES] for at in steps)


def _decoded(text: memoryview) -> bytearray:
    """Decodes base64 in steps, because one call would stop the process until it ends. ValueError: it is not base64."""
    if len(text) % 4:
        raise ValueError("base64 has groups of four characters")
    decoded = LargeMemory()
    for start in range(0, len(text), STEP_BYTES):
        step = text[start : start + STEP_BYTES]
        decoded += binascii.a2b_base64(step, strict_mode=True)
        if start + STEP_BYTES < len(text) and len(decoded) % 3:
            raise ValueError("base64 ends before its text does")
    return decoded


async def store_tensors(
    context: DialectContext, tensors: Tensors, publisher: str, config: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Puts tensors into the fleet's object store, and returns the `transport` of their update."""
    client = context.calls.fleet.client
    raw = None if config is None else json.dumps(config).encode()

    def store() -> dict[str, Any]:
        manifest = Manifest(pack(((name, one.spec) for name, one in tensors.items()), BUCKET_BYTES), raw)
        sender = ObjectStoreSender(
            client.bus.url,
            client.namespace,
            client.component,
            publisher=f"sglang-{publisher}",
            credentials=client.bus.credentials,
        )
        try:
            transport = sender.open(manifest)
            digests: dict[str, str] = {}
            for number in fill(manifest, iter(tensors.items()), sender.buffer, digests):
                sender.send(number)
            sender.finish(digests)
        finally:
            sender.destroy()
        return transport

    return await asyncio.to_thread(store)


class HeldTensors:
    """The tensors of an update that is not whole yet."""

    def __init__(self, context: DialectContext) -> None:
        self.turn = asyncio.Lock()
        """Each call that changes the update holds this lock, so the answer to a call describes the update as that call
        has left it. A commit holds it to its end, which the bounds of the commit limit. If the commit cannot begin, it
        puts its tensors back before the next call adds more."""
        self._context = context
        self.idle_s = context.generation.limits.held_idle_s
        """An update is dropped after this much silence of its trainer."""
        self._tensors: dict[str, HostTensor] = {}
        self._number = 0
        self.update_id = ""
        """The id of the present update, or of the last one. The history has this id once the update is committed."""
        self._policy: dict[str, Any] = {}
        self._label: str | None = None
        self._wanted = 0
        """The number of the model's tensors, without tied ones, as the last `ask_model` has read it."""
        self._tied: frozenset[str] = frozenset()
        """The names of tied tensors. The update does not wait for these tensors; the workers compare them."""
        self._at = 0.0

    def __len__(self) -> int:
        return len(self._tensors)

    @property
    def number(self) -> int:
        """A number that changes when an update begins and when it ends."""
        self._drop_if_idle()
        return self._number

    def add(self, tensors: Tensors, policy: dict[str, Any], label: str | None) -> None:
        """Adds the tensors of one call. `policy` extends the policy of earlier calls. `label` replaces an earlier
        label, unless it is None."""
        self._drop_if_idle()
        size = sum(one.data.nbytes for one in (*self._tensors.values(), *tensors.values()))
        if size > MAX_HELD_BYTES:
            self.drop()
            raise PayloadTooLarge(
                f"the update has {size} bytes or more; this frontend holds at most {MAX_HELD_BYTES}",
                field=FIELD,
                fix=ANOTHER_WAY,
            )
        if twice := sorted(self._tensors.keys() & tensors.keys()):
            self.drop()
            raise InvalidWeights(f"{twice[0]!r} came twice in one update", field=FIELD, fix="send each once")
        if not self._tensors:
            self._number += 1
            self.update_id = uuid.uuid4().hex
            self._policy = {}
        self._tensors.update(tensors)
        self._policy, self._at = {**self._policy, **policy}, time.monotonic()
        asyncio.get_running_loop().call_later(self.idle_s + 1.0, self._drop_if_idle)
        self._label = label or self._label

    def take_back(self, tensors: Tensors) -> None:
        """Removes the tensors of the newest call, which the client sends again."""
        self._tensors = {name: one for name, one in self._tensors.items() if name not in tensors}

    def name(self, label: str) -> None:
        self._label = label

    def drop(self) -> None:
        self._number += bool(self._tensors)
        self._tensors, self._policy, self._label = {}, {}, None

    def _drop_if_idle(self) -> None:
        if self._tensors and time.monotonic() - self._at > self.idle_s:
            log.warning(
                "an update is dropped: for %g s nothing came, and only %s",
                time.monotonic() - self._at,
                self.summary,
            )
            self.drop()

    @property
    def summary(self) -> str:
        """Describes the tensors so far, for a trainer that wonders which one it has not sent."""
        of_all = f" of the model's {self._wanted}" if self._wanted else ""
        last = repr(next(reversed(self._tensors), None))
        return f"{self._needed}{of_all} tensors have come, the last of them {last[:200]}"

    @property
    def _needed(self) -> int:
        """The number of tensors so far, without tied ones."""
        return len(self._tensors.keys() - self._tied)

    async def ask_model(self) -> frozenset[str]:
        """Asks all workers which tensors the model needs, for `is_whole`. Returns the names that no worker needs,
        because the model ties them to other tensors. Raises if a worker does not answer: it may need
        more than the others."""
        rows = await rows_of_all(self._context, "describe")
        self._wanted = max((int(row.get("tensors", 0)) for row in rows), default=0)
        tied = [frozenset(row.get("tied", ())) for row in rows]
        self._tied = frozenset.intersection(*tied) if tied else frozenset()
        return self._tied

    @property
    def is_whole(self) -> bool:
        """Whether all tensors have come that the model needed at the last `ask_model`."""
        return self._needed >= self._wanted

    async def missing(self) -> list[str]:
        """Returns the first few of the model's tensors that have not come."""
        rows = engine_replies(await self._context.calls.run("describe", {}))
        largest = sorted(rows, key=lambda row: int(row.get("tensors", 0)))[-1:]
        found: list[str] = []
        for start in range(0, self._wanted, MANIFEST_PAGE) if largest else ():
            asked = {"workers": [largest[0]["instance_id"]], "manifest_from": start}
            (row,) = (await self._context.calls.run("describe", asked))["workers"]
            found += [one["name"] for one in row.get("manifest") or () if one["name"] not in self._tensors]
            if len(found) >= SHOWN:
                break
        return found[:SHOWN]

    async def commit(self) -> dict[str, Any]:
        """Stores the tensors and commits the update. Call it while holding `turn`."""
        tensors, policy, label, number = dict(self._tensors), self._policy, self._label, self._number
        self.drop()
        with begun((Locked, *NOT_POSSIBLE)):
            transport = await store_tensors(self._context, tensors, "weights")
            body = {"transport": transport, "policy": policy, "version": label}
            try:
                return await self._context.calls.run("update_weights", body, self.update_id)
            except Locked:  # the update has not begun, and a repeated call commits it
                self._tensors, self._policy, self._label, self._number = tensors, policy, label, number
                raise
