"""The body of `/collective_rpc`, which clients of several dialects send."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import Field

from frontend.server.shared_routes import Fields, report


class RpcFields(Fields):  # type: ignore[no-redef]  # mypy's model of __init__ has a kwargs of its own
    method: str = Field(min_length=1, max_length=200)
    """One of SkyRL's: `skyrl_start_weight_update`, `update_weights_nccl`, `skyrl_finish_weight_update`; or prime-rl's
    `update_weights_from_path`."""
    args: list[Any] = Field(default_factory=list, max_length=8)
    named: dict[str, Any] = Field(default_factory=dict, alias="kwargs")
    timeout: float | None = None
    """Not read: each phase has its own bound."""

    def report_unused(self, path: str, unused: Iterable[str]) -> None:
        """Logs the fields without effect. `unused`: names in `kwargs`."""
        if self.timeout is not None:
            report(path, "timeout", "each phase of an update has its own")
        for name in unused:
            report(path, f"kwargs.{name}")
