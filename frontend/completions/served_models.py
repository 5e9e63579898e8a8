"""The names that a request's `model` may have, of one component."""

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
    """The models of one component, as of its members and its record."""

    component: str
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
    def of(cls, component: str, members: Collection[Member], record: DecisionRecord | None) -> ServedModels:
        sets = [names_of(member) for member in members]
        names = set.intersection(*sets) if sets else set()
        lengths = [member.info.get("max_model_len") for member in members]
        shortest = min((length for length in lengths if isinstance(length, int)), default=None)
        adapters = set(record.adapters) - names if record is not None else set()
        paths = {str(path) for member in members if (path := member.info.get("model_path"))}
        root = paths.pop() if len(paths) == 1 else None
        tasks: set[PoolingTask | None] = {_pooling_task(member) for member in members}
        labels = {tuple(map(str, member.info.get("labels") or ())) for member in members}
        return cls(
            component,
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

    @property
    def all_names(self) -> tuple[str, ...]:
        return self.names + self.adapters

    def serves(self, asked: str | None) -> bool:
        return self._meant_by(asked) is not None

    def _meant_by(self, asked: str | None) -> str | None:
        """The model or adapter that a request means. None: it is not served here. The component's name means the base,
        and `component/model` one of its models, unless a model is called so."""
        if asked is None or asked in self.all_names:
            return asked if asked is not None else self.base
        if asked == self.component:
            return self.base
        name = asked.removeprefix(self.component + "/")
        return name if name in self.all_names else None

    def adapter_of(self, asked: str | None) -> str | None:
        """The adapter that a request means. None: it means the base."""
        meant = self._meant_by(asked)
        return meant if meant in self.adapters else None

    def name_of(self, asked: str | None) -> str:
        """The reply's `model` for a request that asks for this one. Raises NotFound."""
        if asked is None:
            return self.base
        if not self.serves(asked):
            known = self.all_names
            raise NotFound(
                f"there is no model {asked[:200]!r}; there is {', '.join(known) or 'none'}",
                field="model",
                models=list(known),
                fix="name one of `models`, or leave it out",
            )
        return asked

    def listed(self, created: int, record: DecisionRecord | None) -> dict[str, Any]:
        """The reply of `/v1/models`. `record`: it has the committed versions."""
        held = {**dict.fromkeys(self.names, record.version), **record.held.adapters} if record is not None else {}
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
                "component": self.component,
                "weight_version": version.to_wire() if (version := held.get(name)) is not None else None,
            }
            for name, parent in parents.items()
        ]
        return {"object": "list", "data": rows}


def _pooling_task(member: Member) -> PoolingTask | None:
    task = member.info.get("task")
    return task if task in ("classify", "embed") else None


def names_of(member: Member) -> set[str]:
    """The names of the base model that a worker serves."""
    model = member.info.get("model")
    return set(model) if isinstance(model, (list, tuple)) else {str(model)} if model else set()
