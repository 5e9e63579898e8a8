"""The components that one listener serves, and the choice of one for each request."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any

from frontend.completions.model_choice import ComponentModels, component_of, listed_name
from frontend.completions.service import Generation
from rl_plane.errors import NotFound, NoWorkers

ChooseComponent = Callable[[str | None], Awaitable[Generation]]
"""Returns the generation service of the component that answers a request with this `model`."""


class ComponentChooser:
    """The components of one listener, each by its generation service. The frontend's own is the first."""

    def __init__(self, components: Sequence[Generation]) -> None:
        self.own = components[0]
        self._by_name = {one.component: one for one in components}

    @property
    def names(self) -> Collection[str]:
        return self._by_name.keys()

    async def choose(self, model: str | None) -> Generation:
        """The component that answers a request with this `model`. Each route that reads `model` calls this.

        Raises:
            InvalidRequest: several components serve it.
            NotFound: no component serves it.
            NoWorkers: no component is known to serve it, and one has had no worker yet.
        """
        if model is None or len(self._by_name) == 1:
            return self.own
        try:
            return self._by_name[component_of(model, self._models())]
        except (NotFound, NoWorkers):
            # An adapter may have been loaded just now.
            await asyncio.gather(*(one.committed.try_read() for one in self._by_name.values()))
        return self._by_name[component_of(model, self._models())]

    def named(self, name: str | None) -> Generation:
        """The component of this name. None: the frontend's own."""
        if name is None:
            return self.own
        if name not in self._by_name:
            raise NotFound(
                f"{name[:64]!r} is no component that is served here",
                field="component",
                fix=f"name {' or '.join(self._by_name)}, or start the frontend with --also-serve",
            )
        return self._by_name[name]

    def list_models(self) -> dict[str, Any]:
        """The reply of `/v1/models`. Each id is a `model` that a request may have."""
        served = self._models()
        rows: list[dict[str, Any]] = []
        for name, one in self._by_name.items():
            for row in one.list_models()["data"]:
                for key in ("id", "parent"):
                    if row[key]:
                        row[key] = listed_name(name, row[key], served)
                rows.append(row)
        return {"object": "list", "data": rows}

    def _models(self) -> list[ComponentModels]:
        return [one.known_models() for one in self._by_name.values()]
