"""Chooses the component that answers a request, by the request's `model`. Pure.

| `model` | the component |
|---|---|
| the name of a component | this one |
| `component/model`, and the component serves the model | this one |
| a model that one component serves | this one |
| a model that several components serve | InvalidRequest |
| `component/…` of any other kind | this one: its own error says what is missing |
| any other | NotFound; NoWorkers while the models of a component are unknown |
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from rl_plane.errors import InvalidRequest, NotFound, NoWorkers


@dataclass(frozen=True, slots=True)
class ComponentModels:
    """The names of the models and adapters of one component."""

    component: str
    names: Collection[str]
    """While no worker is there: those of the last one."""
    is_known: bool = True
    """False: the component has had no worker yet, so its names are not known."""

    def qualified(self, name: str) -> str:
        """The name by which a request always means this component's model."""
        return f"{self.component}/{name}"

    def has_qualified(self, asked: str) -> bool:
        start = self.qualified("")
        return asked.startswith(start) and asked[len(start) :] in self.names


def component_of(asked: str, served: Sequence[ComponentModels]) -> str:
    """The name of the component that answers. `served`: the frontend's own component first."""
    for one in served:
        if asked == one.component:
            return one.component
    for one in served:
        if one.has_qualified(asked):
            return one.component
    found = [one for one in served if asked in one.names]
    if len(found) > 1:
        names = ", ".join(one.component for one in found)
        choices = [one.qualified(asked) for one in found]
        raise InvalidRequest(
            f"{len(found)} components serve a model {asked[:200]!r}: {names}",
            field="model",
            models=choices,
            fix=f"send {' or '.join(choices)}, or the name of the component",
        )
    for one in found or [one for one in served if asked.startswith(one.qualified(""))]:
        return one.component
    raise _unknown(asked, served)


def listed_name(component: str, name: str, served: Sequence[ComponentModels]) -> str:
    """The shortest name by which a request means this model of this component."""
    try:
        is_plain = component_of(name, served) == component
    except InvalidRequest:
        is_plain = False
    return name if is_plain else f"{component}/{name}"


def _unknown(asked: str, served: Sequence[ComponentModels]) -> NotFound | NoWorkers:
    names = [listed_name(one.component, name, served) for one in served for name in one.names]
    there = f"there is {', '.join(names) or 'none'}"
    if empty := [one.component for one in served if not one.is_known]:
        return NoWorkers(
            f"no component serves a model {asked[:200]!r}: {there}. {', '.join(empty)} has had no worker yet, "
            "so its models are not known",
            field="model",
            models=names,
            fix=f"start a worker of {' or '.join(empty)}, or name one of `models`",
            retry_after_s=1.0,
        )
    return NotFound(
        f"there is no model {asked[:200]!r}; {there}",
        field="model",
        models=names,
        fix="name one of `models` or a component, or leave it out",
    )
