"""Translates vLLM's `init_info` and `update_info` to bodies of the fleet's ops. No I/O.

The frontend's dialects and `rl_plane.publish.integrations.vllm_client` use it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rl_plane.errors import Conflict, InvalidRequest, Locked, PlaneError, Unsupported
from rl_plane.protocol.update_requests import MAX_PART_TIMEOUT_S, PART_TIMEOUT_S
from rl_plane.protocol.validation import invalid_from_pydantic

GROUP = "vllm"
"""The name of the trainer's group. vLLM's clients form one group and give it no name."""
TORCH_BACKENDS = ("gloo", "nccl")
PACKED_BYTES = 1 << 30
"""The default of vLLM."""
MAX_PACKED_BYTES = 1 << 40
ANOTHER_WAY = (
    "form a torch group (init_info.backend gloo or nccl), name a directory (weight_dir), or publish with "
    "rl_plane.publish"
)
IPC = "ipc"
"""The backend of a trainer that shares memory of its GPUs."""
IPC_INIT = frozenset({"packed"})
"""The fields of `init_info` of such a trainer, which forms no group."""
OWN_NCCL = "nccl"
"""The backend of a group that the trainer forms by vLLM's own NCCL engine."""

STAGED_S = 10.0
"""The time in seconds after an update's own time-out, in which the workers stage its last tensors."""

P = TypeVar("P", bound="VllmInfo")


class VllmInfo(BaseModel):
    """A part of a vLLM body. Unknown fields are dropped, because vLLM's clients send fields of newer servers."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)


class InitInfo(VllmInfo):
    """`init_info` of a trainer that broadcasts"""

    backend: str | None = None
    """`gloo` or `nccl`: the trainer's ranks form a torch process group with the fleet's. None: the trainer forms the
    group by vLLM's own NCCL engine."""
    group_name: str | None = Field(None, min_length=1, max_length=200)
    """The trainer's name for the group, by which the ranks find each other. None: `vllm`, or `prime-rl` for
    prime-rl."""
    master_address: str | None = Field(None, min_length=1, max_length=255)
    master_port: int | None = Field(None, ge=1, le=65_535)
    rank_offset: int = Field(1, ge=1)
    """The number of the trainer's ranks, which have the first numbers."""
    world_size: int = Field(ge=2)
    """The number of the trainer's ranks and the fleet's ranks together."""
    timeout_s: float | None = Field(None, gt=0)
    """Seconds until every rank must have the tensors of one `update_weights`, at most an hour. None: the frontend's
    `--part-timeout-s` (300)."""
    packed: bool = False
    packed_buffer_size_bytes: int = Field(PACKED_BYTES, gt=0, le=MAX_PACKED_BYTES)
    packed_num_buffers: int = Field(2, ge=1)
    """The number of buffers that the trainer has in flight. It does not matter to a receiver."""
    nccl_unique_id_b64: str | None = None
    """Not supported."""


class UpdateInfo(VllmInfo):
    """`update_info`: tensors that the trainer broadcasts now, in this order"""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    packed: bool | None = None
    """The default is the value of `init_info`."""


@dataclass(frozen=True)
class Transfer:
    """The way in which a trainer's tensors arrive."""

    backend: str
    group: str
    packed: bool
    bucket_bytes: int
    timeout_s: float
    """The time-out of each part. With a `format`: of the whole update."""
    format: str | None = None
    """The format in which the trainer describes its tensors in the group, before they come. None: it announces them by
    calls."""

    @classmethod
    def by_ipc(cls, timeout_s: float) -> Transfer:
        """The transfer of a trainer that shares memory of its GPUs."""
        return cls(IPC, "", packed=False, bucket_bytes=PACKED_BYTES, timeout_s=min(timeout_s, MAX_PART_TIMEOUT_S))

    @property
    def transport(self) -> dict[str, Any]:
        if self.backend == IPC:
            return {"backend": IPC, "in_parts": True}
        how = {"in_parts": True} if self.format is None else {"format": self.format}
        return {"backend": self.backend, "group": self.group, **how}

    @property
    def policy(self) -> dict[str, Any]:
        """The fields of a prepared update's policy that follow from the transfer."""
        return {} if self.format is None else {"prepare_timeout_s": self.timeout_s + STAGED_S}

    @classmethod
    def of(
        cls, info: InitInfo, group: str, timeout_s: float = PART_TIMEOUT_S, format: str | None = None
    ) -> Transfer:
        """Builds it from `init_info`. `group`, `timeout_s`: the values that the trainer has not given."""
        return cls(
            info.backend or OWN_NCCL,
            info.group_name or group,
            info.packed,
            info.packed_buffer_size_bytes,
            min(info.timeout_s or timeout_s, MAX_PART_TIMEOUT_S),
            format,
        )


