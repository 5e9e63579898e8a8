"""Where one rank stands in a group of a trainer and the ranks of engines, and what `init_transport` may say of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from rl_plane.errors import InvalidRequest
from rl_plane.protocol.validation import MAX_TIMEOUT_S

RECEIVE_TIMEOUT_S = 300.0
"""Of a whole update, from where the receivers listen: so long nobody waits for a trainer that gathers and sends."""
MAX_NAME_BYTES = 256
MAX_WORLD_SIZE = 1 << 16

FORM_AGAIN = "form the group again (init_transport), and send the update again"


@dataclass(frozen=True, slots=True)
class Place:
    """One rank's place in a group."""

    backend: str
    group: str
    """Of form `plane`, never used before: each forming has a name of its own."""
    master_address: str
    master_port: int
    world_size: int
    rank: int
    timeout_s: float = RECEIVE_TIMEOUT_S
    lifeline_port: int | None = None
    """Where the trainer's PeerLiveness listen; None: there are none."""
    device: str | None = None
    """Where nccl's buckets are; None: in host memory."""
    form: Literal["plane", "torch"] = "plane"
    """`torch`: as `init_process_group("tcp://…", group_name=…)` makes one on the trainer's side."""
    fleet_ranks: int | None = None
    """Of form `torch`: so many of its ranks are the fleet's."""

    @classmethod
    def of_worker(cls, config: Mapping[str, Any], backend: str, device: str | None = None) -> Place:
        """From what `init_transport` says."""
        known = {field.name for field in fields(cls)} - {"rank", "device"} | {"rank_offset"}
        for key in config:
            if key not in known:
                raise InvalidRequest(
                    f"{backend} has no field {key}", field=key, fix=f"use {', '.join(sorted(known))}"
                )
        for key in ("master_address", "group"):
            value = config.get(key)
            if not (isinstance(value, str) and value.isprintable() and 0 < len(value.encode()) <= MAX_NAME_BYTES):
                raise InvalidRequest(
                    f"{key} must be a text", field=key, fix="give what the trainer's sender announces"
                )
        port = _number(config, "master_port", 1, 65_535)
        world_size = _number(config, "world_size", 2, MAX_WORLD_SIZE)
        rank = _number(config, "rank_offset", 1, world_size - 1)
        timeout_s = config.get("timeout_s", RECEIVE_TIMEOUT_S)
        if (
            isinstance(timeout_s, bool)
            or not isinstance(timeout_s, int | float)
            or not 0 < timeout_s <= MAX_TIMEOUT_S
        ):
            raise InvalidRequest(
                f"timeout_s is {timeout_s!r}",
                field="timeout_s",
                fix=f"seconds, above 0 and at most {MAX_TIMEOUT_S:g}",
            )
        lifeline = None if config.get("lifeline_port") is None else _number(config, "lifeline_port", 1, 65_535)
        form = config.get("form", "plane")
        if form not in ("plane", "torch"):
            raise InvalidRequest(
                f"form is {form!r}", field="form", fix="plane, or torch for a trainer's own group"
            )
        if form == "torch" and lifeline is not None:
            raise InvalidRequest(
                "a group of form torch has no lifelines", field="lifeline_port", fix="leave it out, or the form"
            )
        return cls(
            backend,
            config["group"],
            config["master_address"],
            port,
            world_size,
            rank,
            float(timeout_s),
            lifeline,
            device,
            form,
            None if form == "plane" else _number(config, "fleet_ranks", 1, world_size - 1),
        )


def _number(config: Mapping[str, Any], name: str, least: int, most: int) -> int:
    value = config.get(name)
    if type(value) is not int or not least <= value <= most:
        raise InvalidRequest(f"{name} is {value!r}", field=name, fix=f"a whole number from {least} to {most}")
    return value
