"""The HTTP dialects of trainers' clients, on the facade's listener. Each dialect translates its routes to the fleet's
ops, and is one file or one folder with a `mount(routes, context)`. See docs/dialects.md.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable

from frontend.dialects.common.context import DialectContext
from frontend.server.shared_routes import SharedRoutes
from rl_plane.errors import InvalidRequest
from rl_plane.protocol.dialects import DIALECTS


def mount_dialects(routes: SharedRoutes, names: Iterable[str], context: DialectContext) -> None:
    """Adds the routes of these dialects, in the order of the table. Raises InvalidRequest for an unknown dialect."""
    wanted = set(names)
    if unknown := sorted(wanted - DIALECTS.keys()):
        raise InvalidRequest(
            f"no such dialect: {unknown}", field="dialects", fix=f"use some of {', '.join(DIALECTS)}"
        )
    for name, module in DIALECTS.items():
        if name in wanted:
            routes.tag = name
            importlib.import_module(module).mount(routes, context)