def parse_part(model: type[P], given: Mapping[str, Any], part: str) -> P:
    """Parses one part of a body. `part`: its field in the body, for error messages."""
    try:
        return model.model_validate(given)
    except ValidationError as error:
        raise invalid_from_pydantic(error, part) from error


def check_init(info: InitInfo, workers: Iterable[Mapping[str, Any]]) -> None:
    """Refuses a group that the fleet's receivers can't join, because its trainer would wait forever. `workers`: their
    rows of `describe`."""
    if info.nccl_unique_id_b64 is not None:
        raise _unsupported("a group by nccl_unique_id_b64 is not supported here", "init_info.nccl_unique_id_b64")
    if info.backend is None:
        rows = list(workers)
        lacking = sorted(str(row["instance_id"]) for row in rows if OWN_NCCL not in row["transports"])
        if lacking:
            raise _unsupported(
                f"vLLM's own NCCL transfer can't reach this fleet: {len(lacking)} of {len(rows)} workers have no GPU "
                f"or no NCCL ({', '.join(lacking[:3])})",
                "init_info.backend",
            )
    elif info.backend not in TORCH_BACKENDS:
        raise _unsupported(f"the backend {info.backend[:64]!r} is not supported here", "init_info.backend")
    for name in ("master_address", "master_port"):
        if getattr(info, name) is None:
            raise InvalidRequest(
                f"init_info.{name} is missing", field=f"init_info.{name}", fix="say where the trainer listens"
            )


def init_body(info: InitInfo, transfer: Transfer) -> dict[str, Any]:
    """The body of `init_transport`."""
    return {
        "backend": transfer.backend,
        "form": "torch",
        "rendezvous": "vllm" if info.backend is None else "torch",
        "group": transfer.group,
        "master_address": info.master_address,
        "master_port": info.master_port,
        "world_size": info.world_size,
        "rank_offset": info.rank_offset,
        "timeout_s": transfer.timeout_s,
    }


def one_of_all(given: Any) -> dict[str, Any]:
    """The `update_info` of every rank, which must be the same for all."""
    if isinstance(given, dict):
        return given
    if isinstance(given, list) and given and all(isinstance(one, dict) for one in given):
        if any(one != given[0] for one in given):
            raise Unsupported(
                "update_info differs from rank to rank, and all ranks of this fleet receive the same",
                field="update_info",
                fix="send one object",
            )
        first: dict[str, Any] = given[0]
        return first
    raise InvalidRequest(
        "update_info is not an object", field="update_info", fix="send names, dtype_names and shapes"
    )


def check_entries(entries: Sequence[Any], ranks: int) -> None:
    """Checks that an `update_info` list has one entry for each rank of the fleet."""
    if len(entries) != ranks:
        raise InvalidRequest(
            f"update_info has {len(entries)} entries, and the fleet has {ranks} ranks",
            field="update_info",
            fix=f"send one object; or {ranks} that are equal",
        )


def parse_update(info: Mapping[str, Any]) -> UpdateInfo:
    for name in ("ipc_handles", "ipc_handles_pickled"):
        if name in info:
            raise _unsupported(f"{name} are taken by the HTTP routes of a frontend only", f"update_info.{name}")
    return parse_part(UpdateInfo, info, "update_info")


def part_body(part: UpdateInfo, transfer: Transfer) -> dict[str, Any]:
    """The body of `receive_weights_part`."""
    packed = transfer.packed if part.packed is None else part.packed
    layout = {"layout": "packed", "bucket_bytes": transfer.bucket_bytes} if packed else {"layout": "each"}
    tensors = {"names": part.names, "dtypes": part.dtype_names, "shapes": part.shapes}
    return {**tensors, **layout, "timeout_s": transfer.timeout_s}


def under_way(update_id: str) -> Conflict:
    """The error of a second `start_weight_update`. vLLM refuses it too: the first one must be finished before."""
    return Conflict(
        "a weight update is under way: start_weight_update was called before",
        holder=update_id,
        fix="finish_weight_update commits it; init_weight_transfer_engine drops it; silence ends it after some minutes",
    )


def begun_before(error: Locked, update_id: str | None) -> PlaneError:
    """The error to answer with: the given one, unless the caller's own update locks the fleet."""
    if update_id is None or error.facts.get("holder") != update_id:
        return error
    return under_way(update_id)


def unknown_of(model: type[VllmInfo], given: Iterable[str]) -> list[str]:
    return sorted(set(given) - model.model_fields.keys())


def _unsupported(message: str, field: str) -> Unsupported:
    return Unsupported(message, field=field, fix=ANOTHER_WAY)
