"""The JSON form of the values in the state bucket, which follows from the fields of their classes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any, Self

from pydantic import ConfigDict, TypeAdapter


class Stored:
    """The base of a dataclass that the state bucket and messages carry."""

    __slots__ = ()
    __pydantic_config__ = ConfigDict(extra="forbid")

    def to_wire(self) -> dict[str, Any]:
        """The fields as JSON values."""
        wire: dict[str, Any] = self._adapter().dump_python(self, mode="json")
        return wire

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Self:
        """The value with these fields. ValueError: a field is unknown, missing or of another type."""
        value: Self = cls._adapter().validate_python(wire)
        return value

    def encode(self) -> bytes:
        return json.dumps(self.to_wire()).encode()

    @classmethod
    def decode(cls, data: bytes) -> Self:
        return cls.from_wire(json.loads(data))

    @classmethod
    @cache
    def _adapter(cls) -> TypeAdapter[Any]:
        """Built when it is first needed: it takes milliseconds, and a process needs few of them."""
        return TypeAdapter(cls)
