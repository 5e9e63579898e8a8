"""The names that a request's `model` may have."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from rl_plane.errors import NotFound
from rl_plane.membership.core import Member
from rl_plane.protocol.pooling import PoolingTask
from rl_plane.protocol.record import DecisionRecord


@dataclass(frozen=True, slots=True)
class ServedModels:
    """The models of the fleet, as of its members and its record."""

    names: tuple[str, ...]
    """The base models that every member serves."""
    adapters: tuple[str, ...]
    """The committed adapters. A base model of the same name has precedence."""
    max_model_len: int | None
    """The shortest of the members'."""
    root: str | None
    """The path of the base model on the workers, if it is the same on all."""
    pools: PoolingTask | None = None
    """The task of the members, if all serve one pooling model. None: they generate."""
    labels: tuple[str, ...] = ()
    """The names of a classifier's labels."""

    @classmethod
    def of(cls, members: Collection[Member], record: DecisionRecord | None) -> ServedModels:
        sets = [_names(member.info.get("model")) for member in members]
        names = set.intersection(*sets) if sets else set()
        lengths = [member.info.get("max_model_len") for member in members]
        shortest = min((length for length in lengths if isinstance(length, int)), default=None)
        adapters = set(record.adapters) - names if record is not None else set()
        paths = {str(path) for member in members if (path := member.info.get("model_path"))}
        root = paths.pop() if len(paths) == 1 else None
        tasks: set[PoolingTask | None] = {_pooling_task(member) for member in members}
        labels = {tuple(map(str, member.info.get("labels") or ())) for member in members}
        return cls(
            tuple(sorted(names)),
            tuple(sorted(adapters)),
            shortest,
            root,
            tasks.pop() if len(tasks) == 1 else None,
            labels.pop() if len(labels) == 1 else (),
        )

    @property
    def base(self) -> str:
        return self.names[0] if self.names else ""

    def serves(self, asked: str | None) -> bool:
        return asked is None or asked in self.names or asked in self.adapters

    def name_of(self, asked: str | None) -> str:
        """The reply's `model` for a request that asks for this one. Raises NotFound."""
        if asked is None:
            return self.base
        if not self.serves(asked):
            known = self.names + self.adapters
            raise NotFound(
                f"there is no model {asked[:200]!r}; there is {', '.join(known) or 'none'}",
                field="model",
                models=list(known),
                fix="name one of `models`, or leave it out",
            )
        return asked

    def listed(self, created: int) -> dict[str, Any]:
        """The reply of `/v1/models`."""
        parents = {**dict.fromkeys(self.names), **dict.fromkeys(self.adapters, self.base)}
        rows = [
            {
                "id": name,
                "object": "model",
                "created": created,
                "owned_by": "rl_plane",
                "parent": parent,
                "root": self.root if parent is None and self.root else name,
                "max_model_len": self.max_model_len,
            }
            for name, parent in parents.items()
        ]
        return {"object": "list", "data": rows}


def _pooling_task(member: Member) -> PoolingTask | None:
    task = member.info.get("task")
    return task if task in ("classify", "embed") else None


def _names(model: Any) -> set[str]:
    return set(model) if isinstance(model, (list, tuple)) else {str(model)} if model else set()
