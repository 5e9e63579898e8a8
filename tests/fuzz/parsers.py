"""Fuzzes what parses files and messages of strangers, in this process. A parser returns, or raises a typed error."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rl_plane.bus.entries import decoded
from rl_plane.commit.history import UpdateEntry
from rl_plane.errors import PlaneError
from rl_plane.membership.core import Member
from rl_plane.protocol.canary import CanaryHistory
from rl_plane.protocol.envelope import decode, request_from_wire
from rl_plane.protocol.notices import OpNotice
from rl_plane.protocol.record import DecisionRecord, DesiredMemory, DesiredPause, UpdateSession, first_record
from rl_plane.protocol.strict_json import parse_json_object
from rl_plane.protocol.subjects import Entry
from rl_plane.protocol.update_requests import UpdateCall
from rl_plane.protocol.validation import parse_body
from rl_plane.protocol.versions import TensorSpec
from rl_plane.transports.http.wire import parse_source, signed_until
from rl_plane.weights import delta_codec
from rl_plane.weights.allowed_urls import Allowed, shown
from rl_plane.weights.manifest import Manifest, pack
from rl_plane.weights.safetensors_file import parse_header
from tests.fuzz.mutations import as_json, of_bytes, of_message, packed
from worker.engines.common.lora import parse_lora

DATA_BYTES = 64


@dataclass(frozen=True)
class Target:
    """A parser, and a sound input. `encode` None: the input is bytes already."""

    parse: Callable[[bytes], object]
    sound: Any
    encode: Callable[[Any], bytes] | None = as_json

    def mutated(self, pick: random.Random) -> bytes:
        if self.encode is not None:
            return of_message(pick, self.sound, self.encode)
        data: bytes = self.sound
        for _ in range(pick.randrange(4)):
            data = of_bytes(pick, data)
        return data


def _entry(decode_value: Callable[[bytes], object]) -> Callable[[bytes], object]:
    return lambda data: decoded(Entry("fuzzed", data, 1), decode_value)


def _header(data: bytes) -> object:
    return parse_header(data, DATA_BYTES, file="fuzzed", field="transport.path")


def _delta(data: bytes) -> None:
    buffer = bytearray(DATA_BYTES)
    delta_codec.check(data, DATA_BYTES, 2).apply(buffer)
    assert len(buffer) == DATA_BYTES


def _source(data: bytes) -> None:
    """Each URL that is taken leads to the one allowed place."""
    source = parse_source(parse_json_object(data), _ALLOWED)
    for url in source.urls.values() if source.base is None else [source.base]:
        assert shown(url).lower().startswith("https://a.example")
        signed_until(url)


def _manifest(data: bytes) -> object:
    return Manifest.from_wire(parse_json_object(data))


_MANIFEST = Manifest(pack([("a", TensorSpec("F32", (4, 4))), ("b", TensorSpec("BF16", (3,)))], 128))
_ALLOWED = Allowed.of(["https://a.example/w"])
_SIGNED = "https://a.example/w/x.safetensors?X-Amz-Date=20260101T000000Z&X-Amz-Expires=60"
_SOURCE = {"backend": "http", "urls": {"model.safetensors": _SIGNED}, "headers": {"Authorization": "Bearer x"}}
_TENSOR = {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, DATA_BYTES]}
_LORA = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "none"}
_REQUEST = {"v": 1, "op": "state", "id": "x", "epoch": 3, "targets": ["0" * 16], "fence": 5, "body": {"wait_s": 1}}
_UPDATE = {
    "transport": {"backend": "filesystem", "path": "/weights/step_1"},
    "version": "step_1",
    "policy": {"min_ready": 1, "pause_mode": "keep", "canary": {"sequences": [[1, 2, 3]]}},
    "target": {"kind": "lora", "op": "load", "name": "a"},
}
_MEMBER = Member("0" * 16, "i", "server", 7, 1, {"model": "m", "model_path": "/m", "world_size": 1})
_NOTICE = {"op": "pause", "who": "trainer@host:1", "key": "U" * 56, "outcome": "ok"}
_SESSION = UpdateSession("u", "l", {"policy": {}}, "blake3:0", True, {"0" * 16: "i"}, 120)

TARGETS = {
    "safetensors header": Target(_header, {"a": _TENSOR, "__metadata__": {"format": "pt"}}),
    "manifest": Target(_manifest, _MANIFEST.to_wire()),
    "delta": Target(_delta, delta_codec.nothing(DATA_BYTES, 2), None),
    "adapter config": Target(lambda data: parse_lora(parse_json_object(data)), _LORA),
    "URLs": Target(_source, _SOURCE),
    "JSON body": Target(lambda data: parse_body(UpdateCall, parse_json_object(data)), _UPDATE),
    "JSON message": Target(lambda data: request_from_wire(decode(data)), _REQUEST),
    "msgpack message": Target(lambda data: request_from_wire(decode(data)), _REQUEST, packed),
    "notice": Target(OpNotice.decode, _NOTICE, packed),
    "record": Target(_entry(DecisionRecord.decode), first_record("blake3:0").to_wire()),
    "pause": Target(_entry(DesiredPause.decode), DesiredPause(True).to_wire()),
    "memory": Target(_entry(DesiredMemory.decode), DesiredMemory(frozenset({"weights"})).to_wire()),
    "session": Target(_entry(UpdateSession.decode), _SESSION.to_wire()),
    "canary history": Target(_entry(CanaryHistory.decode), CanaryHistory().to_wire()),
    "history": Target(_entry(UpdateEntry.decode), UpdateEntry("u", "l", "committed").encode(), None),
    "member": Target(lambda data: Member.from_entry(Entry("w.x", data, 1)), _MEMBER.to_record(), None),
}


def check(target: str, data: bytes) -> None:
    """Parses the input. Raises any error but a typed one."""
    try:
        TARGETS[target].parse(data)
    except PlaneError as error:
        if error.code == PlaneError.code:
            raise AssertionError(f"{target}: an internal error: {error}") from error


def fuzz(seed: int, inputs: int) -> None:
    """Parses so many mutated inputs of each target. The error at the first bad one names it."""
    for name, target in TARGETS.items():
        pick = random.Random(f"{seed} {name}")
        for _ in range(inputs):
            data = target.mutated(pick)
            try:
                check(name, data)
            except Exception as error:
                raise AssertionError(f'new case: {{"target": "{name}", "hex": "{data.hex()}"}}') from error
