"""The place of one rank in a group of the trainer and the ranks of engines, parsed from `init_transport`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from rl_plane.errors import InvalidRequest
from rl_plane.protocol.validation import MAX_TIMEOUT_S

RECEIVE_TIMEOUT_S = 300.0
"""The time for a whole update in seconds, from the moment at which receivers listen. It bounds how long they wait for a
trainer that gathers and sends."""
MAX_NAME_BYTES = 256
MAX_WORLD_SIZE = 1 << 16

FORM_AGAIN = "form the group again (init_transport), and send the update again"


@dataclass(frozen=True, slots=True)
class Place:
    """One rank's place in a group."""

    backend: str
    group: str
    """The group's name. For the form `plane` a name is used once: each forming has its own."""
    master_address: str
    master_port: int
    world_size: int
    rank: int
    timeout_s: float = RECEIVE_TIMEOUT_S
    lifeline_port: int | None = None
    """The port of the trainer's PeerLiveness; None if it has none."""
    device: str | None = None
    """The device of nccl's buckets; None for host memory."""
    form: Literal["plane", "torch"] = "plane"
    """`torch`: the trainer has made the group by `init_process_group("tcp://…", group_name=…)`."""
    fleet_ranks: int | None = None
    """For the form `torch`: how many ranks of the group belong to the fleet."""

    @classmethod
    def of_worker(cls, config: Mapping[str, Any], backend: str, device: str | None = None) -> Place:
        """Parses the body of `init_transport` in a worker's rank. Raises InvalidRequest for a wrong field."""
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
                f"form is {form!r}",
                field="form",
                fix="use plane, or torch for a group that the trainer has formed",
            )
        if form == "torch" and lifeline is not None:
            raise InvalidRequest(
                "a group of form torch has no lifelines",
                field="lifeline_port",
                fix="leave out lifeline_port or form",
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
