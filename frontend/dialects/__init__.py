"""The HTTP dialects of trainers' clients, on the facade's listener. Each dialect translates its routes to the fleet's
ops, and is one file or one folder with a `mount(routes, context)`. See docs/dialects.md.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable

from frontend.dialects.common.context import DialectContext
from frontend.server.shared_routes import SharedRoutes

MODULES = {
    "vllm": "frontend.dialects.vllm.vllm_routes",
    "sglang": "frontend.dialects.sglang.sglang_routes",
    "prime-rl": "frontend.dialects.prime_rl",
}


def mount_dialects(routes: SharedRoutes, names: Iterable[str], context: DialectContext) -> None:
    """Adds the routes of these dialects, in the order of the table."""
    wanted = set(names)
    for name, module in MODULES.items():
        if name in wanted:
            routes.tag = name
            importlib.import_module(module).mount(routes, context)
