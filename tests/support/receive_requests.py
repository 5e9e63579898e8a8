"""Builds the requests that tests open at an engine or a receiver."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rl_plane.protocol.update_requests import BaseTarget, LoraTarget, ReceiveRequest, Transport


class NamedRequest(NamedTuple):
    """The first two arguments of `ReceivesWeights.open`."""

    staging: str
    request: ReceiveRequest


def named_request(
    staging: str,
    transport: Mapping[str, Any],
    *,
    kind: Literal["base", "lora"] = "base",
    in_place: bool = False,
    keep: bool = False,
    **more: Any,
) -> NamedRequest:
    target = BaseTarget() if kind == "base" else LoraTarget(kind="lora", op="load", name="adapter")
    request = ReceiveRequest(
        update_id=staging,
        target=target,
        transport=Transport.model_validate(transport),
        encoding=more.pop("encoding", "delta" if more.get("base") is not None else "full"),
        label=staging,
        staging="none" if in_place else "host",
        keep_staged=keep,
        **more,
    )
    return NamedRequest(staging, request)


def files_request(staging: str, path: Path, **more: Any) -> NamedRequest:
    return named_request(staging, {"backend": "filesystem", "path": str(path)}, **more)
