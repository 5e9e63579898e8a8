"""The place of one rank in a group of the trainer and the ranks of engines, parsed from `init_transport`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import ConfigDict, Field

from rl_plane.errors import InvalidRequest
from rl_plane.protocol.validation import MAX_TIMEOUT_S, PRINTABLE, Body, parse_body

RECEIVE_TIMEOUT_S = 300.0
"""The time for a whole update in seconds, from the moment at which receivers listen. It bounds how long they wait for a
trainer that gathers and sends."""
MAX_NAME_CHARS = 256
MAX_PORT = 65_535
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
    secret: str = field(default="", repr=False)
    """The group's secret, which a rank proves to the trainer's PeerLiveness."""
    device: str | None = None
    """The device of nccl's buckets; None for host memory."""
    form: Literal["plane", "torch"] = "plane"
    """`torch`: the trainer has made the group by `init_process_group("tcp://…", group_name=…)`."""
    fleet_ranks: int | None = None
    """For the form `torch`: how many ranks of the group belong to the fleet."""
    rendezvous: Literal["torch", "vllm"] = "torch"
    """For the form `torch`, with nccl: the way in which the ranks find each other. `vllm`: see `vllm_rendezvous`."""

    @classmethod
    def of_worker(cls, config: Mapping[str, Any], backend: str, devices: Sequence[str | None]) -> list[Place]:
        """Parses the body of `init_transport` in a worker. Raises InvalidRequest for a wrong field.

        Returns a place for each member that this worker has in the group. The first one receives. `devices`: nccl's
        device of each member; None for host memory. A shorter list means that the rest has none.
        """
        given = parse_body(_GroupConfig, dict(config))
        ranks = {"rank_offset": given.rank_offset + given.members - 1}
        if given.form == "torch":
            ranks["fleet_ranks"] = given.fleet_ranks or given.world_size
            if given.lifeline_port is not None:
                raise InvalidRequest(
                    "a group of form torch has no lifelines",
                    field="lifeline_port",
                    fix="leave out lifeline_port or form",
                )
        if given.rendezvous == "vllm" and (given.form != "torch" or backend != "nccl"):
            raise InvalidRequest(
                f"vLLM's rendezvous forms a group of nccl and of form torch, not of {backend} and {given.form}",
                field="rendezvous",
                fix="leave it out, or send backend nccl and form torch",
            )
        if given.lifeline_port is not None and not given.secret:
            raise InvalidRequest(
                "a group with lifelines needs a secret",
                field="secret",
                fix="add the secret that the trainer's lifelines ask for, or leave out lifeline_port",
            )
        for name, value in ranks.items():
            if value >= given.world_size:
                raise InvalidRequest(
                    f"{name} is {value}, and world_size {given.world_size}",
                    field=name,
                    fix=f"give a whole number from 1 to {given.world_size - 1}",
                )
        fields = given.model_dump(exclude={"backend", "rank_offset", "members", "check_only"})
        on = [*devices, *[None] * given.members]
        return [
            cls(backend=backend, device=on[number], rank=given.rank_offset + number, **fields)
            for number in range(given.members)
        ]


class _GroupConfig(Body):
    """The body of `init_transport` as the plane hands it to one worker."""

    model_config = ConfigDict(strict=True)

    backend: str = ""
    group: str = Field(min_length=1, max_length=MAX_NAME_CHARS, pattern=PRINTABLE)
    master_address: str = Field(min_length=1, max_length=MAX_NAME_CHARS, pattern=PRINTABLE)
    master_port: int = Field(ge=1, le=MAX_PORT)
    world_size: int = Field(ge=2, le=MAX_WORLD_SIZE)
    rank_offset: int = Field(ge=1)
    members: int = Field(default=1, ge=1, le=MAX_WORLD_SIZE)
    """The ranks of the group that this worker takes: one, or, in a group that the trainer has formed, one for each rank
    of its engine."""
    timeout_s: float = Field(default=RECEIVE_TIMEOUT_S, gt=0, le=MAX_TIMEOUT_S)
    lifeline_port: int | None = Field(default=None, ge=1, le=MAX_PORT)
    secret: str = Field(default="", max_length=MAX_NAME_CHARS, pattern=PRINTABLE)
    form: Literal["plane", "torch"] = "plane"
    fleet_ranks: int | None = Field(default=None, ge=1)
    rendezvous: Literal["torch", "vllm"] = "torch"
    check_only: bool = False
    """Join nothing, and only refuse what the worker can't join."""
